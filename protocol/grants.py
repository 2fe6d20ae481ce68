"""What the ledger grants and what it knows of one block: leases, deliveries, parts, entries, the walk over the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from protocol.packing import BlockSpec

Key = tuple[int, int]  # (step, block index): its order is the plan's order
# Which kind of producer fills which of these samples: {"model": samples} or {"replay": samples, "model": samples}.
PartsOf = Callable[[tuple[int, ...]], Mapping[str, tuple[int, ...]]]


class BlockSource(Protocol):
    """What the ledger asks of a plan."""

    @property
    def total_steps(self) -> int: ...

    def blocks(self, step: int) -> list[BlockSpec]: ...


class Lease(Struct, frozen=True):
    """Work and memory granted together: fill `samples` of the block, whose layout is `block_samples`, into `slot`."""

    step: int
    index: int
    kind: str
    attempt: int
    holder: str
    slot: int
    samples: tuple[int, ...]
    block_samples: tuple[int, ...]

    @property
    def key(self) -> Key:
        return self.step, self.index


class Delivery(Struct, frozen=True):
    """A block for its rank, filled by the leases in `parts`; an empty one has no samples, no slot and weight zero."""

    step: int
    index: int
    rank: int
    micro_step: int
    attempt: int
    slot: int | None
    samples: tuple[int, ...]
    parts: tuple[Lease, ...]

    @property
    def key(self) -> Key:
        return self.step, self.index


class LiveLease(Struct, eq=False):
    """A lease whose holder may still write. When fenced its content is no longer wanted and nothing of it counts; when
    revoked it should give up, and a NACK is no failure, but a READY still counts if the block kept its slot."""

    lease: Lease
    part: Part
    fenced: bool = False
    revoked: bool = False


class Part(Struct, eq=False):
    """Samples of one block that one producer fills."""

    kind: str
    samples: tuple[int, ...]
    live: LiveLease | None = None
    filled: Lease | None = None

    @property
    def open(self) -> bool:
        return self.live is None and self.filled is None


class Entry(Struct, eq=False):
    """An unreleased block. `planned` are the plan's samples, `samples` those left of it; `delivery` is the attempt
    number under which its consumer holds it."""

    key: Key
    rank: int
    micro_step: int
    planned: tuple[int, ...]
    samples: tuple[int, ...]
    parts: list[Part]
    slot: int | None = None
    delivery: int | None = None

    @property
    def filled(self) -> bool:
        return all(part.filled is not None for part in self.parts)

    def reopen(self, part: Part, parts_of: PartsOf) -> None:
        """Open one part again. Its samples may fall to another kind by now (a shard found damaged, say)."""
        at = self.parts.index(part)
        self.parts[at : at + 1] = split(part.samples, parts_of)


class Walk:
    """A cursor over the plan's blocks, in plan order."""

    def __init__(self, source: BlockSource, step: int) -> None:
        self._source = source
        self._blocks: list[BlockSpec] = []
        self._total_steps = source.total_steps
        self.key: Key = (step, 0)
        self._load()

    @property
    def block(self) -> BlockSpec | None:
        """The block at the cursor, or None at the end of the plan."""
        return self._blocks[self.key[1]] if self._blocks else None

    def advance(self) -> None:
        """Go to the next block."""
        step, index = self.key
        self.key = (step, index + 1) if index + 1 < len(self._blocks) else (step + 1, 0)
        if self.key[0] != step:
            self._load()

    def _load(self) -> None:
        step = self.key[0]
        self._blocks = self._source.blocks(step) if step < self._total_steps else []


def split(samples: tuple[int, ...], parts_of: PartsOf) -> list[Part]:
    """Cut samples into parts. Raises AssertionError unless `parts_of` gave each sample to exactly one kind."""
    parts = [Part(kind, tuple(part)) for kind, part in parts_of(samples).items() if part]
    if sorted(sample for part in parts for sample in part.samples) != sorted(samples):
        raise AssertionError(f"parts_of did not give each of {samples} to one kind")
    return parts


def all_model(samples: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The default cut into parts: the target model computes everything."""
    return {"model": samples}
