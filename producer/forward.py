"""The features of one block: right-padded forward passes over samples of similar length, pad rows dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from producer.padding import batches, launch_bound_tokens
from producer.taps import Taps
from producer.target import Target, run_text

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
    """Fills `out` with the tapped features of `samples`, token ids `[L_i]` each.

    `out` is contiguous, `[sum L_i, taps * H]`, in the target's dtype (uint16 words carry bfloat16); rows follow the
    given order of samples. Batches are padded on the right, with the padding mask passed: the one arrangement that is
    exact for every decoder, recurrent layers included. The result depends on the samples of the block and on nothing
    else, bit for bit at a fixed number of threads, unless memory is short: then a batch is halved, down to one sample,
    and rounds differently. Returns how often that happened; raises torch.OutOfMemoryError when one sample is too large,
    Unwanted when `wanted`, which is asked before each batch, says no.
    """
    lengths = [len(sample) for sample in samples]
    if out.shape[0] != sum(lengths) or not out.flags.c_contiguous or min(lengths, default=0) < 1:
        raise ValueError(f"features buffer {out.shape} does not fit samples of {lengths} tokens")
    host = torch.from_numpy(out)
    host = host if host.dtype == target.dtype else host.view(target.dtype)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    halved = 0
    # A batch's padding costs nothing while a GPU waits for launches; a CPU pays for every token.
    free_tokens = launch_bound_tokens(target.facts) if target.device.type == "cuda" else 0
    waiting = batches(lengths, free_tokens)[::-1]
    while waiting:
        if not wanted():
            raise Unwanted
        places = waiting.pop()
        try:
            staging = _run(target, taps, [samples[place] for place in places], out.shape[1])
        except torch.OutOfMemoryError:
            if len(places) == 1:
                raise
            torch.cuda.empty_cache()
            middle = len(places) // 2
            waiting += [places[middle:], places[:middle]]
            halved += 1
            continue
        start = 0
        for place in places:
            host[starts[place] : starts[place + 1]].copy_(staging[start : start + lengths[place]])
            start += lengths[place]
    return halved


def _run(target: Target, taps: Taps, samples: Sequence[IntArray], width: int) -> torch.Tensor:
    """Features `[sum L_i, width]` of one batch, longest sample first, on the target's device."""
    lengths = [len(sample) for sample in samples]
    ids = np.zeros((len(samples), lengths[0]), dtype=np.int64)
    for line, sample in enumerate(samples):
        ids[line, : len(sample)] = sample
    mask = np.arange(lengths[0]) < np.asarray(lengths)[:, None]
    rows = torch.from_numpy(np.flatnonzero(mask)).to(target.device)
    staging = torch.empty((sum(lengths), width), dtype=target.dtype, device=target.device)
    with taps.capture(rows, staging):
        run_text(
            target, torch.from_numpy(ids).to(target.device), torch.from_numpy(mask.astype(np.int64)).to(target.device)
        )
    return staging
