"""What blocks of a given size need of this machine: of the devices of both roles, of the ring, of the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from consumer.shape import DrafterShape
from launch.budget import Block, Need, checkpoint_bytes, consumer_need, producer_need, shortage
from launch.config import Config
from launch.lengths import longest_sample
from launch.machine import Gpu
from launch.partition import Partition
from launch.placement import Placement
from producer.division import elsewhere_bytes
from producer.locate import weight_size
from producer.towers import left_out
from protocol.block import CARRIERS
from protocol.errors import RequestError
from protocol.ring import LARGEST_SHARE_OF_FREE_MEMORY, SLOTS_PER_PROCESS, RingSize, ring_size


class Sizes(msgspec.Struct, frozen=True):
    """A request on a machine, all but its partition. `weight_bytes`: the target's weights as one
    GPU of a producer holds them;
    `free_bytes`: of the host."""

    config: Config
    placement: Placement
    gpus: tuple[Gpu, ...]
    free_bytes: int
    facts: dict[str, Any]
    shape: DrafterShape
    dtype: str
    weight_bytes: int

    @property
    def width(self) -> int:
        """Numbers in one token's features."""
        return len(self.shape.target_layer_ids) * self.shape.hidden_size

    @property
    def checkpoint_bytes(self) -> int:
        """Host memory of the consumer that writes checkpoints."""
        return checkpoint_bytes(self.shape, self._compute_width)

    def needs(self, partition: Partition) -> tuple[Need, Need]:
        """Bytes that a producer and a consumer need on their devices."""
        longest, carried = longest_sample(self.config), CARRIERS[self.dtype].itemsize
        block = Block(self._largest(partition), partition.draft_tokens, longest)
        device, _, _ = self.placement.consumers[0].partition(":")
        producer = producer_need(self.weight_bytes, self.facts, len(self.shape.target_layer_ids), carried, block)
        tied, computed = bool(self.facts["tied"]), self._compute_width
        return producer, consumer_need(self.shape, tied, carried, computed, block, device)

    def ring(self, partition: Partition) -> RingSize:
        """Raises RequestError when not enough slots fit."""
        largest = self._largest(partition)
        # A sample has two tokens at least: an anchor and what follows it.
        most_samples = largest // 2
        limits = (self.dtype, self.placement.peers, self.free_bytes, self._guests)
        return ring_size(self.config.ring, largest, most_samples, self.width, *limits)

    def lacking(self, partition: Partition) -> str:
        """What this machine does not hold of the needs in full, "" when it holds all. More memory of any kind never
        makes more of it lacking."""
        try:
            ring = self.ring(partition)
        except RequestError as error:
            return str(error)
        ring_bytes = ring.total_bytes
        if self.config.ring.bytes == "auto" and ring.slots < SLOTS_PER_PROCESS * (self.placement.peers + self._guests):
            # Not the whole slots of it: a byte more of free memory may add one.
            ring_bytes = int(self.free_bytes * LARGEST_SHARE_OF_FREE_MEMORY)
        host_bytes = ring_bytes + self.checkpoint_bytes
        return shortage(self.placement, self.gpus, *self.needs(partition), host_bytes, self.free_bytes)

    @property
    def _guests(self) -> int:
        """Producers of other hosts."""
        return self.config.hosts.producers if self.config.hosts.listen else 0

    def _largest(self, partition: Partition) -> int:
        """Tokens of the largest block: no step has more than `train.batch_tokens`, but for one long sample."""
        return min(partition.tokens, max(self.config.train.batch_tokens, longest_sample(self.config)))

    @property
    def _compute_width(self) -> int:
        """Bytes of one number in the drafter's products."""
        return 4 if self.config.train.precision == "fp32" else 2


def sizes(
    config: Config,
    placement: Placement,
    gpus: Sequence[Gpu],
    free_bytes: int,
    target_dir: Path,
    facts: dict[str, Any],
    shape: DrafterShape,
    dtype: str,
    weight_bytes: int | None = None,
) -> Sizes:
    """The sizes of a request for the target in `target_dir`, whose weights are read for theirs unless `weight_bytes`
    tells it. Raises RequestError for weights that cannot be read."""
    if weight_bytes is None:
        weight_bytes = loaded_bytes(target_dir, facts, dtype, elsewhere_bytes(target_dir, config.target))
    return Sizes(config, placement, tuple(gpus), free_bytes, facts, shape, dtype, weight_bytes)


def loaded_bytes(target_dir: Path, facts: dict[str, Any], dtype: str, elsewhere: int = 0) -> int:
    """Bytes of the weights in `target_dir` once they are loaded to run in `dtype`, from their headers alone;
    `elsewhere`: those of them, as stored, that other GPUs of a producer hold."""
    carried = CARRIERS[dtype].itemsize
    # As stored, but for what is cast on loading; quantised weights keep their size.
    stored = CARRIERS[facts["dtype"]].itemsize if facts["dtype"] in CARRIERS else carried
    return (weight_size(target_dir, left_out(target_dir))[1] - elsewhere) * carried // stored
