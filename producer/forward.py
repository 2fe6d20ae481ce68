"""The features of one block: one right-padded forward pass, pad rows dropped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from producer.taps import Taps
from producer.target import Target, run_text


def features_of(
    target: Target, taps: Taps, samples: Sequence[NDArray[np.int32]], out: NDArray[np.generic]
) -> NDArray[np.generic]:
    """Fills `out` with the tapped features of `samples`, token ids `[L_i]` each, and returns it.

    `out` is contiguous, `[sum L_i, taps * H]`, in the target's dtype (uint16 words carry bfloat16); rows follow the
    given order of samples. The samples run as one batch, longest first, padded on the right, with the padding mask
    passed: the one arrangement that is exact for every decoder, recurrent layers included. The result depends on the
    samples of the block and on nothing else, bit for bit at a fixed number of threads.
    """
    lengths = [len(sample) for sample in samples]
    if out.shape[0] != sum(lengths) or not out.flags.c_contiguous or min(lengths, default=0) < 1:
        raise ValueError(f"features buffer {out.shape} does not fit samples of {lengths} tokens")
    order = sorted(range(len(samples)), key=lambda place: (-lengths[place], place))
    longest = lengths[order[0]]
    ids = np.zeros((len(samples), longest), dtype=np.int64)
    mask = np.zeros((len(samples), longest), dtype=np.int64)
    rows = np.empty(out.shape[0], dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    for line, place in enumerate(order):
        length = lengths[place]
        ids[line, :length] = samples[place]
        mask[line, :length] = 1
        rows[starts[place] : starts[place + 1]] = line * longest + np.arange(length)
    destination = torch.from_numpy(out)
    destination = destination if destination.dtype == target.dtype else destination.view(target.dtype)
    on_host = target.device.type == "cpu"
    staging = destination if on_host else torch.empty_like(destination, device=target.device)
    with taps.capture(torch.from_numpy(rows).to(target.device), staging):
        run_text(target, torch.from_numpy(ids).to(target.device), torch.from_numpy(mask).to(target.device))
    if not on_host:
        destination.copy_(staging)
    return out
