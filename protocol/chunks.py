"""Payload in chunks against byte credit: the sizes that both ends agree on, and how a block is cut.

A producer that does not map the ring sends its block to the ingest process as CHUNK messages, each followed by a
frame of bytes. It may send only as many bytes ahead of what lies in the ring as ingest has granted, so that a slow ring
bounds memory in bytes, which a socket's high-water mark does not do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

# libzmq's receive buffers are recycled by malloc up to about this size; a larger frame is mapped and faulted in afresh.
CHUNK_BYTES = 4 << 20
# Bytes that one producer may have under way: beyond two chunks it only has to cover the delay of an acknowledgement.
WINDOW_BYTES = 64 << 20
# An acknowledgement each so many bytes: often enough that the sender never stands still.
ACK_EVERY_BYTES = WINDOW_BYTES // 4


class Piece(Struct, frozen=True):
    """Bytes `start` to `stop` of a slot's payload; `last` on the last piece of a block."""

    start: int
    stop: int
    last: bool

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def pieces(ranges: Iterable[tuple[int, int]], chunk_bytes: int = CHUNK_BYTES) -> Iterator[Piece]:
    """Cuts byte ranges `(start, stop)` of a slot into pieces of at most `chunk_bytes`, in order. Empty ranges give
    none."""
    cuts = [
        (start, min(start + chunk_bytes, stop)) for first, stop in ranges for start in range(first, stop, chunk_bytes)
    ]
    for at, (start, stop) in enumerate(cuts):
        yield Piece(start, stop, at == len(cuts) - 1)
