"""[ring]: how many slots of which size, and how payload gets into them."""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.arena import slot_stride_bytes
from protocol.block import block_table, table_bytes
from protocol.errors import RequestError
from protocol.units import parse_bytes, show_bytes

# With "auto": enough for every producer to fill one slot and hold the next, and for every consumer to copy out one
# while the next lies ready. More memory would only hide a slower side for longer.
SLOTS_PER_PROCESS = 4
LARGEST_SHARE_OF_FREE_MEMORY = 0.5


class RingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[ring] — `bytes` of memory for blocks on their way, "auto" or a size such as "64GiB". `transport`: how payload
    gets there, through shared memory ("shm", which "auto" means on one node) or as ZeroMQ frames ("zmq")."""

    bytes: str | int = "auto"
    transport: Literal["auto", "shm", "zmq"] = "auto"


class RingSize(msgspec.Struct, frozen=True):
    """Slots and the payload bytes of each."""

    slots: int
    slot_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.slots * slot_stride_bytes(self.slot_bytes)


def ring_size(
    config: RingConfig, tokens: int, samples: int, width: int, dtype: str, processes: int, free: int, guests: int = 0
) -> RingSize:
    """The ring for blocks of at most `tokens` and `samples`, features `width` wide, shared by `processes` processes and
    with "auto" made for as many as `guests` more.

    `free` is the memory in bytes that this job may use. Raises RequestError when not even one slot a process fits,
    naming both numbers and the settings.
    """
    slot_bytes = table_bytes(block_table(tokens, samples, width, dtype))
    stride_bytes = slot_stride_bytes(slot_bytes)
    least = processes + 1
    if config.bytes == "auto":
        affordable = int(free * LARGEST_SHARE_OF_FREE_MEMORY) // stride_bytes
        slots = min(SLOTS_PER_PROCESS * (processes + guests), affordable)
        source = f"half of the {show_bytes(free)} that are free"
    else:
        asked = parse_bytes(config.bytes, "ring.bytes")
        slots, source = asked // stride_bytes, f"ring.bytes = {show_bytes(asked)}"
        if slots * stride_bytes > free:
            raise RequestError(f"{source} but only {show_bytes(free)} of memory is free: lower it")
    if slots < least:
        raise RequestError(
            f"ring.bytes: a block of {tokens} tokens takes {show_bytes(slot_bytes)}, {processes} processes need "
            f"{least} slots = {show_bytes(least * stride_bytes)}, but {source} holds {slots}: "
            "raise ring.bytes or lower train.microbatch_tokens"
        )
    return RingSize(slots, slot_bytes)
