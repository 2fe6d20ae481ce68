"""Real runs in real processes: a workspace with a tiny target, chats and a config, and a check that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

KILLPOINTS = Path(__file__).parent / "killpoints"
CONFIG = """
[run]
dir = "{runs}"
[target]
model = "{target}"
dtype = "float32"
[data]
train = [{{ path = "{train}" }}]
eval = [{{ path = "{held_out}" }}]
max_length = 64
[drafter]
layers = 2
block_size = 4
mlp = 64
layer_types = ["sliding_attention", "full_attention"]
sliding_window = 8
[train]
epochs = 12
batch_tokens = 160
anchors = 8
lr = 1e-2
precision = "fp32"
checkpoint_every = 20
[eval]
every = 60
prompts = 6
max_new_tokens = 12
"""


# Imported by every Python process: code that is run in a module's namespace when that module has been imported.
SITE = """
import importlib.util, sys

CODE = {code!r}

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name not in CODE:
            return None
        code = CODE.pop(name)
        spec = importlib.util.find_spec(name)
        real = spec.loader.exec_module

        def exec_module(module):
            real(module)
            exec(code, vars(module))

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


class Workspace:
    """Runs `draftwire` in a folder of its own, always with a deadline."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.folder, self.config = folder, config
        self.runs = folder / "runs"

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "launch.cli", *arguments]

    def draftwire(self, *arguments: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), cwd=self.folder, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """`draftwire run` in the background, as the leader of its own group."""
        command = self.command("run", str(self.config), "--set", f"run.name={name}", *arguments)
        with (self.folder / f"{name}.out").open("wb") as log:
            return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT, process_group=0)

    def run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.draftwire("run", str(self.config), "--set", f"run.name={name}", *arguments)

    def rows(self, name: str, kind: str) -> list[dict[str, Any]]:
        from launch.metrics import of_kind, read_rows

        return of_kind(read_rows(self.runs / name / "metrics.jsonl"), kind)

    def losses(self, name: str) -> list[tuple[int, float]]:
        return [(row["step"], row["loss"]) for row in self.rows(name, "step")]

    def wait_for_step(self, name: str, step: int, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not (rows := self.rows(name, "step")) or rows[-1]["step"] < step:
            assert time.monotonic() < deadline, f"{name} did not reach step {step}"
            time.sleep(0.02)

    def pid_of(self, name: str, child: str) -> int:
        """The pid of a run's newest child process, found by its command line."""
        module, _, index = child.partition("-")
        wanted = f"{module}.worker" if index else f"launch.{module}"
        found = [pid for pid, line in processes() if wanted in line and f"{self.runs}/{name}" in line]
        assert found, f"no {child} of {name} among the processes"
        return max(found)

    def followers(self) -> list[int]:
        """The pids of all ranks of targets other than the first."""
        return [pid for pid, line in processes() if "producer.follower" in line and str(self.folder) in line]


def processes() -> list[tuple[int, str]]:
    """(pid, command line) of every process but zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if line:
            found.append((int(path.name), line))
    return found


@pytest.fixture
def workspace(tmp_path: Path, make_folder: Callable[..., Path], make_chats: Callable[..., Path]) -> Iterator[Workspace]:
    config = tmp_path / "config.toml"
    config.write_text(
        CONFIG.format(
            runs=tmp_path / "runs",
            target=make_folder("llama"),
            train=make_chats(64),
            held_out=make_chats(12, "held_out.jsonl", first=1000),
        )
    )
    yield Workspace(tmp_path, config)
    # Nothing of a run may be alive a moment after it ended; what is, is killed and is a failure.
    deadline = time.monotonic() + 5
    while (left := _of_folder(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid, _ in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left behind: {left}"


def _of_folder(folder: Path) -> list[tuple[int, str]]:
    return [(pid, line) for pid, line in processes() if str(folder) in line and pid != os.getpid()]


@pytest.fixture
def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], list[str]]]:
    """Plans deaths ("ROLE-POINT-COUNT", see killpoints/) for the runs of this test, in order; returns a function that
    lists those still to come."""
    folder = tmp_path / "killpoints"
    folder.mkdir()
    monkeypatch.setenv("KILLPOINTS", str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{KILLPOINTS}:{os.environ.get('PYTHONPATH', '')}")

    def plan(*deaths: str) -> Callable[[], list[str]]:
        for place, death in enumerate(deaths):
            (folder / f"{place:02d}-{death}").touch()
        return lambda: [path.name for path in folder.iterdir() if not path.name.startswith("taken.")]

    return plan


@pytest.fixture
def patch_children(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes every process that is started from now on run code at the end of a module's import."""
    folder = workspace.folder / "patched"
    before = os.environ.get("PYTHONPATH", "")

    def patch(code: dict[str, str]) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(SITE.format(code=code))
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{before}" if code else before)

    return patch


@pytest.fixture
def as_json() -> Callable[[subprocess.CompletedProcess[str]], dict[str, Any]]:
    def parse(finished: subprocess.CompletedProcess[str]) -> dict[str, Any]:
        assert finished.returncode == 0, finished.stderr
        answer: dict[str, Any] = json.loads(finished.stdout)
        return answer

    return parse


@pytest.fixture
def cached(workspace: Workspace) -> Workspace:
    """The workspace with [cache] in its config."""
    with workspace.config.open("a") as file:
        file.write(f'[cache]\ndir = "{workspace.folder / "cache"}"\n')
    return workspace


@pytest.fixture
def no_target() -> dict[str, str]:
    """For `patch_children`: whoever loads a target fails."""
    code = """
def refuse(*arguments, **named):
    raise AssertionError("a target was loaded")
load_target = refuse
"""
    return {"producer.target": code}
