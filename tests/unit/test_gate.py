"""GO is given in order, once all ranks have their blocks, and orders ride on step boundaries only."""

from __future__ import annotations

from protocol.gate import GoAhead, VerifiedGate


def gate(consumers: int = 2, total_steps: int = 3, at_step: int = 99) -> VerifiedGate:
    """A gate whose ranks wait for nothing but GO, up to step `at_step`."""
    one = VerifiedGate(consumers, total_steps, lambda step: 2)
    for rank in range(consumers):
        one.reached(at_step, rank)
    return one


def verify(gate: VerifiedGate, step: int, micro_step: int, ranks: tuple[int, ...] = (0, 1)) -> None:
    for rank in ranks:
        gate.verified(step, micro_step, rank)


def test_go_waits_for_every_rank() -> None:
    one = gate()
    verify(one, 0, 0, (1,))
    assert one.go() is None
    assert one.waiting_for() == [0]
    verify(one, 0, 0, (0, 0))
    assert one.go() == GoAhead(0, 0)
    assert one.go() is None


def test_later_micro_steps_wait_for_earlier_ones() -> None:
    one = gate()
    verify(one, 1, 0)
    verify(one, 0, 1)
    assert one.go() is None
    verify(one, 0, 0)
    assert [one.go() for _ in range(4)] == [GoAhead(0, 0), GoAhead(0, 1), GoAhead(1, 0), None]
    assert one.next == (1, 1)


def test_bad_takes_a_verification_back_until_go() -> None:
    one = gate()
    verify(one, 0, 0)
    one.bad(0, 0, 1)
    assert one.go() is None
    one.verified(0, 0, 1)
    assert one.go() == GoAhead(0, 0)
    one.bad(0, 0, 1)
    verify(one, 0, 0)
    assert one.next == (0, 1)
    assert one.go() is None


def test_orders_wait_for_the_next_step_boundary() -> None:
    one = gate()
    verify(one, 0, 0)
    assert one.go() == GoAhead(0, 0)
    one.order(["checkpoint", "evaluate", "checkpoint"])
    one.order(["checkpoint"])
    verify(one, 0, 1)
    verify(one, 1, 0)
    assert [one.go(), one.go()] == [GoAhead(0, 1), GoAhead(1, 0, ("checkpoint", "evaluate"))]
    verify(one, 1, 1)
    verify(one, 2, 0)
    assert [one.go(), one.go()] == [GoAhead(1, 1), GoAhead(2, 0)]


def test_nothing_follows_a_stop_until_a_rewind() -> None:
    one = gate()
    one.order(["stop"])
    verify(one, 0, 0)
    verify(one, 0, 1)
    assert one.go() == GoAhead(0, 0, ("stop",))
    assert one.go() is None
    one.rewind(0)
    assert one.waiting_for() == one.absent() == [0, 1]
    verify(one, 0, 0)
    assert one.go() is None
    for rank in (0, 1):
        one.reached(0, rank)
    assert one.go() == GoAhead(0, 0)


def test_the_gate_ends_with_the_plan() -> None:
    one = gate(consumers=1, total_steps=1)
    verify(one, 0, 0, (0,))
    verify(one, 0, 1, (0,))
    assert [one.go(), one.go(), one.go()] == [GoAhead(0, 0), GoAhead(0, 1), None]
    assert one.finished


def test_go_waits_for_a_rank_that_evaluates_at_the_boundary() -> None:
    one = gate(at_step=0)
    for micro_step in (0, 1):
        verify(one, 0, micro_step)
    verify(one, 1, 0)
    assert [one.go(), one.go(), one.go()] == [GoAhead(0, 0), GoAhead(0, 1), None]
    one.reached(1, 1)
    assert one.go() is None
    assert one.absent() == [0]
    one.reached(1, 0)
    one.reached(0, 0)  # late news of an earlier step
    assert one.go() == GoAhead(1, 0)


def test_a_stop_waits_for_no_rank() -> None:
    one = gate(at_step=-1)
    one.order(["stop"])
    assert one.go() == GoAhead(0, 0, ("stop",))


def test_a_finish_waits_for_the_boundary_and_then_for_nobody() -> None:
    one = gate(at_step=0)
    verify(one, 0, 0)
    assert one.go() == GoAhead(0, 0)
    one.order(["finish"])
    assert one.go() is None  # the step under way is finished first
    verify(one, 0, 1)
    assert one.go() == GoAhead(0, 1)
    assert not one.finished
    assert one.go() == GoAhead(1, 0, ("finish",))
    assert one.finished
    assert (one.next, one.go()) == ((1, 0), None)
    one.rewind(0)
    assert not one.finished


def test_a_stop_goes_before_a_finish() -> None:
    one = gate()
    one.order(["finish"])
    one.order(["stop"])
    assert one.go() == GoAhead(0, 0, ("finish", "stop"))
    assert not one.finished
