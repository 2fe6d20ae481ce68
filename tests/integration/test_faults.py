"""Faults in the middle of a run, over both transports: the loss curve must be the undisturbed one, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

MEMORY_GROWTH_BYTES = 64 << 20
PAUSE_S = 6.0


CALM: list[tuple[int, float]] = []  # losses of an undisturbed run over shared memory: the same whoever asks


@pytest.fixture
def calm(workspace) -> list[tuple[int, float]]:
    if not CALM:
        assert workspace.run("calm").returncode == 0
        CALM.extend(workspace.losses("calm"))
        assert len(CALM) > 100
    return CALM


def test_over_zeromq_two_producers_of_which_one_is_killed_give_the_same_losses(workspace, calm):
    over = ("--set", 'ring.transport="zmq"', "--set", 'gpus.split="2:1"')
    killed = workspace.start("killed", *over)
    workspace.wait_for_step("killed", 20)
    os.kill(workspace.pid_of("killed", "producer-1"), signal.SIGKILL)
    assert killed.wait(90) == 0
    assert workspace.losses("killed") == calm
    assert json.loads((workspace.runs / "killed" / "job.json").read_text())["transport"] == "zmq"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", ["shm", pytest.param("zmq", marks=pytest.mark.slow)])
def test_killed_and_interrupted_runs_give_the_same_losses(workspace, calm, transport):
    over = ("--set", f'ring.transport="{transport}"')
    killed = workspace.start("killed", *over)
    for step in (15, 60):
        workspace.wait_for_step("killed", step)
        os.kill(workspace.pid_of("killed", "producer-0"), signal.SIGKILL)
    assert killed.wait(90) == 0
    assert workspace.losses("killed") == calm
    assert sum(row["what"] == "gone" for row in workspace.rows("killed", "event")) == 2

    stopped = workspace.start("stopped", *over)
    workspace.wait_for_step("stopped", 30)
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait(30) == 75
    reached = workspace.losses("stopped")[-1][0]
    assert 30 <= reached < len(calm)
    assert workspace.run("stopped", "--resume").returncode == 0  # over shared memory again
    assert workspace.losses("stopped") == calm


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once_and_keeps_the_checkpoint(workspace):
    started = workspace.start("cut")
    workspace.wait_for_step("cut", 25)
    started.send_signal(signal.SIGINT)
    time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    assert started.wait(20) in (75, 130)
    assert workspace.run("cut", "--resume").returncode == 0
    assert workspace.losses("cut")[-1][0] == len(workspace.losses("cut"))


@pytest.mark.slow
def test_stop_by_command_ends_like_a_signal(workspace):
    started = workspace.start("asked")
    workspace.wait_for_step("asked", 10)
    watched = workspace.draftwire("status", "asked", "--json")
    assert '"state": "running"' in watched.stdout
    stopped = workspace.draftwire("stop", "asked")
    assert stopped.returncode == 0, stopped.stderr
    assert "asked: interrupted" in stopped.stdout
    assert started.wait(5) == 75
    again = workspace.draftwire("stop", "asked")
    assert again.returncode == 2
    assert "not alive" in again.stderr


def test_a_dead_consumer_starts_again_from_the_checkpoint_and_the_losses_are_the_same(workspace, calm):
    """B8: what lay ready for the dead one, or was trained after its last checkpoint, comes again. Before the first
    checkpoint that is everything."""
    started = workspace.start("bereft")
    for step in (5, 50):
        workspace.wait_for_step("bereft", step)
        os.kill(workspace.pid_of("bereft", "consumer-0"), signal.SIGKILL)
        gone = workspace.pid_of("bereft", "producer-0")
    assert started.wait(90) == 0
    said = (workspace.folder / "bereft.out").read_text()
    assert "consumer-0 was killed by SIGKILL" in said
    assert "every consumer starts again from step 0" in said
    assert "every consumer starts again from step 40" in said
    assert workspace.losses("bereft") == calm
    assert workspace.rows("bereft", "step")[-1]["samples_trained"] == 64 * 12
    log = (workspace.runs / "bereft" / "log" / "coordinator.log").read_text()
    assert log.count("producer-0 joined") == 1, gone  # the target stayed loaded


def test_children_die_with_their_launcher(workspace):
    started = workspace.start("orphans", "--set", 'ring.transport="zmq"')
    workspace.wait_for_step("orphans", 5)
    started.kill()
    started.wait(10)  # the workspace fixture fails if anything is left


@pytest.mark.timeout(240)
def test_of_two_runs_side_by_side_one_is_killed_whole_and_the_other_ends_as_if_alone(workspace, calm):
    """Same folder of runs, same dataset, same machine. Of the killed one no process, memory or address is left."""
    one, other = workspace.start("one"), workspace.start("other")
    for name in ("one", "other"):
        workspace.wait_for_step(name, 10)
    rings = {name: _rings([workspace.pid_of(name, "consumer-0")]) for name in ("one", "other")}
    assert len(rings["one"]) == len(rings["other"]) == 1
    assert rings["one"] != rings["other"]
    run_ids = {name: json.loads((workspace.runs / name / "job.json").read_text())["run_id"] for name in rings}
    assert all(f"@draftwire-{run_id}" in Path("/proc/net/unix").read_text() for run_id in run_ids.values())
    pids = [workspace.pid_of("one", child) for child in ("coordinator", "producer-0", "consumer-0")]

    os.killpg(one.pid, signal.SIGKILL)
    one.wait(10)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not rings["one"] & _rings(int(path.name) for path in Path("/proc").glob("[0-9]*"))
    assert f"@draftwire-{run_ids['one']}" not in Path("/proc/net/unix").read_text()

    assert other.wait(120) == 0
    assert workspace.losses("other") == calm
    assert not [row for row in workspace.rows("other", "event") if row["what"] in ("gone", "bad", "ignored")]


def _rings(pids):
    """The inodes of all rings that these processes hold or map."""
    found = set()
    for pid in pids:
        try:
            handles = [
                handle for handle in Path(f"/proc/{pid}/fd").iterdir() if "draftwire-ring" in os.readlink(handle)
            ]
            found |= {handle.stat().st_ino for handle in handles}
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:  # it is gone, or not ours to look at
            continue
        found |= {int(line.split()[4]) for line in maps if "draftwire-ring" in line}
    return found


@pytest.mark.parametrize("transport", ["shm", pytest.param("zmq", marks=pytest.mark.slow)])
def test_a_stopped_consumer_stops_the_producer_and_grows_no_memory(workspace, transport):
    started = workspace.start("paused", "--set", f'ring.transport="{transport}"')
    workspace.wait_for_step("paused", 20)
    consumer = workspace.pid_of("paused", "consumer-0")
    os.kill(consumer, signal.SIGSTOP)
    try:
        time.sleep(2)  # what was in flight arrives
        pids = [consumer, workspace.pid_of("paused", "producer-0"), workspace.pid_of("paused", "coordinator")]
        pids += [workspace.pid_of("paused", "ingest")] if transport == "zmq" else []
        before, busy_before = _memory(pids), _cpu_ticks(pids[1])
        time.sleep(PAUSE_S)
        assert _memory(pids) - before <= MEMORY_GROWTH_BYTES
        # A waiting producer uses next to nothing: a busy one would have used hundreds of ticks.
        assert _cpu_ticks(pids[1]) - busy_before < 0.2 * PAUSE_S * os.sysconf("SC_CLK_TCK")
    finally:
        os.kill(consumer, signal.SIGCONT)
    assert started.wait(90) == 0


def _memory(pids: list[int]) -> int:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE")


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
