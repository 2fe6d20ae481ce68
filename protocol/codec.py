"""Message <-> bytes: one msgpack map, validated against the frozen structs of protocol/messages.py.

frame = { "v": protocol version, "run": run id, "inc": coordinator incarnation, "t": message name, ...fields }
"""

from __future__ import annotations

from typing import Any, get_args

import msgpack
import msgspec

from protocol.errors import ProtocolError
from protocol.messages import AnyMessage, Message
from protocol.version import PROTOCOL_VERSION

# The largest control message: a LEASE carries 5 bytes a token, so this admits blocks of about 3 million tokens.
MAX_FRAME_BYTES = 16 << 20

# Converting into the one struct that the tag names takes 3 us, into the union of all 30 us: it is analysed each time.
_BY_TAG: dict[str, Any] = {kind.__struct_config__.tag: kind for kind in get_args(AnyMessage)}


class Envelope(msgspec.Struct, frozen=True):
    """What every frame carries besides the message: the run it belongs to and the coordinator's incarnation."""

    run: str
    incarnation: int


def encode(message: Message, envelope: Envelope) -> bytes:
    """One frame. The envelope's keys come first, so that a version mismatch is visible in any hex dump."""
    head = {"v": PROTOCOL_VERSION, "run": envelope.run, "inc": envelope.incarnation}
    frame: bytes = msgpack.packb(head | msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    return frame


def decode(frame: bytes) -> tuple[Envelope, AnyMessage]:
    """The envelope and the validated message.

    Raises ProtocolError naming the version, the field or the message that is wrong. Nothing is allocated from sizes
    that the frame claims, and no code runs on its behalf.
    """
    try:
        fields: Any = msgpack.unpackb(frame, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a msgpack map: {error}") from error
    if not isinstance(fields, dict):
        raise ProtocolError(f"not a map but {type(fields).__name__}")
    version = fields.pop("v", None)
    if type(version) is not int or version != PROTOCOL_VERSION:  # True and 1.0 equal 1
        raise ProtocolError(f"protocol version {version!r:.40}, this side speaks {PROTOCOL_VERSION}")
    try:
        head = {"run": fields.pop("run", None), "incarnation": fields.pop("inc", None)}
        tag = fields.get("t")
        kind = _BY_TAG.get(tag, AnyMessage) if isinstance(tag, str) else AnyMessage
        return msgspec.convert(head, Envelope), msgspec.convert(fields, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise ProtocolError(f"message {fields.get('t')!r}: {error}") from error
