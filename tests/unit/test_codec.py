"""Frames: pinned byte for byte, round trips, and ProtocolError for anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import messages as m
from protocol.block import Table, TensorSpec, block_table
from protocol.codec import Envelope, decode, encode
from protocol.errors import ProtocolError
from protocol.version import PROTOCOL_VERSION

GOLDEN = Path(__file__).parents[1] / "golden" / "frames" / "frames.json"
ENVELOPE = Envelope("run-1", 7)
BLOCK = {"step": 12, "index": 3, "attempt": 300}
EXAMPLES: tuple[m.Message, ...] = (
    m.Hello(
        role="producer",
        name="producer-0",
        rank=0,
        pid=4242,
        host="node-1",
        token="5ec2e7",
        schema="abc",
        versions={"draftwire": "0.1.0"},
    ),
    m.Welcome(slots=8, slot_bytes=1 << 33, heartbeat_s=2.0),
    m.Reject(reason="the run token is wrong"),
    m.Want(kind="model"),
    m.Lease(
        **BLOCK,
        kind="model",
        slot=5,
        samples=(9, 70000),
        lengths=(2, 1),
        positions=(0, 1),
        token_ids=bytes(range(12)),
        loss_mask=b"\0\1\1",
    ),
    m.Ready(**BLOCK, kind="model", checksum=2**64 - 1, busy_s=0.125, halved=1, figures=((0.5, 2.0, 0.25),)),
    m.Nack(**BLOCK, kind="replay", reason="shard damaged", retryable=True, samples=(70000,)),
    m.Revoke(**BLOCK, kind="model"),
    m.Expect(holder="producer-0", attempt=300, slot=5, nbytes=1 << 33),
    m.Fence(holder="producer-0"),
    m.Fenced(holder="producer-0"),
    m.Chunk(attempt=300, offset=4 << 20, checksum=2**64 - 1, last=True),
    m.ChunkAck(attempt=300, received=8 << 20, limit=72 << 20, problem=""),
    m.Credit(blocks=2),
    m.Deliver(
        **BLOCK,
        micro_step=1,
        micro_steps=2,
        epoch=0,
        slot=-1,
        table=block_table(3, 2, 4, "bfloat16"),
        samples=(9, 70000),
        writers=(298, 299),
        checksum=2**63,
    ),
    m.Verified(**BLOCK),
    m.Release(**BLOCK),
    m.Bad(**BLOCK, samples=(9,), reason="tap 1 is all zero"),
    m.Reached(step=13),
    m.Go(step=12, micro_step=0, stop=True, finish=True, trained_s=28800.25, cooldown_step=-1),
    m.Quarantine(samples={"9": "tap 1 is all zero"}),
    m.Checkpointed(next_step=500, stall_s=0.375, write_s=21.5),
    m.Spill(attempt=300, slot=5, table=block_table(3, 2, 4, "bfloat16"), samples=(9, 70000)),
    m.Flush(),
    m.Spilled(attempt=300, durable=(9, 70000), problem=""),
    m.Heartbeat(progress=11),
    m.Report(kind="step", row={"loss": 1.5, "accuracy": [0.5], "skipped": False}),
    m.Snapshot(state={"eta_s": None}),
    m.Hung(name="producer-0", reason="it has been silent for 5 min 00 s"),
    m.Gone(name="producer-0", reaped=True, how="was killed by SIGKILL"),
    m.Rewind(
        names=("consumer-0",), step=500, quarantined={"9": "tap 1 is all zero"}, how="consumer-0 was killed by SIGKILL"
    ),
    m.Leave(reason="interrupted"),
    m.Order(order="stop"),
    m.Stop(reason="done"),
    m.Error(text="every slot of the ring is lost"),
    m.Again(text="shard-0123456789ab is damaged", at_once=True),
)


def name_of(message: m.Message) -> str:
    return type(message).__name__.lower()


def difference(message: m.Message, frame: bytes, golden: dict[str, Any]) -> str | None:
    """None when a frame is the pinned one; otherwise what to do about it."""
    pinned = golden["frames"].get(name_of(message))
    if golden["protocol_version"] == PROTOCOL_VERSION and frame.hex() == pinned:
        return None
    return (
        f"the bytes of {name_of(message)} are not those of protocol version {golden['protocol_version']}: "
        f"raise PROTOCOL_VERSION in protocol/version.py and pin {frame.hex()} in {GOLDEN.name}"
    )


def test_there_is_an_example_of_every_message() -> None:
    assert {type(message) for message in EXAMPLES} == set(get_args(m.AnyMessage))
    assert json.loads(GOLDEN.read_text())["frames"].keys() == {name_of(message) for message in EXAMPLES}


@pytest.mark.parametrize("message", EXAMPLES, ids=name_of)
def test_golden_frame(message: m.Message) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert (problem := difference(message, encode(message, ENVELOPE), golden)) is None, problem
    assert decode(bytes.fromhex(golden["frames"][name_of(message)])) == (ENVELOPE, message)


def test_a_changed_byte_asks_for_another_version() -> None:
    golden = json.loads(GOLDEN.read_text())
    frame = bytearray(encode(EXAMPLES[0], ENVELOPE))
    frame[-1] ^= 1
    assert "raise PROTOCOL_VERSION" in str(difference(EXAMPLES[0], bytes(frame), golden))
    golden["protocol_version"] += 1
    assert "raise PROTOCOL_VERSION" in str(difference(EXAMPLES[0], encode(EXAMPLES[0], ENVELOPE), golden))


def test_the_version_is_the_first_thing_in_a_frame() -> None:
    assert encode(m.Want(kind="model"), ENVELOPE)[1:4] == b"\xa1v" + bytes([PROTOCOL_VERSION])


def frame(**changes: Any) -> bytes:
    """A frame of WANT with keys changed; a key set to None is left out."""
    fields = {"v": PROTOCOL_VERSION, "run": "r", "inc": 0, "t": "want", "kind": "model"} | changes
    packed: bytes = msgpack.packb({key: value for key, value in fields.items() if value is not None})
    return packed


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (frame(v=99), rf"protocol version 99, this side speaks {PROTOCOL_VERSION}"),
        (frame(v=None), "protocol version None"),
        (frame(v="1"), "protocol version '1'"),
        (frame(v=True), "protocol version True"),
        (frame(v=float(PROTOCOL_VERSION)), r"protocol version \d\.0"),
        (msgpack.packb([1, 2]), "not a map but list"),
        (msgpack.packb(5), "not a map but int"),
        (b"", "not a msgpack map"),
        (b"\xc1", "not a msgpack map"),
        (frame()[:-1], "not a msgpack map"),
        (frame() + b"\0", "not a msgpack map"),
        (b"\xdf\xff\xff\xff\xff", "not a msgpack map"),  # claims four billion entries
        (b"\xc6\xff\xff\xff\xff", "not a msgpack map"),  # claims four gigabytes
        (b"\x91" * 5000 + b"\xc0", "not a msgpack map"),  # nested too deep
        (msgpack.packb({1: 2}), "not a msgpack map"),
        (frame(t="teleport"), "message 'teleport': .*'teleport'"),
        (frame(t=None), r"message None: .*required field `t`"),
        (frame(extra=1), "message 'want': .*`extra`"),
        (frame(kind=None), "message 'want': .*`kind`"),
        (frame(kind=5), r"message 'want': Expected `str`, got `int` - at `\$.kind`"),
        (frame(inc="x"), r"message 'want': Expected `int`, got `str` - at `\$.incarnation`"),
        (frame(run=None), r"message 'want': .*at `\$.run`"),
    ],
)
def test_what_is_no_frame_is_refused_by_name(data: bytes, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        decode(data)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("lease", "token_ids", "AAAA"),
        ("lease", "samples", [1, "2"]),
        ("lease", "attempt", 1.5),
        ("lease", "attempt", True),
        ("ready", "checksum", "1"),
        ("go", "stop", 0),
        ("quarantine", "samples", {"1": 2}),
        ("deliver", "table", [{"name": "x"}]),
        ("deliver", "table", [{"name": "x", "dtype": "uint8", "shape": [1.5], "offset": 0}]),
    ],
)
def test_a_wrong_type_names_the_field(name: str, field: str, value: Any) -> None:
    message = next(message for message in EXAMPLES if name_of(message) == name)
    fields = msgpack.unpackb(encode(message, ENVELOPE)) | {field: value}
    with pytest.raises(ProtocolError, match=rf"message '{name}': .*\$\.{field}"):
        decode(msgpack.packb(fields))


def test_no_message_can_be_made_of_frames_of_python_objects() -> None:
    with pytest.raises(ProtocolError, match="Timestamp"):
        decode(msgpack.packb(msgpack.Timestamp(1, 2)))
    with pytest.raises(ProtocolError, match=r"\$\.kind"):
        decode(frame(kind=msgpack.ExtType(5, b"payload")))


# --- round trips -----------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SPECS = st.builds(
    TensorSpec,
    name=st.text(max_size=5),
    dtype=st.text(max_size=5),
    shape=st.lists(st.integers(0, 2**63), max_size=3).map(tuple),
    offset=st.integers(0, 2**63),
)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=9),
    bytes: st.binary(max_size=40),
    Table: st.lists(SPECS, max_size=3).map(tuple),
    tuple[int, ...]: st.lists(st.integers(0, 2**63), max_size=4).map(tuple),
    tuple[str, ...]: st.lists(st.text(max_size=5), max_size=3).map(tuple),
    tuple[tuple[float, float, float], ...]: st.lists(st.tuples(*[st.floats(allow_nan=False)] * 3), max_size=3).map(
        tuple
    ),
    dict[str, str]: st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    dict[str, Any]: st.dictionaries(st.text(max_size=5), JSON, max_size=3),
}


def any_message(kind: type[m.Message]) -> st.SearchStrategy[m.Message]:
    hints = get_type_hints(kind)
    return st.builds(kind, **{field.name: VALUES[hints[field.name]] for field in msgspec.structs.fields(kind)})


MESSAGES = st.one_of([any_message(kind) for kind in get_args(m.AnyMessage)])


@given(MESSAGES, st.text(max_size=9), st.integers(0, 2**31))
def test_round_trip(message: m.Message, run: str, incarnation: int) -> None:
    envelope, back = decode(encode(message, Envelope(run, incarnation)))
    assert (type(back), back) == (type(message), message)
    assert envelope == Envelope(run, incarnation)


@given(st.data())
def test_damaged_frames_never_raise_anything_else(data: st.DataObject) -> None:
    damaged = bytearray(encode(data.draw(st.sampled_from(EXAMPLES)), ENVELOPE))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        _, message = decode(bytes(damaged))
    except ProtocolError:
        return
    assert isinstance(message, m.Message)


@given(st.binary(max_size=60))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(noise)
