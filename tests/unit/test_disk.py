"""The rates of a disk, and where none can be had."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from launch import disk
from launch.disk import existing, measure_disk
from protocol.direct import BUFFER_BYTES


def test_both_rates_are_measured_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MOST_BYTES", 3 * BUFFER_BYTES)
    found = measure_disk(tmp_path / "cache/of/features", 60)
    assert found is not None
    assert found.free_bytes > 2 * BUFFER_BYTES
    assert found.write_bytes_per_s > 1e6 < found.read_bytes_per_s
    assert list(tmp_path.iterdir()) == []
    brief = measure_disk(tmp_path, 0)  # one piece at most
    assert brief is not None


def test_a_disk_without_room_or_leave_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MOST_BYTES", 1 << 60)
    assert measure_disk(tmp_path, 1) is None
    monkeypatch.setattr(disk, "MOST_BYTES", BUFFER_BYTES)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr("protocol.direct._write", full)
    assert measure_disk(tmp_path, 1) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_yet_lies_on_the_disk_of_the_one_above(tmp_path: Path) -> None:
    assert existing(tmp_path / "a/b/c") == tmp_path.resolve()
    assert existing(tmp_path) == tmp_path.resolve()
