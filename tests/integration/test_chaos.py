"""Deaths at named points and at random ones: nothing is lost, nothing comes twice, nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from multiprocessing import shared_memory
from pathlib import Path

import pytest

LONG = ("--set", "train.epochs=48", "--set", "train.max_steps=400", "--set", "data.eval=[]")
STORM_S = float(os.environ.get("CHAOS_S", "600"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
DECOY = bytes(range(256)) * 64


@pytest.fixture
def decoy():
    """Shared memory of another program, by name and by descriptor, that a careless clean-up could take for ours."""
    segment = shared_memory.SharedMemory(create=True, size=len(DECOY))
    segment.buf[: len(DECOY)] = DECOY
    fd = os.memfd_create("draftwire-ring")
    os.write(fd, DECOY)
    yield
    try:
        assert bytes(segment.buf[: len(DECOY)]) == DECOY
        assert os.pread(fd, len(DECOY) + 1, 0) == DECOY
    finally:
        segment.close()
        segment.unlink()
        os.close(fd)


QUIET: list[tuple[int, float]] = []  # losses of an undisturbed run: the same whoever asks


@pytest.fixture
def quiet(workspace) -> list[tuple[int, float]]:
    if not QUIET:
        assert workspace.run("quiet", *LONG).returncode == 0
        QUIET.extend(workspace.losses("quiet"))
        assert len(QUIET) == 400
    return QUIET


def _check(workspace, name: str, quiet: list[tuple[int, float]]) -> None:
    """Every step once and in order, as the undisturbed run did it, and no more samples than its steps hold."""
    assert workspace.losses(name) == quiet
    rows = workspace.rows(name, "step")
    assert rows[-1]["samples_trained"] == sum(row["samples"] for row in rows)
    assert not _sockets(workspace, name)


def _sockets(workspace, name: str) -> list[str]:
    run_id = json.loads((workspace.runs / name / "job.json").read_text())["run_id"]
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if run_id in line]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", ["shm", pytest.param("zmq", marks=pytest.mark.slow)])
def test_deaths_at_every_point_of_a_block_s_life_leave_the_losses_as_they_are(
    workspace, quiet, deadly, decoy, transport
):
    points = ("mid_fill-3", "before_ready-20", "after_ready-20")
    deaths = [f"producer-{point}" for point in points]
    deaths += ["consumer-before_verified-30", "consumer-after_release-30", "consumer-mid_checkpoint-2"]
    deaths += ["consumer-after_rename-2"]
    left = deadly(*deaths)
    started = workspace.start("struck", *LONG, "--set", f'ring.transport="{transport}"')
    assert started.wait(200) == 0, (workspace.folder / "struck.out").read_text()
    assert left() == []
    what = Counter(row["what"] for row in workspace.rows("struck", "event"))
    assert (what["gone"], what["rewind"]) == (3, 4)
    _check(workspace, "struck", quiet)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_deaths_of_one_of_two_ranks_leave_the_losses_within_rounding(workspace, quiet, deadly):
    left = deadly("consumer-in_reduction-30", "consumer-after_release-30", "consumer-mid_checkpoint-2")
    started = workspace.start("struck", *LONG, "--set", 'gpus.split="2:2"')
    assert started.wait(200) == 0, (workspace.folder / "struck.out").read_text()
    assert left() == []
    _near(workspace.losses("struck"), quiet)


def _near(losses, quiet) -> None:
    assert [step for step, _ in losses] == [step for step, _ in quiet]
    for (_, loss), (_, other) in zip(losses[:20], quiet[:20], strict=True):
        assert loss == pytest.approx(other, rel=1e-4)


class Storm:
    """Random signals to the children of a run, and now and then to its launcher, from a seed."""

    def __init__(self, workspace, name: str, seed: int, *arguments: str) -> None:
        self.workspace, self.name, self.arguments = workspace, name, arguments
        self.draw = random.Random(seed)
        self.struck: Counter[str] = Counter()
        self.launches = 0
        self.launcher = self._launch()

    def _launch(self):
        self.launches += 1
        resume = ("--resume",) if self.launches > 1 else ()
        return self.workspace.start(self.name, *self.arguments, *resume)

    def rage(self, children: dict[str, int], until_s: float) -> int:
        """Strikes until the run has ended or `until_s` seconds are over, then waits for it; returns its exit code."""
        calm_after = time.monotonic() + until_s
        while (code := self.launcher.poll()) is None and time.monotonic() < calm_after:
            self._strike(self.draw.choices(list(children), list(children.values()))[0])
            self._wait(self.draw.uniform(0.5, 4.0))
            if self.launcher.poll() not in (None, 0):  # its coordinator or itself was killed
                self.launcher = self._launch()
        if code is None:
            code = self.launcher.wait(120)
            if code in (1, -signal.SIGKILL):
                self.launcher = self._launch()
                code = self.launcher.wait(120)
        return code

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def _strike(self, child: str) -> None:
        if child == "launcher":
            self.launcher.kill()
            self.launcher.wait(10)
            self.struck["launcher killed"] += 1
            return
        try:
            pid = self.workspace.pid_of(self.name, child)
        except AssertionError:
            return  # it is just being started again
        if child == "coordinator" or self.draw.random() < 0.6:
            _signal(pid, signal.SIGKILL)
            self.struck[f"{child} killed"] += 1
        else:
            _signal(pid, signal.SIGSTOP)
            self._wait(self.draw.uniform(0.1, 2.0))
            _signal(pid, signal.SIGCONT)
            self.struck[f"{child} stopped"] += 1


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@pytest.mark.timeout(240)
def test_a_short_storm_changes_nothing(workspace, quiet, decoy):
    """C3, and C2: a checkpoint every 20 steps makes kills around one likely."""
    storm = Storm(workspace, "storm", 1, *LONG, "--set", 'gpus.split="2:1"')
    workspace.wait_for_step("storm", 10)
    children = {"producer-0": 4, "producer-1": 4, "consumer-0": 2, "launcher": 1}
    assert storm.rage(children, 30) == 0, (storm.struck, (workspace.folder / "storm.out").read_text())
    _check(workspace, "storm", quiet)
    assert sum(storm.struck.values()) >= 3, storm.struck


# What a long storm goes through again and again: how payload travels, how many of each, and who is struck how often.
WEATHER = (
    ("shm", "2:1", {"producer-0": 4, "producer-1": 4, "consumer-0": 2, "coordinator": 1, "launcher": 1}),
    ("zmq", "2:1", {"producer-0": 4, "producer-1": 4, "consumer-0": 2, "coordinator": 1, "launcher": 1}),
    ("shm", "2:2", {"producer-0": 3, "producer-1": 3, "consumer-0": 1, "consumer-1": 1, "launcher": 1}),
)


@pytest.mark.slow
@pytest.mark.timeout(STORM_S + 600)
def test_a_long_storm_changes_nothing(workspace, quiet, decoy, capsys):
    """CHAOS_S seconds of it (ten minutes) from the seed CHAOS_SEED; `make chaos` prints what it did."""
    struck: Counter[str] = Counter()
    steps = launches = rounds = 0
    begun = time.monotonic()
    while (left_s := STORM_S - (time.monotonic() - begun)) > 0:
        transport, split, children = WEATHER[rounds % len(WEATHER)]
        name = f"storm-{rounds}"
        settings = ("--set", f'ring.transport="{transport}"', "--set", f'gpus.split="{split}"')
        storm = Storm(workspace, name, SEED + rounds, *LONG, *settings)
        code = storm.rage(children, left_s)
        assert code == 0, (SEED + rounds, storm.struck, (workspace.folder / f"{name}.out").read_text())
        if split.endswith(":1"):
            _check(workspace, name, quiet)
        else:
            _near(workspace.losses(name), quiet)
        rounds, struck, launches = rounds + 1, struck + storm.struck, launches + storm.launches
        steps += len(quiet)
    with capsys.disabled():
        minutes = (time.monotonic() - begun) / 60
        print(f"\n{minutes:.1f} min, seed {SEED}: {rounds} runs, {steps} steps, {launches} starts; {dict(struck)}")
