"""Acceptance length of a drafter over the eval shard (`eval.safetensors`); no target model is needed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from consumer.attention import Layout
from consumer.blocks import document_positions
from consumer.drafter import Drafter
from consumer.walk import Acceptance, Answers, Int, walk
from protocol.errors import RequestError

GROUP_TOKENS = 65536  # context rows whose keys and values are held at once
HEAD_ROWS = 512  # rows of logits formed at once


@dataclass(frozen=True)
class EvalRows:
    """The eval shard: answers and the target's features [T, taps * hidden] for their tokens, tap order `taps`.

    max_new_tokens: the limit that the answers were made under; it decides how short the last block of one is.
    """

    answers: Answers
    features: Tensor
    taps: tuple[int, ...]
    max_new_tokens: int


def load_eval_rows(path: Path) -> EvalRows:
    """Read an eval shard. RequestError naming the file when it is not one."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        answers = Answers(*(tensors[name].numpy() for name in ("token_ids", "offsets", "prompt_lengths")))
        taps = tuple(json.loads(metadata["taps"]))
        return EvalRows(answers, tensors["features"], taps, int(metadata["max_new_tokens"]))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise RequestError(f"{path}: not a readable eval shard: {error}") from error


def measure(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    rows: EvalRows,
    *,
    max_new_tokens: int | None = None,
    seed: int = 0,
) -> Acceptance:
    """Walk the drafter over the eval rows (see `consumer.walk`), on the drafter's device.

    embedding, head [V, hidden] of the target, on that device. max_new_tokens: a limit below that of the rows, as if
    the target had been stopped there. Raises RequestError when the rows hold other taps than the drafter reads, or
    stop before the wanted limit.
    """
    limit = rows.max_new_tokens if max_new_tokens is None else max_new_tokens
    if limit > rows.max_new_tokens:
        raise RequestError(
            f"eval.max_new_tokens is {limit} and the eval shard's answers were stopped at {rows.max_new_tokens}: "
            "lower it or make the shard again"
        )
    if rows.taps != drafter.shape.target_layer_ids:
        raise RequestError(
            f"the eval shard holds layers {list(rows.taps)} and the drafter reads "
            f"{list(drafter.shape.target_layer_ids)}: make the shard with the drafter's taps"
        )
    proposer = _Proposer(drafter, embedding, head.to(drafter.compute_dtype), rows)
    return walk(rows.answers, proposer, block_size=drafter.shape.block_size, max_new_tokens=limit, seed=seed)


class _Proposer:
    """Greedy drafts for any prompts at any anchors; each prompt's context is computed once and kept."""

    def __init__(self, drafter: Drafter, embedding: Tensor, head: Tensor, rows: EvalRows) -> None:
        self.drafter, self.embedding, self.head, self.rows = drafter, embedding, head, rows
        self.device = embedding.device
        self.groups = list(_groups(rows.answers.offsets))
        with torch.inference_mode():
            self.contexts = [self._context(group) for group in self.groups]

    def _offsets(self, group: slice) -> Int:
        offsets = self.rows.answers.offsets
        return np.asarray(offsets[group.start : group.stop + 1] - offsets[group.start], np.int64)

    def _context(self, group: slice) -> list[tuple[Tensor, Tensor]]:
        first, last = self.rows.answers.offsets[[group.start, group.stop]].tolist()
        positions = torch.from_numpy(document_positions(self._offsets(group))).to(self.device)
        return self.drafter.context(self.rows.features[first:last].to(self.device), positions)

    @torch.inference_mode()
    def __call__(self, prompts: Int, anchors: Int, sizes: Int) -> NDArray[np.integer]:
        drafts = np.empty((len(prompts), self.drafter.shape.block_size - 1), np.int64)
        for group, context in zip(self.groups, self.contexts, strict=True):
            here = (prompts >= group.start) & (prompts < group.stop)
            if here.any():
                layout = Layout(self._offsets(group), prompts[here] - group.start, anchors[here], sizes[here])
                drafts[here] = self._draft(prompts[here], layout, context)
        return drafts

    def _draft(self, prompts: Int, layout: Layout, context: list[tuple[Tensor, Tensor]]) -> NDArray[np.int64]:
        shape, answers = self.drafter.shape, self.rows.answers
        ids = np.full((len(prompts), shape.block_size), shape.mask_token_id, np.int64)
        ids[:, 0] = answers.token_ids[answers.offsets[prompts] + layout.anchor]
        positions = torch.from_numpy(layout.anchor[:, None] + np.arange(shape.block_size)).to(self.device)
        embedded = self.drafter.embed(self.embedding, torch.from_numpy(ids).to(self.device))
        hidden = self.drafter(embedded, positions, context, layout)[:, 1:].flatten(0, 1)
        best = [(part @ self.head.t()).argmax(dim=-1) for part in hidden.split(HEAD_ROWS)]
        return torch.cat(best).view(len(prompts), -1).cpu().numpy()


def _groups(offsets: Int) -> Iterator[slice]:
    first = 0
    while first < len(offsets) - 1:
        fits = int(np.searchsorted(offsets, offsets[first] + GROUP_TOKENS, side="right")) - 1
        last = max(first + 1, fits)
        yield slice(first, last)
        first = last
