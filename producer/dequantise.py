"""Features back from fp8 (producer/quantise.py), in host memory. No torch here: replay needs none.

All 256 bytes are scaled once for each token and tap, and looked up then: per feature that is a byte read and one
number written, with the rounding of s * e4m3 in float32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def dequantise_into(
    features: NDArray[np.generic], values: NDArray[np.uint8], scales: NDArray[np.float32], dtype: str
) -> None:
    """Writes features `[T, taps x hidden]` of `dtype` as protocol.block carries it, contiguous, from the bytes of e4m3
    values of the same shape and scales `[T, taps]`."""
    scaled = _as_carried(E4M3 * scales.reshape(-1, 1), dtype)
    hidden = values.shape[1] // scales.shape[1]
    for table, row, out in zip(scaled, values.reshape(-1, hidden), features.reshape(-1, hidden), strict=True):
        np.take(table, row, out=out, mode="clip")


def _as_carried(numbers: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """float32 in another dtype, to nearest, ties to even; bfloat16 as its words, of finite numbers."""
    if dtype != "bfloat16":
        return numbers.astype(dtype)
    words = numbers.view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)


def _e4m3() -> NDArray[np.float32]:
    """The number that each byte stands for; the two that are none are 0 here, a cache keeps no such features."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    numbers = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    numbers[[0x7F, 0xFF]] = 0
    return np.where(byte < 128, numbers, -numbers).astype(np.float32)


E4M3 = _e4m3()
