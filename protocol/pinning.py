"""Host memory that a GPU copies to and from by itself: registered with CUDA where it already is. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PORTABLE = 1  # cudaHostRegisterPortable


def pin(cudart: Any, address: int, nbytes: int) -> bool:
    """Registers memory with the CUDA runtime `cudart` (torch.cuda.cudart()), in one piece: a copy must not cross the
    border of two. When that fails the runtime's last error is left to be cleared; copies are four times slower then,
    and right."""
    return int(cudart.cudaHostRegister(address, nbytes, _PORTABLE)) == 0


@contextmanager
def pinned(cudart: Any, address: int, nbytes: int) -> Iterator[bool]:
    """`pin` for as long as the memory is mapped. It has to be undone before that ends: what is mapped at the same
    address later would be taken for the old memory, and copies would go nowhere."""
    done = pin(cudart, address, nbytes)
    try:
        yield done
    finally:
        if done:
            cudart.cudaHostUnregister(address)
