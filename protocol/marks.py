"""The marks around a slot's payload: a header page before it and a canary behind it.

    header   a page that begins with four 64-bit words: magic, layout, slot, attempt of the newest writer
    payload
    canary   all bytes up to the next slot's header, 64 at least

A writer signs the header when it begins and once more when it has ended. A block may have two writers at once, so its
header must name one of the attempts that it was filled by. A late writer of any other attempt has then either not
signed since the last of these began, and what it still writes shows in the block's sum, or it has, and its attempt
stands there. The canary tells who writes past the end of a slot. It is laid when the ring is made and again by a
consumer that found it damaged, never by a writer: of two at once, one would mend what the other has done.
"""

from __future__ import annotations

from collections.abc import Collection

CANARY_BYTES = 64  # at least
_LAYOUT = 1
_MAGIC = int.from_bytes(b"DWSLOT\r\n", "little")
_CANARY = bytes.fromhex("c5a93b5e71d2ed86")


def lay(canary: memoryview) -> None:
    """Makes a canary whole."""
    canary[:] = _intact(len(canary))


def sign(header: memoryview, slot: int, attempt: int) -> None:
    """Marks a slot as being filled by `attempt`."""
    words = header.cast("Q")  # stored whole, so that two writers at once leave the attempt of one of them
    words[0], words[1], words[2], words[3] = _MAGIC, _LAYOUT, slot, attempt


def problem_of(header: memoryview, canary: memoryview, slot: int, attempts: Collection[int]) -> str:
    """What is wrong with the marks of a slot that `attempts` have filled; "" when nothing is."""
    magic, layout, marked, attempt = header.cast("Q")[:4]
    if (magic, layout, marked) != (_MAGIC, _LAYOUT, slot):
        return f"the header of slot {slot} was overwritten"
    if attempt not in attempts:
        return f"slot {slot} was written by attempt {attempt}, not {' or '.join(map(str, attempts))}"
    if canary != _intact(len(canary)):
        return f"the canary behind slot {slot} was overwritten"
    return ""


def _intact(nbytes: int) -> bytes:
    return (_CANARY * (nbytes // len(_CANARY) + 1))[:nbytes]
