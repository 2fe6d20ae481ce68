"""[ring]: how many slots, and what is refused before anything is allocated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.arena import PAGE_BYTES, slot_stride_bytes
from protocol.block import block_table, table_bytes
from protocol.errors import RequestError
from protocol.ring import RingConfig, RingSize, ring_size

MIB, GIB = 1 << 20, 1 << 30


def size(bytes_: int | str = "auto", tokens: int = 1000, processes: int = 2, free: int = 64 * GIB) -> RingSize:
    """Blocks of 1,000 tokens of 5 taps x 576 in bf16: 5.76 MB."""
    return ring_size(RingConfig(bytes=bytes_), tokens, tokens // 2, 5 * 576, "bfloat16", processes, free)


def test_auto_is_four_slots_a_process_that_hold_the_largest_block() -> None:
    found = size(processes=3)
    assert found.slots == 12
    assert found.slot_bytes == table_bytes(block_table(1000, 500, 2880, "bfloat16"))
    assert found.total_bytes == 12 * slot_stride_bytes(found.slot_bytes)
    assert 12 * found.slot_bytes <= found.total_bytes < 12 * (found.slot_bytes + 3 * PAGE_BYTES)
    assert found.total_bytes % PAGE_BYTES == 0


def test_auto_takes_at_most_half_of_the_free_memory() -> None:
    found = size(free=60 * MIB)
    assert found.slots == 5
    assert found.total_bytes <= 30 * MIB


@given(st.integers(20 * MIB, GIB), st.integers(1, 3))
def test_what_is_asked_for_is_never_exceeded(asked: int, processes: int) -> None:
    try:
        found = size(asked, processes=processes)
    except RequestError:
        assert (processes + 1) * (size().total_bytes // 8) > asked
        return
    assert found.total_bytes <= asked < found.total_bytes + slot_stride_bytes(found.slot_bytes)
    assert found.slots > processes


def test_a_block_larger_than_the_ring_names_both_numbers() -> None:
    """A ring of 8 MiB, one sample that needs 9 MB."""
    with pytest.raises(RequestError) as refused:
        size("8MiB", tokens=1560)
    said = str(refused.value)
    assert "a block of 1560 tokens takes 9.0" in said
    assert "ring.bytes = 8.389 MB holds 0" in said
    assert "raise ring.bytes or lower train.microbatch_tokens" in said


def test_a_slot_fewer_than_needed_is_refused_with_the_number_needed() -> None:
    one = size().total_bytes // 8
    assert size(3 * one).slots == 3
    with pytest.raises(RequestError, match=r"2 processes need 3 slots = 17\.\d+ MB, but .* holds 2"):
        size(3 * one - 1)


def test_too_little_free_memory_is_refused_with_the_amount() -> None:
    with pytest.raises(RequestError, match=r"half of the 10\.49 MB that are free holds 0"):
        size(free=10 * MIB)


def test_an_unreadable_size_names_the_key() -> None:
    with pytest.raises(RequestError, match=r"ring\.bytes: cannot read 'plenty'"):
        size("plenty")
