"""Taps: forward hooks that copy the output of chosen decoder layers while the target runs.

The feature of tap id i is the output of decoder layer i, 0-based: `hidden_states[i + 1]` of a Hugging Face model, and
for the last layer the value before the final norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from protocol.errors import RequestError, RunError


class _Enough(Exception):
    """Raised by the last tap's hook: what the target would compute behind it is not needed."""


class Taps:
    """Hooks on `layers[id]` for every id of `ids`; each copies rows straight to their place and keeps no reference."""

    def __init__(self, layers: nn.ModuleList, ids: Sequence[int]) -> None:
        """Raises RequestError for an empty list, a repeated id, or one outside `range(len(layers))`."""
        wrong = [tap for tap in ids if not 0 <= tap < len(layers)]
        if not ids or wrong or len(set(ids)) != len(ids):
            what = f"{wrong[0]} is not a layer" if wrong else "ids must be given, each once"
            raise RequestError(f"drafter.taps = {list(ids)}: {what}; the target has layers 0 to {len(layers) - 1}")
        self.ids = tuple(ids)
        self._counts = [0] * len(ids)
        self._rows: torch.Tensor | None = None
        self._out: torch.Tensor | None = None
        self._to: torch.Tensor | None = None
        self._handles = [layers[tap].register_forward_hook(self._hook(place)) for place, tap in enumerate(ids)]

    def _hook(self, place: int) -> Any:
        def copy_rows(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._out is None or self._rows is None or self._to is None:
                return
            hidden = output[0] if isinstance(output, tuple) else output
            self._counts[place] += 1
            if self._counts[place] == 1:
                width = hidden.shape[-1]
                if width * len(self.ids) != self._out.shape[1]:
                    expected = self._out.shape[1] // len(self.ids)
                    raise RunError(f"tap {self.ids[place]}: the layer's output is {width} wide, not {expected}")
                picked = hidden.detach().reshape(-1, width).index_select(0, self._rows)
                self._out[:, place * width : (place + 1) * width].index_copy_(0, self._to, picked)
            if self.ids[place] == max(self.ids):
                raise _Enough

        return copy_rows

    @contextmanager
    def capture(self, rows: torch.Tensor, out: torch.Tensor, to: torch.Tensor) -> Iterator[None]:
        """While open, one forward pass copies rows `rows` (int64 `[T]`, of the flattened `[B * S, H]`) of every tap to
        rows `to` (int64 `[T]`) of `out` `[.., taps * H]`, tap j in columns `j * H` to `(j + 1) * H`. The pass ends at
        the last tap: the layers behind it, the final norm and what follows in the `with` body do not run.

        Raises RunError, naming the tap, unless each tapped layer ran exactly once.
        """
        self._counts = [0] * len(self.ids)
        self._rows, self._out, self._to = rows, out, to
        try:
            yield
        except _Enough:
            pass
        finally:
            self._rows = self._out = self._to = None
        for tap, count in zip(self.ids, self._counts, strict=True):
            if count != 1:
                raise RunError(f"tap {tap}: decoder layer {tap} was captured {count} times in one forward, not once")

    def close(self) -> None:
        """Removes every hook; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def ending_behind(layers: nn.ModuleList, last: int | None) -> Iterator[None]:
    """While open, a forward pass ends behind layer `last`, as one that is tapped there does; None: it does not."""

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        raise _Enough

    handle = None if last is None else layers[last].register_forward_hook(end)
    try:
        yield
    except _Enough:
        pass
    finally:
        if handle is not None:
            handle.remove()
