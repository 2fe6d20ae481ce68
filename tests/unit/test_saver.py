"""Checkpoints in the background: in order, said when durable, said when failed, never silent."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from consumer import checkpoint as checkpoint_module
from consumer import saver as saver_module
from consumer.checkpoint import Snapshot
from consumer.checkpoints import checkpoints, newest_good
from consumer.saver import Saver
from protocol.errors import RunError

MakeSnapshot = Callable[..., Snapshot]


class Told:
    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.durable: list[int] = []
        self.failed: list[str] = []
        self.saver = Saver(folder, keep, lambda step, stall_s, write_s: self.durable.append(step), self.failed.append)


def test_what_is_durable_is_said_after_it_is(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    found: list[Path | None] = []
    saver = Saver(tmp_path, 3, lambda *_: found.append(newest_good(tmp_path)[0]), pytest.fail)
    saver.submit(make_snapshot(10), best=False)
    saver.wait()
    assert found == [tmp_path / "step-000010"]
    assert saver.last_error is None
    assert not (tmp_path / "best").is_symlink()


def test_the_best_is_linked_and_outlives_the_newer(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    told = Told(tmp_path, keep=2)
    for step, best in ((10, False), (20, True), (30, False), (40, False), (50, False)):
        told.saver.submit(make_snapshot(step), best)
    told.saver.wait()
    assert told.durable == [10, 20, 30, 40, 50]
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000020", "step-000040", "step-000050"]
    assert (tmp_path / "best").resolve().name == "step-000020"
    assert (tmp_path / "latest").resolve().name == "step-000050"


def test_the_step_loop_goes_on_while_one_is_written_and_a_second_waits(
    tmp_path: Path, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, real, writing = threading.Event(), saver_module.write_checkpoint, []

    def slow(folder: Path, snapshot: Snapshot) -> Path:
        writing.append(snapshot.cursor.next_step)
        assert may_write.wait(5)
        return real(folder, snapshot)

    monkeypatch.setattr(saver_module, "write_checkpoint", slow)
    told = Told(tmp_path)
    told.saver.submit(make_snapshot(10), best=False)  # returns at once
    second = threading.Thread(target=told.saver.submit, args=(make_snapshot(20), False))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    assert writing == [10]
    may_write.set()
    second.join(5)
    told.saver.wait()
    assert told.durable == writing == [10, 20]


def test_what_is_no_full_disk_is_said_and_raised(
    tmp_path: Path, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise ZeroDivisionError("a defect")

    told = Told(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(saver_module, "write_checkpoint", failing)
        told.saver.submit(make_snapshot(10), best=False)
        with pytest.raises(ZeroDivisionError, match="a defect"):
            told.saver.wait()
    assert told.failed == [told.saver.last_error] == ["checkpoint at step 10: a defect"]
    assert told.durable == []
    told.saver.wait()  # it is raised once


def test_a_coordinator_that_hears_no_more_is_raised(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    def lost(*_: float) -> None:
        raise RunError("the coordinator takes no more messages")

    saver = Saver(tmp_path, 3, lost, pytest.fail)
    saver.submit(make_snapshot(10), best=False)
    with pytest.raises(RunError):
        saver.submit(make_snapshot(20), best=False)


def test_a_new_saver_reads_what_an_earlier_one_wrote(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    first = Told(tmp_path, keep=2)
    for step in (10, 20):
        first.saver.submit(make_snapshot(step), best=False)
    first.saver.wait()
    (tmp_path / "step-000020" / "state.safetensors").write_bytes(b"")
    second = Told(tmp_path, keep=2)
    second.saver.submit(make_snapshot(15), best=False)
    second.saver.wait()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000010", "step-000015", "step-000020"]


def test_waiting_for_nothing_returns(tmp_path: Path) -> None:
    Told(tmp_path).saver.wait()


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left on device")]
)
def test_a_failure_is_said_and_the_next_success_clears_it(
    tmp_path: Path, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    told = Told(tmp_path)
    told.saver.submit(make_snapshot(10), best=True)
    told.saver.wait()

    def failing(*_: Any, **__: Any) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "save_file", failing)
        told.saver.submit(make_snapshot(20), best=True)
        told.saver.wait()
    assert told.durable == [10]
    assert len(told.failed) == 1
    assert told.saver.last_error == told.failed[0]
    assert "checkpoint at step 20: " in told.failed[0]
    assert "No space left on device" in told.failed[0]
    assert (tmp_path / "best").resolve().name == "step-000010"
    assert newest_good(tmp_path)[0] == tmp_path / "step-000010"
    told.saver.submit(make_snapshot(30), best=False)
    told.saver.wait()
    assert told.saver.last_error is None
    assert told.durable == [10, 30]
