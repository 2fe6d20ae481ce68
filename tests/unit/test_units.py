"""Sizes: read with units, refused by key; sizes and times shown for people."""

from __future__ import annotations

import pytest

from protocol.errors import RequestError
from protocol.units import parse_bytes, show_bytes, show_seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("64GiB", 64 << 30),
        ("64 gib", 64 << 30),
        (" 1.5 GB ", 1_500_000_000),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("2MB", 2_000_000),
        ("2MiB", 2 << 20),
        ("3TB", 3 * 10**12),
        ("1TiB", 1 << 40),
        ("7B", 7),
        ("0", 0),
    ],
)
def test_bytes(text: int | str, expected: int) -> None:
    assert parse_bytes(text, "ring.bytes") == expected
    assert isinstance(parse_bytes(text, "ring.bytes"), int)


@pytest.mark.parametrize(
    "text", ["", "GiB", "64 G", "64GiBs", "-1GB", "1e3", "1,5GB", "1.GB", "64GiB 2", "auto", "5min", -5]
)
def test_unreadable_bytes_name_the_key_the_value_and_the_units(text: str | int) -> None:
    with pytest.raises(RequestError) as refused:
        parse_bytes(text, "ring.bytes")
    assert str(refused.value).startswith(f"ring.bytes: cannot read {str(text)!r}")
    assert "gib" in str(refused.value)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (51_200, "51.2 kB"),
        (17_150_000, "17.15 MB"),
        (15.7e12, "15.7 TB"),
        (2.5e16, "2.5e+04 TB"),
        (-2_000_000, "-2 MB"),
    ],
)
def test_bytes_for_people(count: float, expected: str) -> None:
    assert show_bytes(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (41.4, "41 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.9, "1 h 00 min"),
        (7800, "2 h 10 min"),
        (200_000, "55 h 33 min"),
    ],
)
def test_times_for_people(seconds: float, expected: str) -> None:
    assert show_seconds(seconds) == expected
