"""Sizes and times with units, "64GiB" and "5min", read and shown."""

from __future__ import annotations

import re

from protocol.errors import RequestError

_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str, key: str) -> int:
    """Bytes of "64GiB", "1.5GB" or a bare number of bytes; RequestError names `key`."""
    if isinstance(value, int) and value >= 0:
        return value
    value = str(value)
    match = _QUANTITY.fullmatch(value)
    factor = _BYTES.get(match[2].lower() or "b") if match else None
    if match is None or factor is None:
        raise RequestError(f"{key}: cannot read {value!r}; write a number with one of {', '.join(_BYTES)}")
    return int(float(match[1]) * factor)


def parse_seconds(value: int | str, key: str) -> float:
    """Seconds of "5min", "1.5h" or a bare number of seconds; RequestError names `key`."""
    match = _QUANTITY.fullmatch(str(value))
    factor = _SECONDS.get(match[2].lower() or "s") if match else None
    if match is None or factor is None:
        raise RequestError(f"{key}: cannot read {value!r}; write a number with one of {', '.join(_SECONDS)}")
    return float(match[1]) * factor


def show_bytes(count: float) -> str:
    """A byte count for people, in decimal units: 15.7 TB, 51.2 kB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def show_seconds(seconds: float) -> str:
    """A duration for people: 41 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
