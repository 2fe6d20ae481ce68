"""Run folders: found by name, path or "latest"; alive exactly as long as a process holds the lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.runfolder import RunLock, find_run, is_alive
from protocol.errors import RequestError


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs, of which "b" wrote last and "planned" has not started."""
    for age_s, name in ((300, "a"), (100, "b"), (200, "c")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.resolved.json").write_text("{}")
        (folder / "metrics.jsonl").touch()
        os.utime(folder / "metrics.jsonl", (1e9 - age_s, 1e9 - age_s))
    (tmp_path / "runs" / "planned").mkdir()
    (tmp_path / "runs" / "planned" / "config.resolved.json").write_text("{}")
    return tmp_path / "runs"


def test_a_run_is_found_by_name_path_or_as_the_latest(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_run("a", runs) == runs / "a"
    assert find_run("planned", runs) == runs / "planned"
    assert find_run(str(runs / "c"), runs.parent / "other") == runs / "c"
    assert find_run("latest", runs) == runs / "b"
    os.utime(runs / "c" / "metrics.jsonl")
    assert find_run("latest", runs) == runs / "c"
    monkeypatch.chdir(runs.parent)
    assert find_run("a") == Path("runs/a")
    assert find_run("runs/a") == Path("runs/a")


def test_what_is_not_there_is_refused_with_what_is(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^d: no run of that name or path \(runs in .*: a, b, c, planned\)"):
        find_run("d", runs)
    with pytest.raises(RequestError, match="none"):
        find_run("d", tmp_path / "nothing")
    with pytest.raises(RequestError, match="`draftwire run CONFIG` starts one"):
        find_run("latest", tmp_path / "nothing")


@pytest.mark.parametrize(("typed", "meant"), [("plannd", "planned"), ("runs/plan", "planned"), ("Planned", "planned")])
def test_the_nearest_name_is_offered(runs: Path, typed: str, meant: str) -> None:
    with pytest.raises(RequestError, match=f"did you mean {meant}\\?$"):
        find_run(typed, runs)
    with pytest.raises(RequestError) as refused:
        find_run("something else", runs)
    assert "did you mean" not in str(refused.value)


def test_a_run_that_is_just_being_prepared_is_found(runs: Path) -> None:
    lock = RunLock(runs / "fresh")
    (runs / "datasets").mkdir()
    (runs / "notes.txt").touch()
    assert find_run("fresh", runs) == find_run("latest", runs) == runs / "fresh"
    lock.release()
    with pytest.raises(RequestError):
        find_run("fresh", runs)
    assert find_run("latest", runs) == runs / "b"


def test_a_folder_that_is_no_run_is_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no run of that name"):
        find_run(str(tmp_path), runs)


# --- the lock --------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from launch.runfolder import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts a process that holds the lock of tmp_path / "run"; returns once it does."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-P", "-c", HOLDER, tmp_path / "run"], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_lock_held_elsewhere_refuses_and_kill_9_frees_it(
    tmp_path: Path, hold: Callable[[], subprocess.Popen[bytes]]
) -> None:
    holder = hold()
    assert is_alive(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(RequestError, match=r"run: this run is alive; `draftwire stop .*/run` ends it"):
            RunLock(tmp_path / "run")
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(10)
    assert not is_alive(tmp_path / "run")
    RunLock(tmp_path / "run").release()


def test_a_lock_is_freed_by_release_and_leaves_no_descriptor(tmp_path: Path, open_fds: Callable[[], int]) -> None:
    before = open_fds()
    lock = RunLock(tmp_path / "run")
    assert is_alive(tmp_path / "run")
    with pytest.raises(RequestError):
        RunLock(tmp_path / "run")
    lock.release()
    assert not is_alive(tmp_path / "run")
    assert open_fds() == before


def test_a_run_can_start_while_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunLock(tmp_path / "run").release()
    close = os.close

    def start_before_closing(fd: int) -> None:
        monkeypatch.undo()
        RunLock(tmp_path / "run").release()
        close(fd)

    monkeypatch.setattr(os, "close", start_before_closing)
    assert not is_alive(tmp_path / "run")
    assert os.close is close


def test_children_of_the_holder_do_not_keep_it(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run")
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    lock.release()
    try:
        assert not is_alive(tmp_path / "run")
    finally:
        child.communicate(b"\n", timeout=10)


def test_a_run_that_never_started_is_not_alive(tmp_path: Path) -> None:
    assert not is_alive(tmp_path / "nothing")
    (tmp_path / "run").mkdir()
    assert not is_alive(tmp_path / "run")
    assert not (tmp_path / "run" / ".lock").exists()
