"""The ledger's rules one by one; test_ledger_machine.py mixes them at random."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.grants import Delivery, Key, Lease
from protocol.ledger import Ledger
from protocol.packing import BlockSpec


class Steps:
    """A plan given as steps of blocks of samples."""

    def __init__(self, *steps: Sequence[tuple[int, ...]], consumers: int = 1) -> None:
        self.total_steps = len(steps)
        self._steps = [
            [BlockSpec(s, j, j % consumers, j // consumers, held, 0, 0) for j, held in enumerate(blocks)]
            for s, blocks in enumerate(steps)
        ]

    def blocks(self, step: int) -> list[BlockSpec]:
        return self._steps[step]


def one_sample_steps(count: int) -> Steps:
    return Steps(*([(step,)] for step in range(count)))


def ready(ledger: Ledger, lease: Lease | None) -> bool:
    assert lease is not None
    return ledger.ready(lease.key, lease.kind, lease.attempt, lease.holder)


def nack(ledger: Ledger, lease: Lease | None, retryable: bool = True, samples: tuple[int, ...] | None = None) -> bool:
    assert lease is not None
    return ledger.nack(lease.key, lease.kind, lease.attempt, lease.holder, retryable, samples)


def fill(ledger: Ledger, holder: str = "p", kind: str = "model") -> Key:
    lease = ledger.want(holder, kind)
    assert ready(ledger, lease)
    assert lease is not None
    return lease.key


def take(ledger: Ledger, rank: int = 0) -> Delivery:
    delivery = ledger.next_delivery(rank)
    assert delivery is not None
    return delivery


def drain(ledger: Ledger, rank: int = 0) -> list[Delivery]:
    """Fill and release in turn until the end."""
    taken = []
    while not ledger.finished:
        while lease := ledger.want("drain", "model"):
            ready(ledger, lease)
        taken.append(take(ledger, rank))
        assert ledger.release(taken[-1].key, taken[-1].attempt)
    return taken


# --- reservations ---


def test_slots_are_reserved_in_plan_order_before_anyone_asks() -> None:
    ledger = Ledger(one_sample_steps(5), 3, 1)
    assert ledger.counts["reserved"] == 3
    assert [lease and lease.key for lease in (ledger.want("p", "model") for _ in range(4))] == [
        (0, 0),
        (1, 0),
        (2, 0),
        None,
    ]


def test_a_failed_block_keeps_its_slot_while_others_ask() -> None:
    """Granting slots as producers ask would give block 0's slot to block 2 and never finish."""
    ledger = Ledger(one_sample_steps(4), 2, 1)
    first, second = ledger.want("p", "model"), ledger.want("q", "model")
    assert nack(ledger, first)
    assert ready(ledger, second)
    assert ledger.counts == dict.fromkeys(ledger.counts, 0) | {"reserved": 1, "ready": 1}
    again = ledger.want("q", "model")
    assert again is not None
    assert first is not None
    assert (again.key, again.slot) == ((0, 0), first.slot)
    assert ledger.want("p", "model") is None
    assert ready(ledger, again)
    assert [delivery.key[0] for delivery in drain(ledger)] == [0, 1, 2, 3]


def test_a_second_kind_cannot_crowd_out_the_first() -> None:
    """Replay could fill every later block at once; block 0 has its slot though no model producer has asked yet."""
    ledger = Ledger(one_sample_steps(5), 3, 1, parts_of=lambda s: {"model" if s == (0,) else "replay": s} if s else {})
    assert [fill(ledger, "r", "replay") for _ in range(2)] == [(1, 0), (2, 0)]
    assert ledger.want("r", "replay") is None
    assert ledger.next_delivery(0) is None
    assert fill(ledger) == (0, 0)
    assert take(ledger).key == (0, 0)


def test_a_ring_of_one_slot_finishes_in_order() -> None:
    assert [delivery.key[0] for delivery in drain(Ledger(one_sample_steps(6), 1, 1))] == list(range(6))


def test_one_slot_serves_three_ranks() -> None:
    ledger = Ledger(Steps([(0,), (1,), (2,)], [(3,), (4,), ()], consumers=3), 1, 3)
    for rank in (0, 1, 2, 0, 1):
        assert ledger.next_delivery(rank) is None
        fill(ledger)
        delivery = take(ledger, rank)
        assert ledger.release(delivery.key, delivery.attempt)
    empty = take(ledger, 2)
    assert (empty.samples, empty.slot, empty.parts) == ((), None, ())
    assert ledger.release(empty.key, empty.attempt)
    assert ledger.finished


def test_leases_run_on_across_steps_and_deliveries_stay_in_order() -> None:
    ledger = Ledger(Steps([(0,), (1,)], [(2,), (3,)], consumers=2), 4, 2)
    leases = [ledger.want("p", "model") for _ in range(4)]
    for lease in leases[::-1][:2]:
        ready(ledger, lease)
    assert ledger.next_delivery(0) is None
    ready(ledger, leases[0])
    assert [take(ledger, 0).key, take(ledger, 0).key] == [(0, 0), (1, 0)]
    assert ledger.next_delivery(1) is None


def test_a_run_of_empty_blocks_is_taken_in_bites() -> None:
    ledger = Ledger(Steps(*([()] for _ in range(1000))), 2, 1)
    assert ledger.empty_blocks == 3
    assert [delivery.step for delivery in drain(ledger)] == list(range(1000))


def test_a_kept_block_waits_for_empty_blocks_that_are_not_at_hand_yet() -> None:
    ledger = Ledger(Steps(*([()] for _ in range(9)), [(0,)]), 1, 1, next_step=9)
    fill(ledger)
    ledger.rewind(0, {})
    assert take(ledger).key == (0, 0)
    assert ledger.next_delivery(0) is None
    ledger.rewind(0, {})
    assert [delivery.step for delivery in drain(ledger)] == list(range(10))


# --- parts ---


def test_a_block_of_two_parts_is_ready_when_both_are() -> None:
    ledger = Ledger(Steps([(0, 1, 2)]), 1, 1, parts_of=lambda s: {"model": s[:1], "replay": s[1:]})
    model, replay = ledger.want("p", "model"), ledger.want("r", "replay")
    assert model is not None
    assert replay is not None
    assert (model.samples, replay.samples, model.slot) == ((0,), (1, 2), replay.slot)
    assert model.block_samples == replay.block_samples == (0, 1, 2)
    assert ready(ledger, replay)
    assert ledger.next_delivery(0) is None
    assert ready(ledger, model)
    assert take(ledger).parts == (model, replay)


def test_a_part_that_replay_cannot_serve_falls_to_the_model() -> None:
    cached = {1, 2}
    ledger = Ledger(
        Steps([(0, 1, 2)]),
        1,
        1,
        parts_of=lambda s: {
            "model": tuple(x for x in s if x not in cached),
            "replay": tuple(x for x in s if x in cached),
        },
    )
    replay, model = ledger.want("r", "replay"), ledger.want("p", "model")
    cached.clear()
    assert nack(ledger, replay)
    rest = ledger.want("q", "model")
    assert rest is not None
    assert rest.samples == (1, 2)
    assert ready(ledger, model)
    assert ready(ledger, rest)
    assert take(ledger).samples == (0, 1, 2)


def test_the_part_of_a_dead_holder_may_fall_to_another_kind() -> None:
    kind = "replay"
    ledger = Ledger(one_sample_steps(1), 1, 1, parts_of=lambda s: {kind: s})
    assert ledger.want("r", "replay") is not None
    kind = "model"
    ledger.holder_died("r")
    assert fill(ledger) == (0, 0)


# --- late and wrong messages ---


def test_messages_that_are_not_current_are_dropped_and_counted() -> None:
    ledger = Ledger(one_sample_steps(2), 1, 1)
    lease = ledger.want("p", "model")
    assert lease is not None
    assert not ledger.ready(lease.key, "model", lease.attempt, "q")
    assert not ledger.ready(lease.key, "replay", lease.attempt, "p")
    assert not ledger.ready((5, 5), "model", lease.attempt, "p")
    assert not ledger.nack(lease.key, "model", lease.attempt + 1, "p", retryable=False)
    assert not ledger.release(lease.key, lease.attempt)
    assert not ledger.bad(lease.key, lease.attempt)
    assert not ledger.spilled(lease.attempt)
    assert ledger.stale == 7
    assert ready(ledger, lease)
    assert not ready(ledger, lease)
    delivery = take(ledger)
    assert ledger.release(delivery.key, delivery.attempt)
    assert not ledger.release(delivery.key, delivery.attempt)
    assert not ledger.bad(delivery.key, delivery.attempt)
    assert ledger.stale == 10
    assert ledger.quarantined == {}


# --- poison ---


def test_bad_goes_to_another_holder_where_there_is_one() -> None:
    ledger = Ledger(one_sample_steps(2), 2, 1)
    ledger.join("q", "model")
    fill(ledger, "p")
    delivery = take(ledger)
    assert ledger.bad(delivery.key, delivery.attempt)
    mine, others = ledger.want("p", "model"), ledger.want("q", "model")
    assert mine is not None
    assert others is not None
    assert (mine.key, others.key) == ((1, 0), (0, 0))
    assert ledger.history((0, 0)) == (1, 0)


def test_bad_goes_back_to_the_only_holder_that_lives() -> None:
    ledger = Ledger(one_sample_steps(2), 2, 1)
    ledger.join("q", "model")
    fill(ledger, "p")
    delivery = take(ledger)
    ledger.bad(delivery.key, delivery.attempt)
    ledger.holder_died("q")
    assert fill(ledger, "p") == (0, 0)


def test_after_three_tries_the_named_samples_leave() -> None:
    ledger = Ledger(Steps([(0, 1, 2)], [(1, 3)]), 2, 1)
    for tries in (1, 2, 3):
        fill(ledger)
        delivery = take(ledger)
        assert ledger.bad(delivery.key, delivery.attempt, (1,), "zero")
        assert ledger.history((0, 0))[0] == tries % 3
    assert ledger.quarantined == {1: "zero"}
    assert [delivery.samples for delivery in drain(ledger)] == [(0, 2), (3,)]


def test_after_three_tries_without_names_the_block_is_empty_and_its_slot_free() -> None:
    ledger = Ledger(Steps([(0, 1)], [(1,)], [(2,)]), 1, 1)
    for _ in range(3):
        fill(ledger)
        delivery = take(ledger)
        assert ledger.bad(delivery.key, delivery.attempt)
    assert set(ledger.quarantined) == {0, 1}
    assert ledger.counts["reserved"] == 1
    assert [(delivery.samples, delivery.slot) for delivery in drain(ledger)] == [((), None), ((), None), ((2,), 0)]


def test_a_nack_that_is_final_quarantines_at_once_and_three_retryable_ones_do() -> None:
    ledger = Ledger(Steps([(0, 1)], [(2, 3)]), 2, 1)
    assert nack(ledger, ledger.want("p", "model"), retryable=False, samples=(1,))
    assert set(ledger.quarantined) == {1}
    for _ in range(3):
        assert set(ledger.quarantined) == {1}
        first, second = ledger.want("p", "model"), ledger.want("p", "model")
        assert second is not None
        assert second.key == (1, 0)
        nack(ledger, second)
        ledger.holder_died("p")
        assert first is not None
    assert set(ledger.quarantined) == {1, 2, 3}


def test_a_nack_that_is_harmless_is_no_try() -> None:
    ledger = Ledger(one_sample_steps(2), 1, 1)
    for _ in range(5):
        lease = ledger.want("p", "model")
        assert lease is not None
        assert ledger.nack(lease.key, lease.kind, lease.attempt, "p", retryable=True, harmless=True)
    assert ledger.history((0, 0)) == (0, 0)
    assert ledger.quarantined == {}


def test_quarantine_reaches_ready_and_leased_blocks_but_not_what_a_consumer_holds() -> None:
    steps = Steps([(0, 1)], [(1,)], [(1, 3)], [(1, 4)])
    ledger = Ledger(steps, 4, 1)
    leases = [ledger.want("p", "model") for _ in range(4)]
    for lease in leases[:3]:
        ready(ledger, lease)
    first, second = take(ledger), take(ledger)
    assert second.samples == (1,)
    for _ in range(3):
        ledger.bad(first.key, first.attempt, (1,))
        if ledger.quarantined:
            break
        fill(ledger, "p")
        first = take(ledger)
    assert ledger.counts["delivered"] == 1
    assert ledger.counts["ready"] == 0
    assert not ready(ledger, leases[3]), "it was filled with a sample that has left"
    assert ledger.release(second.key, second.attempt)
    assert [delivery.samples for delivery in drain(ledger)] == [(0,), (3,), (4,)]


def test_nobody_joins_a_writer_whose_layout_is_outdated() -> None:
    ledger = Ledger(Steps([(0, 1, 2)]), 1, 1, parts_of=lambda s: {"model": s[:1], "replay": s[1:]})
    model, replay = ledger.want("p", "model"), ledger.want("r", "replay")
    assert nack(ledger, model, retryable=False)
    assert ledger.take_revocations() == [replay]
    assert ledger.want("p", "model") is None
    assert not ready(ledger, replay)
    again = ledger.want("p", "model")
    assert again is not None
    assert (again.samples, again.block_samples) == ((1,), (1, 2))


def test_a_waiting_block_that_is_emptied_needs_no_slot() -> None:
    ledger = Ledger(Steps([(1,)], [(1,)], [(2,)], [(3,)]), 3, 1, max_tries=1)
    fill(ledger)
    first = take(ledger)
    ledger.want("stuck", "model")
    later = ledger.want("p", "model")
    assert ledger.holder_lost("stuck") == [1]
    assert ledger.bad(first.key, first.attempt)
    assert ledger.empty_blocks == 2
    assert ready(ledger, later)
    assert [delivery.samples for delivery in drain(ledger)] == [(), (), (2,), (3,)]


def test_a_death_counts_no_try() -> None:
    ledger = Ledger(one_sample_steps(1), 1, 1)
    for _ in range(5):
        lease = ledger.want("p", "model")
        assert ledger.holder_died("p") == [lease]
    assert ledger.history((0, 0)) == (0, 5)
    assert ledger.quarantined == {}


# --- lost holders ---


def test_a_lost_slot_moves_its_block_in_front_of_a_later_one() -> None:
    ledger = Ledger(one_sample_steps(3), 2, 1)
    lease = ledger.want("stuck", "model")
    fill(ledger)
    assert ledger.counts["ready"] == 1
    assert ledger.holder_lost("stuck") == [lease and lease.slot]
    assert ledger.counts == dict.fromkeys(ledger.counts, 0) | {"lost": 1, "reserved": 1}
    assert not ready(ledger, lease)
    assert ledger.want("stuck", "model") is None
    assert [delivery.key[0] for delivery in drain(ledger)] == [0, 1, 2]


def test_a_later_lease_is_asked_back_for_a_lost_slot() -> None:
    ledger = Ledger(one_sample_steps(3), 2, 1)
    ledger.want("stuck", "model")
    later = ledger.want("p", "model")
    ledger.holder_lost("stuck")
    assert ledger.take_revocations() == [later]
    assert ledger.take_revocations() == []
    assert nack(ledger, later, retryable=False)
    assert ledger.quarantined == {}
    assert [delivery.key[0] for delivery in drain(ledger)] == [0, 1, 2]


def test_the_ledger_says_when_no_slot_is_left() -> None:
    ledger = Ledger(one_sample_steps(2), 1, 1)
    ledger.want("stuck", "model")
    assert not ledger.exhausted
    ledger.holder_lost("stuck")
    assert ledger.exhausted
    assert not ledger.finished
    assert ledger.want("p", "model") is None


# --- rewind ---


def test_rewind_with_a_full_ring_drops_the_highest_first() -> None:
    ledger = Ledger(one_sample_steps(9), 3, 1, next_step=2)
    for _ in range(3):
        fill(ledger)
    delivery = take(ledger)
    ledger.rewind(1, {})
    assert ledger.counts == dict.fromkeys(ledger.counts, 0) | {"reserved": 1, "ready": 2}
    assert not ledger.release(delivery.key, delivery.attempt), "what was delivered before the rewind is stale"
    assert fill(ledger) == (1, 0)
    again = [take(ledger) for _ in range(3)]
    assert [one.key[0] for one in again] == [1, 2, 3]
    for one in again:
        ledger.release(one.key, one.attempt)
    assert [one.key[0] for one in drain(ledger)] == [4, 5, 6, 7, 8]


def test_rewind_waits_for_writers_and_their_blocks_count_while_wanted() -> None:
    ledger = Ledger(one_sample_steps(9), 2, 1, next_step=4)
    fourth, fifth = ledger.want("p", "model"), ledger.want("q", "model")
    ledger.rewind(3, {})
    assert ledger.counts["leased"] == 2
    assert ledger.want("p", "model") is None
    assert ledger.take_revocations() == [fourth, fifth]
    assert not ready(ledger, fifth), "block 3 needs the slot of block 5 more"
    assert ready(ledger, fourth), "block 4 is still among the first two"
    assert fill(ledger) == (3, 0)
    assert [one.key[0] for one in drain(ledger)] == [3, 4, 5, 6, 7, 8]


def test_nothing_is_leased_in_front_of_which_a_block_waits_for_a_slot() -> None:
    ledger = Ledger(
        Steps(*([(step, step + 10)] for step in range(6))),
        1,
        1,
        next_step=5,
        parts_of=lambda s: {"model": s[:1], "replay": s[1:]},
    )
    model = ledger.want("p", "model")
    ledger.rewind(3, {})
    assert ledger.want("r", "replay") is None, "it would hold up block 3 for longer"
    assert not ready(ledger, model)
    replay = ledger.want("r", "replay")
    assert replay is not None
    assert replay.key == (3, 0)


def test_a_writer_behind_the_cursor_is_fenced() -> None:
    ledger = Ledger(one_sample_steps(9), 1, 1)
    lease = ledger.want("p", "model")
    ledger.rewind(5, {})
    assert ledger.want("q", "model") is None, "its slot is not reused while it may be written"
    assert ledger.counts["leased"] == 1
    assert not ready(ledger, lease)
    assert fill(ledger) == (5, 0)


def test_rewind_takes_the_quarantine_list_of_the_cursor() -> None:
    ledger = Ledger(Steps([(0, 1)], [(2, 3)]), 2, 1, quarantined={0: "old"})
    for _ in range(2):
        fill(ledger)
    ledger.rewind(0, {3: "new"})
    assert ledger.quarantined == {3: "new"}
    assert ledger.counts["ready"] == 0
    assert [delivery.samples for delivery in drain(ledger)] == [(0, 1), (2,)]


def test_a_second_run_through_releases_everything_again() -> None:
    ledger = Ledger(one_sample_steps(4), 2, 1)
    drain(ledger)
    assert (ledger.finished, ledger.lowest_unreleased_step) == (True, 4)
    ledger.rewind(2, {})
    assert (ledger.finished, ledger.lowest_unreleased_step) == (False, 2)
    assert [delivery.key[0] for delivery in drain(ledger)] == [2, 3]


def test_tries_survive_a_rewind() -> None:
    ledger = Ledger(one_sample_steps(2), 1, 1)
    for _ in range(3):
        fill(ledger)
        delivery = take(ledger)
        ledger.bad(delivery.key, delivery.attempt)
        ledger.rewind(0, ledger.quarantined)
    assert set(ledger.quarantined) == {0}


# --- pause and spill ---


def test_nothing_is_leased_while_paused() -> None:
    ledger = Ledger(one_sample_steps(2), 2, 1)
    lease = ledger.want("p", "model")
    ledger.paused = True
    assert ledger.want("p", "model") is None
    assert ready(ledger, lease)
    assert take(ledger).key == (0, 0)
    ledger.paused = False
    assert ledger.want("p", "model") is not None


def test_a_spilled_slot_is_kept_until_the_disk_has_it() -> None:
    ledger = Ledger(one_sample_steps(2), 1, 1)
    fill(ledger)
    delivery = take(ledger)
    assert ledger.release(delivery.key, delivery.attempt, spill=True)
    assert ledger.slots_in("spilling") == {0}
    assert ledger.want("p", "model") is None
    ledger.rewind(0, {})
    assert ledger.counts["spilling"] == 1
    assert ledger.spilled(delivery.attempt)
    assert fill(ledger) == (0, 0)
