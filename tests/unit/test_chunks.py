"""How a block is cut into chunks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from protocol.chunks import ACK_EVERY_BYTES, CHUNK_BYTES, WINDOW_BYTES, pieces


@st.composite
def ranges(draw: st.DrawFn) -> list[tuple[int, int]]:
    borders = sorted(draw(st.lists(st.integers(0, 400), min_size=0, max_size=8).filter(lambda b: len(b) % 2 == 0)))
    return list(zip(borders[::2], borders[1::2], strict=True))


@given(ranges(), st.integers(1, 50))
def test_pieces_are_the_ranges_in_order_and_none_is_too_large(ranges: list[tuple[int, int]], chunk_bytes: int) -> None:
    found = list(pieces(ranges, chunk_bytes))
    wanted = itertools.chain.from_iterable(range(start, stop) for start, stop in ranges)
    assert [byte for piece in found for byte in range(piece.start, piece.stop)] == list(wanted)
    assert all(0 < piece.nbytes <= chunk_bytes for piece in found)
    assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True] * bool(found)


def test_a_sender_that_waits_for_credit_is_always_given_some() -> None:
    # It stands still with less than a chunk of credit left: by then an acknowledgement must be due.
    assert WINDOW_BYTES - CHUNK_BYTES >= ACK_EVERY_BYTES
