"""Leases in order, less those taken back; STOP first of all."""

from __future__ import annotations

import queue

from producer.assignments import Assignments
from protocol.messages import AnyMessage, Lease, Revoke, Stop


def lease(attempt: int) -> Lease:
    return Lease(
        step=0,
        index=attempt,
        kind="model",
        attempt=attempt,
        slot=0,
        samples=(),
        lengths=(),
        positions=(),
        token_ids=b"",
        loss_mask=b"",
    )


def revoke(attempt: int) -> Revoke:
    return Revoke(step=0, index=attempt, kind="model", attempt=attempt)


def assignments(*messages: AnyMessage) -> Assignments:
    inbox: queue.Queue[AnyMessage] = queue.Queue()
    for message in messages:
        inbox.put(message)
    return Assignments(inbox)


def test_leases_come_in_order() -> None:
    one = assignments(lease(1), lease(2))
    assert [one.next(), one.next()] == [lease(1), lease(2)]
    assert one.wanted(lease(2))


def test_a_lease_that_is_taken_back_is_not_wanted_also_before_it_is_begun() -> None:
    one = assignments(lease(1), lease(2), revoke(1), revoke(2))
    first = one.next()
    assert first == lease(1)
    assert not one.wanted(lease(1))
    assert one.next() == lease(2)
    assert not one.wanted(lease(2))


def test_a_revocation_outlives_no_later_lease() -> None:
    one = assignments(revoke(1), lease(5))
    assert one.next() == lease(5)
    assert one._revoked == set()


def test_stop_overtakes_leases_and_makes_them_unwanted() -> None:
    one = assignments(lease(1), lease(2), Stop(reason="done"))
    held = one.next()
    assert isinstance(held, Lease)
    assert not one.wanted(held)
    assert one.next() == Stop(reason="done")
