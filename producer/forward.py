"""The features of one block: right-padded forward passes over samples of similar length, pad rows dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from producer.padding import batches, launch_bound_tokens
from producer.taps import Taps
from producer.target import Target, on_device, run_text

IntArray = NDArray[np.int32]


class Unwanted(Exception):
    """Nobody wants these features any more."""


def features_of(
    target: Target,
    taps: Taps,
    samples: Sequence[IntArray],
    out: NDArray[np.generic],
    wanted: Callable[[], bool] = lambda: True,
) -> int:
    """`features_into` for a host array, contiguous, in the target's dtype (uint16 words carry bfloat16). All of it is
    there when this returns."""
    if not out.flags.c_contiguous:
        raise ValueError("a features buffer is contiguous")
    host = torch.from_numpy(out)
    host = host if host.dtype == target.dtype else host.view(target.dtype)
    if target.device.type == "cpu":
        return features_into(host, target, taps, samples, wanted)
    staging = torch.empty(host.shape, dtype=host.dtype, device=target.device)
    halved = features_into(staging, target, taps, samples, wanted)
    host.copy_(staging)
    return halved


def features_into(
    out: torch.Tensor,
    target: Target,
    taps: Taps,
    samples: Sequence[IntArray],
    wanted: Callable[[], bool] = lambda: True,
) -> int:
    """Fills `out` with the tapped features of `samples`, token ids `[L_i]` each.

    `out` is `[sum L_i, taps * H]`, in the target's dtype and on its device; rows follow the given order of samples.
    Batches are padded on the right: the one arrangement that is exact for every decoder, recurrent layers included. The
    result depends on the samples of the block and on nothing else, bit for bit at a fixed number of threads, unless
    memory is short: then a batch is halved, down to one sample, and rounds differently. Returns how often that
    happened; raises torch.OutOfMemoryError when one sample is too large, Unwanted when `wanted`, which is asked before
    each batch, says no. On a GPU the work is only enqueued when this returns.
    """
    lengths = [len(sample) for sample in samples]
    if out.shape[0] != sum(lengths) or min(lengths, default=0) < 1:
        raise ValueError(f"features buffer {tuple(out.shape)} does not fit samples of {lengths} tokens")
    starts = np.concatenate(([0], np.cumsum(lengths)))
    halved = 0
    # A batch's padding costs nothing while a GPU waits for launches; a CPU pays for every token.
    free_tokens = launch_bound_tokens(target.facts) if target.device.type == "cuda" else 0
    waiting = batches(lengths, free_tokens)[::-1]
    while waiting:
        if not wanted():
            raise Unwanted
        places = waiting.pop()
        to = np.concatenate([np.arange(starts[place], starts[place + 1]) for place in places])
        try:
            run_batch(target, taps, [samples[place] for place in places], out, to)
        except torch.OutOfMemoryError:
            if len(places) == 1:
                raise
            torch.cuda.empty_cache()
            middle = len(places) // 2
            waiting += [places[middle:], places[:middle]]
            halved += 1
    return halved


def run_batch(
    target: Target, taps: Taps, samples: Sequence[IntArray], out: torch.Tensor, to: NDArray[np.int64]
) -> None:
    """One padded pass, longest sample first; its tokens, sample by sample, go to the rows `to` of `out`."""
    lengths = np.array([len(sample) for sample in samples])
    ids = np.zeros((len(samples), lengths[0]), dtype=np.int64)
    for line, sample in enumerate(samples):
        ids[line, : len(sample)] = sample
    mask = np.arange(lengths[0]) < lengths[:, None]
    rows = on_device(np.flatnonzero(mask), target.device)
    with taps.capture(rows, out, on_device(to, target.device)):
        padded = target.padding_mask and not mask.all()
        run_text(target, ids, mask.astype(np.int64) if padded else None, last=max(taps.ids))


def one_batch(target: Target, taps: Taps, samples: Sequence[IntArray]) -> torch.Tensor:
    """`[sum L_i, taps * H]` on the device, from one pass however different the lengths are; longest sample first."""
    tokens = sum(map(len, samples))
    width = len(taps.ids) * int(target.facts["hidden_size"])
    out = torch.empty((tokens, width), dtype=target.dtype, device=target.device)
    run_batch(target, taps, samples, out, np.arange(tokens))
    return out
