"""Blocks from the ring to the device, ahead of the step that trains on them.

A thread takes deliveries, copies them out of their slot, verifies them and gives the slot back; the training loop
asks for (step, micro-step) and waits for both its block and the coordinator's GO. At most `depth` blocks are held.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from consumer.bounds import DEPTH
from consumer.prefetch import prefetch_to
from consumer.verify import Rows, differing_tensor, unsound_samples
from protocol.arena import Arena
from protocol.block import views
from protocol.errors import ProtocolError, RunError
from protocol.messages import Bad, Credit, Deliver, Go, Quarantine, Release, Stop, Verified
from protocol.peer import Peer

# A rank that waits says so in its log this often.
SAY_WAIT_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceBlock:
    """A verified block: features `[T, taps x hidden]` on the device, the small tensors on the host."""

    step: int
    micro_step: int
    micro_steps: int
    epoch: int
    samples: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    offsets: NDArray[np.int32]
    features: torch.Tensor


@dataclass(frozen=True)
class Poison:
    """Why a block must not be trained on, and the samples to blame if they are known."""

    reason: str
    samples: tuple[int, ...] = ()


class Feed:
    """`next` yields blocks in order; `quarantined` is what the coordinator has taken out so far. `rows` is the dataset
    that blocks are compared with, if there is one."""

    def __init__(
        self,
        peer: Peer,
        arena: Arena,
        device: torch.device,
        taps: int,
        depth: int = DEPTH,
        rows: Rows | None = None,
    ) -> None:
        self.quarantined: dict[str, str] = {}
        self.waited_s = 0.0
        self._peer, self._arena, self._taps, self._rows = peer, arena, taps, rows
        self._prefetch = prefetch_to(device)
        self._blocks: dict[tuple[int, int], DeviceBlock] = {}
        self._orders: queue.Queue[Go | Stop] = queue.Queue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()
        peer.send(Credit(blocks=depth))

    def next(self, step: int, micro_step: int) -> DeviceBlock | None:
        """The block of this micro-step once every rank may run it; None when the run is to stop at this boundary.

        Raises RunError when the coordinator ends the run, ProtocolError when it sends another micro-step.
        """
        started = time.monotonic()
        order = self._await_order(step, micro_step, started)
        self.waited_s += time.monotonic() - started
        if isinstance(order, Stop):
            if self._failure is not None:
                raise self._failure
            raise RunError(f"ended by the coordinator: {order.reason}")
        if (order.step, order.micro_step) != (step, micro_step):
            raise ProtocolError(f"GO for {order.step}.{order.micro_step}, expected {step}.{micro_step}")
        if order.stop:
            return None
        block = self._blocks.pop((step, micro_step))
        self._prefetch.hand_over(block.features)
        self._peer.send(Credit(blocks=1))
        return block

    def _await_order(self, step: int, micro_step: int, started: float) -> Go | Stop:
        while True:
            try:
                return self._orders.get(timeout=SAY_WAIT_S)
            except queue.Empty:
                # The launcher says whom it waits for; this is for the reader of one rank's log.
                waited_s = time.monotonic() - started
                log.info("waiting for GO of step %d, micro-step %d: %.0f s", step, micro_step, waited_s)

    def _run(self) -> None:
        # Whatever goes wrong in this thread ends the training loop, which raises it.
        try:
            while True:
                message = self._peer.inbox.get()
                match message:
                    case Deliver():
                        self._receive(message)
                    case Quarantine(samples=samples):
                        self.quarantined = dict(samples)
                    case Go():
                        self._orders.put(message)
                    case Stop():
                        self._orders.put(message)
                        return
        except Exception as error:
            self._failure = error
            self._orders.put(Stop(reason=str(error)))

    def _receive(self, message: Deliver) -> None:
        key = {"step": message.step, "index": message.index, "attempt": message.attempt}
        found = self._sound_block(message)
        if isinstance(found, Poison):
            if message.slot >= 0:
                self._arena.mend(message.slot)
            self._peer.send(Bad(**key, samples=found.samples, reason=found.reason))
            self._peer.send(Credit(blocks=1))
            return
        self._blocks[message.step, message.micro_step] = found
        self._peer.send(Verified(**key))
        self._peer.send(Release(**key))

    def _sound_block(self, message: Deliver) -> DeviceBlock | Poison:
        """The block on the device, if its slot's marks are whole before it is copied out and still are afterwards."""
        if problem := self._marks(message):
            return Poison(problem)
        with self._prefetch.here():
            found = self._copy_out(message)
        problem = self._marks(message)
        return Poison(problem) if problem else found

    def _marks(self, message: Deliver) -> str:
        """What the marks of the block's slot say against it."""
        return self._arena.problem(message.slot, message.writers) if message.slot >= 0 else ""

    def _copy_out(self, message: Deliver) -> DeviceBlock | Poison:
        """The block on the device, or what is wrong with its content."""
        slot = self._arena.slot(message.slot) if message.slot >= 0 else memoryview(bytearray(64))
        tensors = views(slot, message.table)
        spec = next(spec for spec in message.table if spec.name == "features")
        features, summed = self._prefetch.bring(tensors["features"], getattr(torch, spec.dtype))
        block = DeviceBlock(
            step=message.step,
            micro_step=message.micro_step,
            micro_steps=message.micro_steps,
            epoch=message.epoch,
            samples=tensors["samples"].astype(np.int64),
            token_ids=tensors["token_ids"].astype(np.int32),
            loss_mask=tensors["loss_mask"].astype(np.uint8),
            offsets=tensors["offsets"].astype(np.int32),
            features=features,
        )
        if summed != message.checksum:
            return Poison(f"the features do not add up: {summed:016x}, announced {message.checksum:016x}")
        if tuple(block.samples.tolist()) != message.samples:
            return Poison("the slot holds other samples than announced")
        if self._rows is not None:
            small = (block.token_ids, block.loss_mask, block.offsets)
            if name := differing_tensor(self._rows, message.samples, *small):
                return Poison(f"{name} in the slot are not the dataset's")
        unsound = unsound_samples(features, block.token_ids, block.offsets, self._taps)
        if not unsound:
            return block
        named = tuple(message.samples[position] for position in unsound)
        return Poison(f"sample {named[0]}: {next(iter(unsound.values()))}", named)
