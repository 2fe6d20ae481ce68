"""Ingest's decisions: whose bytes go where, and how much credit they have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.intake import Intake
from protocol.messages import Chunk, ChunkAck, Expect

WINDOW, EVERY = 100, 25


def expect(attempt: int = 1, slot: int = 0, nbytes: int = 1000, holder: str = "producer-0") -> Expect:
    return Expect(holder=holder, attempt=attempt, slot=slot, nbytes=nbytes)


def chunk(offset: int = 0, attempt: int = 1, checksum: int = 7, last: bool = False) -> Chunk:
    return Chunk(attempt=attempt, offset=offset, checksum=checksum, last=last)


def intake(*expected: Expect) -> Intake:
    one = Intake(WINDOW, EVERY)
    for each in expected or (expect(),):
        one.expect(each)
    return one


def test_the_first_credit_is_a_window() -> None:
    assert Intake(WINDOW, EVERY).expect(expect()) == ChunkAck(attempt=1, received=0, limit=WINDOW, problem="")


def test_a_chunk_goes_to_its_place_in_the_slot_of_its_attempt() -> None:
    one = intake(expect(1, slot=4), expect(2, slot=5, nbytes=60))
    assert one.place("producer-0", chunk(40, attempt=2)) == (5, 40, 60)
    assert one.place("producer-0", chunk(0, attempt=1)) == (4, 0, 1000)


@pytest.mark.parametrize(
    ("holder", "attempt"),
    [("producer-1", 1), ("producer-0", 2), ("producer-0", 0)],
    ids=["another producer", "an attempt to come", "an attempt before"],
)
def test_what_nobody_expects_is_dropped_and_counted(holder: str, attempt: int) -> None:
    one = intake()
    assert one.place(holder, chunk(attempt=attempt)) is None
    assert one.stale == 1
    assert one.place("producer-0", chunk()) == (0, 0, 1000)


def test_a_new_lease_of_a_slot_makes_what_was_on_its_way_there_stale() -> None:
    one = intake(expect(1, slot=3), expect(2, slot=3, holder="producer-1"))
    assert one.place("producer-0", chunk(attempt=1)) is None
    assert one.place("producer-1", chunk(attempt=2)) == (3, 0, 1000)
    assert one.stale == 1


def test_what_is_fenced_is_stale_and_nothing_else_is() -> None:
    one = intake(expect(1, slot=3), expect(2, slot=4, holder="producer-1"), expect(3, slot=5))
    one.fence("producer-0")
    assert [one.place("producer-0", chunk(attempt=attempt)) for attempt in (1, 3)] == [None, None]
    assert one.place("producer-1", chunk(attempt=2)) == (4, 0, 1000)
    one.fence("producer-0")  # again, and somebody unknown: nothing
    one.fence("remote-x")
    one.expect(expect(4, slot=3))  # a lease of later on
    assert one.place("producer-0", chunk(attempt=4)) == (3, 0, 1000)


@pytest.mark.parametrize("offset", [-1, 1000, 2**40])
def test_a_chunk_outside_its_block_is_refused_for_good(offset: int) -> None:
    one = intake()
    answer = one.place("producer-0", chunk(offset))
    assert isinstance(answer, ChunkAck)
    assert f"{offset} lies outside a block of 1000 bytes" in answer.problem
    assert one.place("producer-0", chunk()) is None


@pytest.mark.parametrize(
    ("nbytes", "room", "checksum", "problem"),
    [(30, 20, 7, "leaves its block"), (20, 20, 8, "damaged"), (WINDOW + 1, 1000, 7, "credit")],
)
def test_a_chunk_that_does_not_fit_is_damaged_or_uncredited_ends_the_attempt(
    nbytes: int, room: int, checksum: int, problem: str
) -> None:
    one = intake()
    answer = one.arrived(chunk(), nbytes, room, checksum)
    assert answer is not None
    assert problem in answer.problem
    assert one.place("producer-0", chunk()) is None


@given(st.lists(st.integers(1, EVERY), min_size=1, max_size=40))
def test_acknowledgements_are_cumulative_and_keep_an_honest_sender_going(sizes: list[int]) -> None:
    one = intake(expect(nbytes=sum(sizes)))
    limit, offset, acks = WINDOW, 0, []
    for index, nbytes in enumerate(sizes):
        assert offset + nbytes <= limit  # never without credit
        last = index == len(sizes) - 1
        ack = one.arrived(chunk(offset, last=last), nbytes, sum(sizes) - offset, 7)
        offset += nbytes
        if ack is not None:
            assert (ack.received, ack.limit, ack.problem) == (offset, offset + WINDOW, "")
            limit = ack.limit
            acks.append(ack.received)
    assert acks[-1] == sum(sizes)
    assert len(acks) <= sum(sizes) // EVERY + 1
    assert one.place("producer-0", chunk()) is None  # done: nothing more is taken
