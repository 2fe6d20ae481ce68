"""A machine of eight GPUs of which CUDA_VISIBLE_DEVICES shows four: what the plan says before anything starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.config import load_config
from launch.doctor import examine
from launch.machine import visible_gpus
from launch.placement import place, show_placement
from protocol.errors import RequestError

LINES = "".join(f"{at}, GPU-{at}a2b{at}c3d-77f0-4e, NVIDIA H200, 143771, 143000\n" for at in range(8))
CONFIG = """
[target]
model = "/models/some"
[data]
train = [{ path = "chats.jsonl" }]
"""


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The line that `run` and `doctor CONFIG` print for a [gpus] setting, with these devices visible."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<END\n{LINES}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "config.toml").write_text(CONFIG)

    def plan(setting: str, visible: str = "4,5,6,7") -> str:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        gpus = visible_gpus()
        config = load_config(tmp_path / "config.toml", [f"gpus.{part}" for part in setting.split(" ")])
        return show_placement(place(config.gpus, len(gpus)), gpus)

    return plan


def shown(visible: int, machine: int) -> str:
    return f"cuda:{visible} (GPU {machine}, NVIDIA H200, UUID GPU-{machine}a2b{machine}c3d)"


def roles(line: str) -> tuple[list[str], list[str]]:
    producers, _, consumers = line.partition("; consumers on ")
    devices = [part.removeprefix("producers on ").split("), ") for part in (producers, consumers)]
    return tuple([name.rstrip(")") + ")" for name in side] for side in devices)  # type: ignore[return-value]


def test_splits(planned: Callable[..., str]) -> None:
    names = [shown(at, 4 + at) for at in range(4)]
    assert roles(planned('split="3:1"')) == (names[:3], names[3:])
    assert roles(planned('split="2:2"')) == (names[:2], names[2:])


def test_visible_by_uuid_and_in_another_order(planned: Callable[..., str]) -> None:
    found = roles(planned('split="1:1"', visible="GPU-7a2b7c3d,GPU-5a2b"))
    assert found == ([shown(0, 7)], [shown(1, 5)])


def test_lists_count_the_visible_devices(planned: Callable[..., str]) -> None:
    assert roles(planned("producers=[2,0] consumers=[3]")) == ([shown(2, 6), shown(0, 4)], [shown(3, 7)])


def test_one_device(planned: Callable[..., str]) -> None:
    line = planned('split="auto"', visible="6")
    assert line == f"producers on {shown(0, 6)}; consumers on {shown(0, 6)}; both roles share cuda:0"


def test_doctor_prints_the_plan_without_starting_anything(planned: Callable[..., str], tmp_path: Path) -> None:
    placed = planned('split="auto"')
    report, lines, sound = examine(tmp_path / "config.toml")
    assert placed in lines
    assert [gpu["index"] for gpu in report["gpus"]] == ["4", "5", "6", "7"]
    assert any(line.startswith("cuda:3 is GPU 7, NVIDIA H200, GPU-7a2b7c3d-77f0-4e: ") for line in lines)
    assert not sound  # there is no such target


@pytest.mark.parametrize(
    ("setting", "visible", "reason"),
    [
        ('split="4:0"', "4,5,6,7", "4:0 leaves one role without a process"),
        ('split="0:4"', "4,5,6,7", "0:4 leaves one role without a process"),
        ('split="3:2"', "4,5,6,7", "3:2 needs 5 GPUs, 4 are visible"),
        ('split="1:1"', "6", "1:1 needs 2 GPUs, 1 are visible"),
        ("producers=[0,1] consumers=[1,2]", "4,5,6,7", "device 1 is in both roles"),
        ("producers=[4] consumers=[5]", "4,5,6,7", "they count from 0 to 3, whatever their numbers on the machine are"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    planned: Callable[..., str], setting: str, visible: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        planned(setting, visible)
