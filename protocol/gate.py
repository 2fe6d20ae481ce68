"""The gate: no rank enters a micro-step, and so no collective, before all of its blocks are on their devices and every
rank has come to the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

STOP = "stop"
ABANDON = "abandon"
COOLDOWN = "cooldown"  # the rate falls from this boundary on; whoever gives GO says so with it
FINISH = "finish"
UNCACHED = "uncached"  # nothing is replayed any more: the target computes all that is left


class GoAhead(Struct, frozen=True):
    """All ranks may run this micro-step, after carrying out `orders`, which only a step's first micro-step has.

    An order takes effect at the boundary before the step: a stop ends the run there and its micro-step is not run, and
    so does a finish, after which the run is done. Only an abandoned step is stopped at a later micro-step; what was
    accumulated for it is dropped.
    """

    step: int
    micro_step: int
    orders: tuple[str, ...] = ()


class VerifiedGate:
    """Emits every micro-step once and in order. `micro_steps` gives how many a step has."""

    def __init__(self, consumers: int, total_steps: int, micro_steps: Callable[[int], int], next_step: int = 0) -> None:
        self._consumers, self._total_steps, self._micro_steps = consumers, total_steps, micro_steps
        self._orders: list[str] = []
        self._stopped = self._abandoned = self._done = False
        self._next = (next_step, 0)
        self._verified: dict[tuple[int, int], set[int]] = {}
        self._reached = [-1] * consumers  # the step that each rank has come to

    @property
    def next(self) -> tuple[int, int]:
        """(step, micro-step) that is emitted next."""
        return self._next

    @property
    def finished(self) -> bool:
        """Every micro-step of the plan was emitted, or a finish was."""
        return self._done or self._next[0] >= self._total_steps

    def waiting_for(self) -> list[int]:
        """Ranks whose block of the next micro-step is not verified yet."""
        have = self._verified.get(self._next, set())
        return [rank for rank in range(self._consumers) if rank not in have]

    def absent(self) -> list[int]:
        """Ranks that still do something else, an evaluation say, than wait for the step that is next."""
        return [rank for rank, step in enumerate(self._reached) if step < self._next[0]]

    def reached(self, step: int, rank: int) -> None:
        """Nothing but GO keeps the rank from running `step`."""
        self._reached[rank] = max(self._reached[rank], step)

    def verified(self, step: int, micro_step: int, rank: int) -> None:
        """The rank has its block of this micro-step, sound, on its device; of one already emitted: no effect."""
        if (step, micro_step) >= self._next:
            self._verified.setdefault((step, micro_step), set()).add(rank)

    def bad(self, step: int, micro_step: int, rank: int) -> None:
        """The rank does not have it after all. After its micro-step was emitted this has no effect."""
        self._verified.get((step, micro_step), set()).discard(rank)

    def order(self, orders: Iterable[str]) -> None:
        """Have these carried out at the next step boundary; an order that already waits is not doubled."""
        self._orders.extend(order for order in dict.fromkeys(orders) if order not in self._orders)

    def abandon(self) -> None:
        """Stop before the next micro-step, although that may be within a step: its blocks will not come."""
        self._abandoned = True
        self.order([STOP])

    def go(self) -> GoAhead | None:
        """The next micro-step if all its blocks are verified and all ranks are there; nothing after a stop until a
        rewind.

        A stop or a finish needs neither, since its micro-step is not run: it does not wait for a producer that is still
        loading.
        """
        step, micro_step = self._next
        stopping = bool({STOP, FINISH}.intersection(self._orders)) and (micro_step == 0 or self._abandoned)
        if self._stopped or self.finished or ((self.waiting_for() or self.absent()) and not stopping):
            return None
        orders: tuple[str, ...] = ()
        if micro_step == 0 or stopping:
            orders, self._orders = tuple(self._orders), []
        self._stopped, self._done = STOP in orders, FINISH in orders and STOP not in orders
        self._verified.pop(self._next, None)
        if not self._done:
            last = micro_step + 1 == self._micro_steps(step)
            self._next = (step + 1, 0) if last else (step, micro_step + 1)
        return GoAhead(step, micro_step, orders)

    def rewind(self, step: int) -> None:
        """Start again at the boundary before `step`, with nothing verified and no rank there; orders that wait still
        wait."""
        self._next = (step, 0)
        self._reached = [-1] * self._consumers
        self._verified.clear()
        self._stopped = self._done = False
