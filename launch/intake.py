"""What ingest decides: whose bytes may go where, and how much credit they have. No sockets, no memory."""

from __future__ import annotations

from msgspec import Struct

from protocol.chunks import ACK_EVERY_BYTES, WINDOW_BYTES
from protocol.messages import Chunk, ChunkAck, Expect


class Arrival(Struct):
    """A block on its way: `received` bytes of it lie in the ring, `acked` of them the sender knows of."""

    expected: Expect
    received: int = 0
    acked: int = 0


class Intake:
    """Blocks on their way, at most one a slot. `stale` counts chunks that nobody expects any more."""

    def __init__(self, window_bytes: int = WINDOW_BYTES, ack_every_bytes: int = ACK_EVERY_BYTES) -> None:
        self.stale = 0
        self._window_bytes, self._ack_every_bytes = window_bytes, ack_every_bytes
        self._by_attempt: dict[int, Arrival] = {}
        self._by_slot: dict[int, int] = {}

    def expect(self, expected: Expect) -> ChunkAck:
        """Takes a block from now on; whatever else was on its way to the slot is stale. Returns the first credit."""
        self._forget(self._by_slot.get(expected.slot))
        self._by_attempt[expected.attempt] = Arrival(expected)
        self._by_slot[expected.slot] = expected.attempt
        return self._ack(expected.attempt, 0)

    def fence(self, holder: str) -> None:
        """Whatever of `holder` is on its way is stale from now on, although nobody else is expected in its place."""
        for attempt in [one for one, arrival in self._by_attempt.items() if arrival.expected.holder == holder]:
            self._forget(attempt)

    def place(self, holder: str, chunk: Chunk) -> tuple[int, int, int] | ChunkAck | None:
        """Where a chunk's bytes go: (slot, first byte, end of the room). None when nobody expects it of `holder`: the
        bytes are to be dropped, as they are when the answer is a refusal."""
        arrival = self._by_attempt.get(chunk.attempt)
        if arrival is None or arrival.expected.holder != holder:
            self.stale += 1
            return None
        expected = arrival.expected
        if not 0 <= chunk.offset < expected.nbytes:
            return self._refuse(arrival, f"a chunk at {chunk.offset} lies outside a block of {expected.nbytes} bytes")
        return expected.slot, chunk.offset, expected.nbytes

    def arrived(self, chunk: Chunk, nbytes: int, room: int, checksum: int) -> ChunkAck | None:
        """A placed chunk was received: `nbytes` long where `room` was left, with this checksum. The acknowledgement, if
        one is due."""
        arrival = self._by_attempt[chunk.attempt]
        if nbytes > room:
            return self._refuse(arrival, f"a chunk of {nbytes} bytes at {chunk.offset} leaves its block")
        if checksum != chunk.checksum:
            return self._refuse(arrival, f"the chunk at {chunk.offset} arrived damaged")
        arrival.received += nbytes
        if arrival.received > arrival.acked + self._window_bytes:
            return self._refuse(arrival, "more was sent than there was credit for")
        if chunk.last:
            self._forget(chunk.attempt)
        elif arrival.received - arrival.acked < self._ack_every_bytes:
            return None
        arrival.acked = arrival.received
        return self._ack(chunk.attempt, arrival.received)

    def _ack(self, attempt: int, received: int) -> ChunkAck:
        return ChunkAck(attempt=attempt, received=received, limit=received + self._window_bytes, problem="")

    def _refuse(self, arrival: Arrival, problem: str) -> ChunkAck:
        attempt = arrival.expected.attempt
        self._forget(attempt)
        return ChunkAck(attempt=attempt, received=arrival.received, limit=arrival.received, problem=problem)

    def _forget(self, attempt: int | None) -> None:
        if attempt is not None and (arrival := self._by_attempt.pop(attempt, None)) is not None:
            del self._by_slot[arrival.expected.slot]
