"""Header and canary: a writer past its slot's end and a late writer are found, sound slots never raise an alarm."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.arena import PAGE_BYTES, Arena, create_arena, slot_stride_bytes

SLOTS, SLOT_BYTES = 5, 5000


@pytest.fixture
def arena() -> Iterator[Arena]:
    fd = create_arena(SLOTS, SLOT_BYTES, 1 << 30)
    yield Arena(fd, SLOTS, SLOT_BYTES)
    os.close(fd)


def fill(arena: Arena, slot: int, attempt: int) -> None:
    arena.sign(slot, attempt)
    arena.slot(slot)[:] = bytes([attempt % 256]) * SLOT_BYTES
    arena.sign(slot, attempt)


def behind(arena: Arena, slot: int) -> memoryview:
    """From the end of a slot's payload to the end of the ring: where a writer that knows no bounds goes on."""
    return memoryview(arena._map)[slot * slot_stride_bytes(SLOT_BYTES) + PAGE_BYTES + SLOT_BYTES :]


def test_a_full_slot_is_sound_for_its_writer_and_no_other(arena: Arena) -> None:
    for slot in range(SLOTS):
        fill(arena, slot, 10 + slot)
    assert [arena.problem(slot, [10 + slot]) for slot in range(SLOTS)] == [""] * SLOTS
    assert arena.problem(3, [12]) == "slot 3 was written by attempt 13, not 12"
    assert arena.problem(3, [12, 17]) == "slot 3 was written by attempt 13, not 12 or 17"


def test_the_payload_begins_on_a_page_and_every_mark_outside_it(arena: Arena) -> None:
    start = np.frombuffer(arena._map, np.uint8).ctypes.data
    places = [np.frombuffer(arena.slot(slot), np.uint8).ctypes.data - start for slot in range(SLOTS)]
    assert all(place % PAGE_BYTES == 0 for place in places)
    for slot in range(SLOTS):
        fill(arena, slot, 1)
        assert set(arena.slot(slot)) == {1}


def test_a_slot_that_nobody_has_begun_is_not_sound(arena: Arena) -> None:
    assert arena.problem(0, [0]) == "the header of slot 0 was overwritten"


@pytest.mark.parametrize("nbytes", [1, 2, 64, 100])
def test_a_writer_that_runs_over_is_found_whoever_writes_then_until_a_reader_has_mended_it(
    arena: Arena, nbytes: int
) -> None:
    fill(arena, 3, 12)
    behind(arena, 3)[:nbytes] = b"\x01" * nbytes
    arena.sign(3, 12)
    assert arena.problem(3, [12]) == "the canary behind slot 3 was overwritten"
    fill(arena, 3, 13)  # the second writer of the block
    assert arena.problem(3, [12, 13]) == "the canary behind slot 3 was overwritten"
    arena.mend(3)
    assert arena.problem(3, [13]) == ""


def test_a_writer_that_runs_far_over_is_found_in_the_next_slot_too(arena: Arena) -> None:
    for slot in (3, 4):
        fill(arena, slot, 12)
    far = slot_stride_bytes(SLOT_BYTES) - SLOT_BYTES
    behind(arena, 3)[:far] = b"\x01" * far
    assert arena.problem(3, [12]) == "the canary behind slot 3 was overwritten"
    assert arena.problem(4, [12]) == "the header of slot 4 was overwritten"


def test_a_header_of_another_slot_is_none_of_this(arena: Arena) -> None:
    fill(arena, 1, 7)
    fill(arena, 2, 7)
    stride = slot_stride_bytes(SLOT_BYTES)
    whole = memoryview(arena._map)
    whole[2 * stride : 2 * stride + PAGE_BYTES] = whole[stride : stride + PAGE_BYTES]
    assert arena.problem(2, [7]) == "the header of slot 2 was overwritten"


EVENTS = st.lists(st.sampled_from([8, 9]), min_size=2, max_size=8)


@given(EVENTS, st.integers(0, 8))
def test_two_writers_of_one_block_raise_no_alarm_and_a_stale_one_s_last_word_always_does(
    signed: list[int], at: int
) -> None:
    """However the two parts' writers interleave the block is sound. A fenced writer, attempt 7, that signs after both
    have begun is found unless one of them signs after it; then what it wrote shows in the sum."""
    fd = create_arena(1, 100, 1 << 30)
    try:
        arena = Arena(fd, 1, 100)
        for attempt in (8, *signed):
            arena.sign(0, attempt)
        assert arena.problem(0, [8, 9]) == ""
        for attempt in signed[at:]:
            arena.sign(0, 7)
            assert arena.problem(0, [8, 9]) == "slot 0 was written by attempt 7, not 8 or 9"
            arena.sign(0, attempt)
        assert arena.problem(0, [8, 9]) == ""
    finally:
        os.close(fd)
