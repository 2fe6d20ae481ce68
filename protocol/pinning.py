"""Host memory that a GPU copies to and from by itself: registered with CUDA where it already is. No torch here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PORTABLE = 1  # cudaHostRegisterPortable

log = logging.getLogger(__name__)


def pin(cudart: Any, address: int, nbytes: int, what: str, any_kernel: Callable[[], object]) -> bool:
    """Registers memory with the CUDA runtime `cudart` (torch.cuda.cudart()), in one piece: a copy must not cross the
    border of two. When that fails, copies are four times slower and as right, and a warning names `what` it is;
    `any_kernel` is run then, as the runtime's last error would otherwise come up in the next kernel's name."""
    if int(cudart.cudaHostRegister(address, nbytes, _PORTABLE)) == 0:
        return True
    log.warning("%s cannot be pinned: CUDA refuses %d bytes; copies will be slower", what, nbytes)
    with suppress(RuntimeError):
        any_kernel()
    return False


@contextmanager
def pinned(cudart: Any, address: int, nbytes: int, what: str, any_kernel: Callable[[], object]) -> Iterator[None]:
    """`pin` for as long as the memory is mapped. It has to be undone before that ends: what is mapped at the same
    address later would be taken for the old memory, and copies would go nowhere."""
    done = pin(cudart, address, nbytes, what, any_kernel)
    try:
        yield
    finally:
        if done:
            cudart.cudaHostUnregister(address)
