"""LEASE and DELIVER: what the ledger granted, said with the layout of the block and the tokens that go along."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.block import Table, block_table
from protocol.grants import Delivery, Lease
from protocol.job import Job
from protocol.messages import Deliver, Ready
from protocol.messages import Lease as LeaseMessage
from protocol.plan import Plan


class Samples(Protocol):
    """What is asked of the token dataset."""

    lengths: NDArray[np.int64]

    def tokens(self, index: int) -> NDArray[np.int32]: ...

    def mask(self, index: int) -> NDArray[np.uint8]: ...


class Descriptors:
    """Knows the samples of a run and how a block of them lies in a slot."""

    def __init__(self, job: Job, plan: Plan, samples: Samples) -> None:
        self._job, self._plan, self._samples = job, plan, samples
        self._lengths: list[int] = samples.lengths.tolist()
        # The sum of the features, as READY announced it, and who sent it, by the attempt of the lease.
        self._filled: dict[int, tuple[int, str]] = {}

    def tokens(self, samples: tuple[int, ...]) -> int:
        """How many tokens these samples have."""
        return sum(self._lengths[sample] for sample in samples)

    def table(self, samples: tuple[int, ...]) -> Table:
        """The layout of a block of these samples."""
        return block_table(self.tokens(samples), len(samples), self._job.width, self._job.dtype)

    def lease(self, lease: Lease) -> LeaseMessage:
        tokens = [self._samples.tokens(sample) for sample in lease.block_samples]
        masks = [self._samples.mask(sample) for sample in lease.block_samples]
        return LeaseMessage(
            step=lease.step,
            index=lease.index,
            kind=lease.kind,
            attempt=lease.attempt,
            slot=lease.slot,
            samples=lease.block_samples,
            lengths=tuple(self._lengths[sample] for sample in lease.block_samples),
            positions=tuple(lease.block_samples.index(sample) for sample in lease.samples),
            token_ids=np.concatenate(tokens).astype("<i4").tobytes(),
            loss_mask=np.concatenate(masks).tobytes(),
        )

    def filled(self, attempt: int, checksum: int, producer: str) -> None:
        """A lease was filled by `producer`, and its features add up to this."""
        self._filled[attempt] = checksum, producer

    def producers(self, delivery: Delivery) -> str:
        """Who filled what is delivered and not done with."""
        return " and ".join(dict.fromkeys(self._filled[part.attempt][1] for part in delivery.parts)) or "nobody"

    def figures(self, producer: str, ready: Ready) -> dict[str, Any]:
        """The row for metrics.jsonl of what the taps put out."""
        names = ("mean", "deviation", "zeros")
        taps = [
            {"tap": tap} | dict(zip(names, found, strict=True))
            for tap, found in zip(self._job.taps, ready.figures, strict=False)
        ]
        return {"step": ready.step, "index": ready.index, "producer": producer, "taps": taps}

    def done_with(self, delivery: Delivery) -> None:
        """What was delivered is needed no more; until then it may be delivered again, after a rewind."""
        for part in delivery.parts:
            self._filled.pop(part.attempt, None)

    def deliver(self, delivery: Delivery) -> Deliver:
        return Deliver(
            step=delivery.step,
            index=delivery.index,
            micro_step=delivery.micro_step,
            micro_steps=self._plan.micro_steps(delivery.step),
            epoch=self._plan.locate(delivery.step)[0],
            attempt=delivery.attempt,
            slot=-1 if delivery.slot is None else delivery.slot,
            table=self.table(delivery.samples),
            samples=delivery.samples,
            writers=tuple(part.attempt for part in delivery.parts),
            checksum=sum(self._filled[part.attempt][0] for part in delivery.parts) % 2**64,
        )
