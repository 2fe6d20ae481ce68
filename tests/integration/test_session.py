"""Two runs in one Python session, under a low limit on open files, in a folder and with names longer than a socket's
path may be; and rings that cannot work, refused from the command line with their numbers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

SESSION = """
import sys
from pathlib import Path
from launch.config import load_config
from launch.live import Screen
from launch.run import run

config, *starts = sys.argv[1:]
for start in starts:
    name, transport, *settings = start.split(";")
    config_now = load_config(Path(config), [f"run.name={name}", f"ring.transport={transport}", *settings])
    with Screen() as screen:
        print("code", run(config_now, False, screen), flush=True)
"""
HANDLES = 128


def open_files(pid: int) -> dict[str, str]:
    """Descriptor -> what it is, as far as it could be looked at."""
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[path.name] = os.readlink(path)
        except OSError:
            continue
    return found


def sockets_of(files: dict[str, str]) -> set[str]:
    return {what for what in files.values() if what.startswith("socket:")}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_runs_in_one_session_with_few_handles_and_long_paths(workspace: Any, make_folder: Any) -> None:
    """B4: 128 handles, and no more of them with every block. B5: a folder of 200 characters, names of 150. B6: sockets
    are opened before children are started, none gets one of the launcher's, and a second run in the session works."""
    deep = workspace.folder / ("d" * 100) / ("e" * max(1, 98 - len(str(workspace.folder))))
    deep.mkdir(parents=True)
    assert len(str(deep)) >= 200
    there = type(workspace)(deep, workspace.config)
    model = make_folder("llama", name="m" * 150)
    names = {"shm": "s" * 150, "zmq": "z" * 150}
    settings = (f"run.dir={there.runs}", f"target.model={model}", "train.max_steps=60", "eval.every=0", "data.eval=[]")
    starts = [";".join((name, transport, *settings)) for transport, name in names.items()]
    command = ["sh", "-c", f'ulimit -n {HANDLES} && exec "$@"', "sh", sys.executable, "-P", "-c", SESSION]
    session = subprocess.Popen(
        [*command, str(workspace.config), *starts],
        cwd=deep,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    try:
        for transport, name in names.items():
            there.wait_for_step(name, 10)
            children = ["coordinator", "producer-0", "consumer-0", *(["ingest"] if transport == "zmq" else [])]
            pids = {child: there.pid_of(name, child) for child in children}
            handles: dict[str, list[int]] = defaultdict(list)
            for step in (11, 50):
                there.wait_for_step(name, step)
                launcher = sockets_of(open_files(session.pid))
                for child, pid in pids.items():
                    files = open_files(pid)
                    handles[child].append(len(files))
                    assert not sockets_of(files) & launcher, child
                    maps_ring = child in ("consumer-0", "ingest") or (child, transport) == ("producer-0", "shm")
                    assert any("draftwire-ring" in what for what in files.values()) == maps_ring, child
            assert all(abs(late - early) <= 1 for early, late in handles.values()), handles
        said, _ = session.communicate(timeout=60)
    finally:
        session.kill()
        session.communicate()
    assert session.returncode == 0, said
    assert re.findall("^code .*$", said, re.MULTILINE) == ["code 0", "code 0"]
    assert there.losses(names["shm"]) == there.losses(names["zmq"])
    jobs = [json.loads((there.runs / name / "job.json").read_bytes()) for name in names.values()]
    addresses = {job[key] for job in jobs for key in ("address", "payload_address")}
    assert len(addresses) == 4
    assert max(map(len, addresses)) <= len("ipc://") + 107


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_ring_that_cannot_work_is_refused_with_both_numbers(workspace: Any, transport: str) -> None:
    """H6 and B4: a sample that no slot holds, a ring that memory does not hold; at start, not by a stall or SIGBUS."""
    cases = {
        "24KiB": r"a block of 64 tokens takes (\S+ [kMG]?B), .* but ring\.bytes = 24\.58 kB holds \d: raise",
        "900TiB": r"ring\.bytes = 989\.6 TB but only (\S+ [MGT]B) of memory is free: lower it",
    }
    for size, said in cases.items():
        started = time.monotonic()
        settings = (f"ring.bytes={size}", f"ring.transport={transport}", "train.batch_tokens=64")
        refused = workspace.run("tight", *(word for setting in settings for word in ("--set", setting)))
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert re.search(said, refused.stderr), refused.stderr
        assert time.monotonic() - started < 30
        assert not (workspace.runs / "tight" / "job.json").exists()
