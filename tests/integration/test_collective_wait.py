"""Work on one rank never ends in a collective's time-out: two real ranks over gloo, with a time-out of three seconds.

The ranks are told by hand, through pipes, what a coordinator would tell them, by the gate that it uses.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.stall import Watch
from protocol.gate import VerifiedGate
from protocol.messages import Heartbeat, Report

TIMEOUT_S = 3
# Twice the time-out, as an evaluation or a save on rank 0.
WORK_S = 6
STEPS = 3

SCRIPT = f"""
import sys, time
from datetime import timedelta
import torch
from consumer import reduce

def say(line):
    print(line, flush=True)

def told(line):
    assert sys.stdin.readline().strip() == line

reduce.COLLECTIVE_TIMEOUT = timedelta(seconds={TIMEOUT_S})
rank = int(sys.argv[1])
say("up")
told("join")
reduce.join_ranks(torch.device("cpu"))
for step in range({STEPS}):
    if rank == 0 and step == 1:
        time.sleep({WORK_S})
    say(f"reached {{step}}")
    told(f"go {{step}}")
    gradient, totals = torch.full((4,), rank + 1.0), torch.ones(1, dtype=torch.float64)
    reduce.sum_over_ranks([gradient], totals)
    assert gradient.tolist() == [3.0] * 4 and totals.item() == 2.0
    say(f"done {{step}}")
reduce.leave_ranks()
"""


class Ranks:
    """Two ranks; `lines` is what they have said, as (rank, line), in the order of arrival."""

    def __init__(self, folder: Path) -> None:
        (folder / "script.py").write_text(SCRIPT)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        self.lines: list[tuple[int, str]] = []
        self.errors = [folder / "0.err", folder / "1.err"]
        self.children = []
        for rank, errors in enumerate(self.errors):
            command = [sys.executable, "-P", str(folder / "script.py"), str(rank)]
            environment = os.environ | world | {"RANK": str(rank)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            with errors.open("w") as stderr:
                self.children.append(subprocess.Popen(command, env=environment, **pipes, stderr=stderr, text=True))
        self.readers = [threading.Thread(target=self._read, args=(rank,)) for rank in (0, 1)]
        for reader in self.readers:
            reader.start()

    def _read(self, rank: int) -> None:
        stdout = self.children[rank].stdout
        assert stdout is not None
        for line in stdout:
            self.lines.append((rank, line.strip()))

    def tell(self, line: str, *ranks: int) -> None:
        for rank in ranks:
            stdin = self.children[rank].stdin
            assert stdin is not None
            stdin.write(line + "\n")
            stdin.flush()

    def wait_for(self, line: str, *ranks: int, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not all((rank, line) in self.lines for rank in ranks):
            assert time.monotonic() < deadline, (line, self.lines, [path.read_text()[-2000:] for path in self.errors])
            time.sleep(0.02)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(tmp_path)
    yield found
    for child in found.children:
        child.kill()
        child.wait()
    for reader in found.readers:
        reader.join(10)
    for child in found.children:
        child.communicate()


@pytest.mark.timeout(150)
def test_long_work_on_one_rank_is_waited_for_and_named(ranks: Ranks) -> None:
    ranks.wait_for("up", 0, 1)
    ranks.tell("join", 0, 1)
    gate = VerifiedGate(2, STEPS, lambda step: 1)
    watch = Watch([], ["consumer-0", "consumer-1"], 0, time.monotonic(), limit_s=TIMEOUT_S)
    for name in ("consumer-0", "consumer-1"):
        watch.joined(name, time.monotonic())
    lines, told, heard, started = [], 0, 0, time.monotonic()
    while not gate.finished:
        assert time.monotonic() - started < 60, (ranks.lines, [path.read_text()[-2000:] for path in ranks.errors])
        time.sleep(0.02)
        now, fresh = time.monotonic(), ranks.lines[heard:]
        heard += len(fresh)
        for rank, line in fresh:
            word, _, step = line.partition(" ")
            if word == "reached":
                gate.reached(int(step), rank)
                gate.verified(int(step), 0, rank)  # its block has long been there
            elif word == "done":
                done = int(step) + 1
                watch.heard(f"consumer-{rank}", Heartbeat(progress=done), now)
                if rank == 0:
                    watch.heard("consumer-0", Report(kind="step", row={"step": done}), now)
        lines += [line] if (line := watch.look(gate, 0, now)) else []
        if (go := gate.go()) is not None:
            ranks.tell(f"go {go.step}", 0, 1)
            told += 1
    ranks.wait_for(f"done {STEPS - 1}", 0, 1)
    assert [child.wait(30) for child in ranks.children] == [0, 0]
    assert told == STEPS
    assert time.monotonic() - started > WORK_S
    assert any("waiting for consumer-0 to come to step 1 (evaluates or writes)" in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_without_the_gate_the_same_work_would_have_ended_the_run(ranks: Ranks) -> None:
    """What makes the other test one: the time-out is in force."""
    ranks.wait_for("up", 0, 1)
    ranks.tell("join", 0, 1)
    for step in range(STEPS):
        ranks.tell(f"go {step}", 0, 1)
    assert ranks.children[1].wait(60) != 0
    assert (1, "done 0") in ranks.lines
    assert "imed out" in ranks.errors[1].read_text()
