"""What the other ranks of a divided target are told to run, so that every rank enters the same collectives in order.

The first rank alone decides. Just before it runs a part of the target that all ranks compute together, it tells the
others, which run the same function with the same arguments and drop the result. Commands go through a pipe: it waits as
long as there is no work, and ends with the rank that writes it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, Protocol

import msgspec

from producer.decoding import Sampling

_LENGTH = struct.Struct("<I")


class Pass(msgspec.Struct, frozen=True, tag=True):
    """`producer.target.run_text`: int64 ids and mask (None: none) of `rows` rows, as bytes."""

    rows: int
    ids: bytes
    mask: bytes | None
    last: int | None


class Answers(msgspec.Struct, frozen=True, tag=True):
    """`producer.generate.answer_batch`, with ids and mask as in a Pass."""

    rows: int
    ids: bytes
    mask: bytes
    stop_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    seeds: tuple[int, ...]


class Whole(msgspec.Struct, frozen=True, tag=True):
    """`producer.whole.whole_parameter`, of the parameter that the model knows by `name`."""

    name: str


class Compile(msgspec.Struct, frozen=True, tag=True):
    """`producer.compiled.compile_layers`, of the first `count`."""

    count: int


Command = Pass | Answers | Whole | Compile
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


class Mirror(Protocol):
    """Who computes the target together with this process."""

    def tell(self, command: Command) -> None:
        """Has every other rank run it, at the same place in its own order."""
        ...


class Alone:
    """Nobody else: a target that is whole here, or a rank that is told what to run."""

    def tell(self, command: Command) -> None:
        pass


ALONE: Mirror = Alone()


def encode(command: Command) -> bytes:
    """A frame: the length in 4 bytes, little-endian, and msgpack."""
    payload = msgspec.msgpack.encode(command)
    return _LENGTH.pack(len(payload)) + payload


def commands(stream: BinaryIO) -> Iterator[Command]:
    """What comes through `stream`, until its writer closes it or ends in the middle of a frame."""
    while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        if len(payload := stream.read(length)) < length:
            return
        yield _decoder.decode(payload)
