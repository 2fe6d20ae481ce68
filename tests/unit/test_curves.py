"""Which figures become curves, and what becomes of a logger that fails."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch import logger
from launch.curves import points
from launch.log_config import LogConfig, check_installed, check_log
from launch.logger import Loggers, rows_from
from launch.metrics import append_row, of_kind, read_rows
from protocol.errors import RequestError

STEP = {"kind": "step", "step": 3, "loss": 2.5, "accuracy": [0.5, 0.25], "lr": 1e-3, "anchors": 4, "skipped": False}


def test_lists_become_curves_and_what_is_no_number_none() -> None:
    assert points(STEP | {"mfu": None, "epoch": 0, "grad_norm": 1}) == {
        "step/loss": 2.5,
        "step/accuracy/1": 0.5,
        "step/accuracy/2": 0.25,
        "step/lr": 1e-3,
        "step/grad_norm": 1.0,
    }
    evaluated = {
        "kind": "eval",
        "step": 3,
        "acceptance_mean": 1.5,
        "acceptance_per_position": [0.5],
        "interval": [1, 2],
    }
    assert points(evaluated) == {"eval/acceptance_mean": 1.5, "eval/acceptance_per_position/1": 0.5}
    stream = {"kind": "stream", "step": 3, "imbalance": None, "gpu_memory_bytes": [7, None], "waiting": "x"}
    assert points(stream) == {"stream/gpu_memory_bytes/1": 7.0}
    assert points({"kind": "event", "what": "gone", "text": "x"}) == {}


@pytest.mark.parametrize("changes", [{"skipped": True}, {"anchors": 0}, {"loss": None}])
def test_a_step_that_taught_nothing_has_no_figures(changes: dict[str, Any]) -> None:
    """N2."""
    assert points(STEP | changes) == {"step/lr": 1e-3}


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_refused_with_its_install_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    config = LogConfig(tensorboard=name == "tensorboard", wandb="p" if name == "wandb" else None)
    with pytest.raises(RequestError, match=rf"log\.{name} needs .* pip install 'draftwire\[{name}\]'"):
        check_installed(config)
    check_installed(LogConfig())


def test_an_empty_project_is_refused() -> None:
    with pytest.raises(RequestError, match=r"log\.wandb"):
        check_log(LogConfig(wandb=" "))


class Package:
    """Stands for both packages: remembers what it was given, and fails from its `last` call on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int = 99) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.last = last
        board, wandb = types.ModuleType("torch.utils.tensorboard"), types.ModuleType("wandb")
        board.SummaryWriter = lambda *args, **kwargs: self._note("board", *args, kwargs)  # type: ignore[attr-defined]
        wandb.init = lambda **kwargs: self._note("init", kwargs)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
        monkeypatch.setitem(sys.modules, "wandb", wandb)

    def _note(self, *call: Any) -> Package:
        self.calls.append(call)
        if len(self.calls) > self.last:
            raise ConnectionError("no route to host")
        return self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._note(name, value, step)

    def flush(self) -> None: ...

    def close(self) -> None:
        self._note("close")

    def log(self, values: dict[str, float]) -> None:
        self._note("log", values)

    def finish(self) -> None:
        self._note("finish")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    sections = {"log": {"tensorboard": True, "wandb": "project"}, "train": {"lr": 1.0}}
    (folder / "config.resolved.json").write_bytes(msgspec.json.encode(sections))
    return folder


def test_both_get_every_point(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package(monkeypatch)
    loggers = Loggers(run_dir, LogConfig(tensorboard=True, wandb="project"), start_step=2)
    loggers.add({"kind": "eval", "step": 3, "acceptance_mean": 1.5})
    loggers.add({"kind": "event", "what": "gone", "text": "nothing to draw"})
    loggers.close()
    board, init, *rest = package.calls
    assert board == ("board", str(run_dir / "tensorboard"), {"purge_step": 2})
    assert (init[1]["project"], init[1]["id"], init[1]["resume"]) == ("project", "mine", "allow")
    assert init[1]["config"]["train"] == {"lr": 1.0}
    assert rest == [
        ("eval/acceptance_mean", 1.5, 3),
        ("log", {"eval/acceptance_mean": 1.5, "step": 3}),
        ("close",),
        ("finish",),
    ]
    assert read_rows(run_dir / "metrics.jsonl") == []


def test_a_logger_that_fails_is_one_event_and_off(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package(monkeypatch, last=2)
    loggers = Loggers(run_dir, LogConfig(tensorboard=True), start_step=0)
    for step in range(5):
        loggers.add({"kind": "eval", "step": step, "acceptance_mean": 1.5})
    loggers.close()
    assert len(package.calls) == 3
    (row,) = of_kind(read_rows(run_dir / "metrics.jsonl"), "event")
    assert (row["what"], row["text"]) == ("logger", "tensorboard is off: ConnectionError: no route to host")


def test_one_that_cannot_even_begin_leaves_the_other_alone(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package(monkeypatch, last=1)  # the second to begin is wandb
    loggers = Loggers(run_dir, LogConfig(tensorboard=True, wandb="project"), start_step=0)
    package.last = 99
    loggers.add({"kind": "eval", "step": 1, "acceptance_mean": 1.5})
    assert package.calls[2:] == [("eval/acceptance_mean", 1.5, 1)]


def test_rows_are_followed_as_they_come_and_to_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    append_row(path, "start", {"step": 0})
    start_byte = path.stat().st_size
    parts = iter([b"", b'{"kind": "st', b'ep"}\nno json\n'])

    def grow(_seconds: float) -> None:
        with path.open("ab") as file:
            file.write(next(parts))

    monkeypatch.setattr(logger.time, "sleep", grow)
    answers = iter([False, False, False, True])
    found = rows_from(path, start_byte, lambda: next(answers))
    assert [row["kind"] for row in found] == ["step"]
