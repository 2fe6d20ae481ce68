"""Slot states: the count always adds up, and only the transitions of the ledger exist."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.slots import STATES, SlotError, Slots


def test_a_slot_goes_round() -> None:
    slots = Slots(2)
    for round_trip in (["leased", "ready", "delivered", "free"], ["leased", "ready", "delivered", "spilling", "free"]):
        assert slots.reserve() == 0
        for state in round_trip:
            slots.move(0, state)
    assert slots.counts == dict.fromkeys(STATES, 0) | {"free": 2}


def test_the_lowest_free_slot_is_taken_first_and_none_is_left_at_last() -> None:
    slots = Slots(3)
    assert [slots.reserve() for _ in range(4)] == [0, 1, 2, None]
    for slot in (2, 0):
        slots.move(slot, "free")
    assert [slots.reserve(), slots.reserve()] == [0, 2]


@pytest.mark.parametrize(
    ("path", "illegal"),
    [
        ([], "leased"),
        ([], "lost"),
        (["reserved"], "ready"),
        (["reserved"], "lost"),
        (["reserved", "leased"], "delivered"),
        (["reserved", "leased", "lost"], "free"),
        (["reserved", "leased", "ready"], "leased"),
        (["reserved", "leased", "ready", "delivered"], "leased"),
        (["reserved", "leased", "ready", "delivered", "spilling"], "ready"),
    ],
)
def test_other_transitions_are_refused_and_change_nothing(path: list[str], illegal: str) -> None:
    slots = Slots(1)
    for state in path:
        slots.move(0, state)
    before = slots.counts
    with pytest.raises(SlotError, match=f"to {illegal}"):
        slots.move(0, illegal)
    assert slots.counts == before


def test_a_lost_slot_is_not_usable() -> None:
    slots = Slots(2)
    slots.reserve()
    slots.move(0, "leased")
    slots.move(0, "lost")
    assert (slots.usable, slots.count("lost"), slots.reserve(), slots.reserve()) == (1, 1, 1, None)


def test_a_slot_out_of_turn_is_refused_and_changes_nothing() -> None:
    slots = Slots(2)
    with pytest.raises(SlotError, match="out of turn"):
        slots.move(1, "reserved")
    assert [slots.reserve(), slots.reserve()] == [0, 1]


def test_a_ring_without_slots_is_refused() -> None:
    with pytest.raises(SlotError):
        Slots(0)


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.sampled_from(STATES)), max_size=60))
def test_counts_agree_with_states_whatever_is_tried(total: int, moves: list[tuple[int, str]]) -> None:
    slots = Slots(total)
    for slot, state in moves:
        try:
            slots.move(slot % total, state)
        except SlotError:
            continue
        states = [slots.state(slot) for slot in range(total)]
        assert slots.counts == {name: states.count(name) for name in STATES}
