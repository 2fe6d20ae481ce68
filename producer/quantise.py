"""Features in fp8: a byte for each, and for each token and tap a scale in float32, so that none overflows.

With a = max |x| over the hidden state of one token at one tap, its scale is s = max(a / 448, 2^-126) and x is kept as
e4m3(x / s), rounded to nearest, ties to even; 448 is the largest number of e4m3. Read back as s * e4m3, x is off by at
most 2^-4 |x| where |x| >= 2^-6 s, and by at most 2^-10 s below. All of it in float32.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

LARGEST = 448.0
# The smallest normal float32: zero rows need no case of their own, and no scale is so small that a division overflows.
LEAST_SCALE = 2.0**-126
# Bounds the float32 copies beside the features.
_ROWS_AT_ONCE = 1024


def quantise(features: torch.Tensor, taps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of features `[T, taps x hidden]` in any floating dtype, on any device: values float8_e4m3fn `[T, taps x hidden]`
    and scales float32 `[T, taps]`, there too. A scale is not finite where a feature of its token and tap is not."""
    values = torch.empty(features.shape, dtype=torch.float8_e4m3fn, device=features.device)
    scales = torch.empty((len(features), taps), dtype=torch.float32, device=features.device)
    for start in range(0, len(features), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        states = features[rows].to(torch.float32).view(-1, taps, features.shape[1] // taps)
        scale = (states.abs().amax(dim=2) / LARGEST).clamp_min(LEAST_SCALE)
        scales[rows] = scale
        # A rounded scale may leave the largest a bit above 448, and what is above 464 becomes NaN.
        values[rows] = (states / scale[:, :, None]).clamp(-LARGEST, LARGEST).flatten(1).to(torch.float8_e4m3fn)
    return values, scales


def quantise_rows(
    features: NDArray[np.generic], dtype: str, taps: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """`quantise` for rows of a block in host memory, which carries bfloat16 as its words: values as their bytes, and
    scales, as protocol/shard_writer.py takes them."""
    values, scales = quantise(torch.from_numpy(features).view(getattr(torch, dtype)), taps)
    return values.view(torch.uint8).numpy(), scales.numpy()
