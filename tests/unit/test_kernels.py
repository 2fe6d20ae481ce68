"""Which kernel packages a hybrid target lacks and what that costs, told from its config alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.config import load_config
from launch.doctor import examine
from launch.placement import place
from launch.start import outline
from producer import kernels
from producer.kernels import kernel_notes, linear_layers

HYBRID = ["linear_attention"] * 3 + ["full_attention"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernel modules that are there: none, until a test adds some."""
    there: set[str] = set()
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: name if name in there else None)
    return there


@pytest.fixture
def config_of(tmp_path: Path, make_folder: Callable[..., Path]) -> Callable[[str], Path]:
    def write(kind: str) -> Path:
        make_folder(kind)
        path = tmp_path / "config.toml"
        path.write_text(
            '[target]\nmodel = "target"\n[data]\ntrain = [{ path = "chats.jsonl" }]\nmax_length = 64\n'
            '[train]\nbatch_tokens = 128\n[ring]\nbytes = "4MiB"\n'
        )
        return path

    return write


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"layer_types": HYBRID * 2}, 6),
        ({"layer_types": ["sliding_attention", "full_attention"]}, 0),
        ({"num_hidden_layers": 48, "full_attention_interval": 4, "linear_num_value_heads": 32}, 36),
        ({"num_hidden_layers": 4}, 0),
    ],
)
def test_linear_layers_are_counted_by_structure(config: dict[str, Any], count: int) -> None:
    assert linear_layers(config) == count


def test_each_missing_package_is_named_with_its_cost(make_folder: Callable[..., Path], installed: set[str]) -> None:
    folder = make_folder("qwen3_5_multimodal")
    fla, conv = kernel_notes(folder)
    assert fla.startswith("3 of the target's 4 layers have linear attention and flash-linear-attention is missing")
    assert "6.2k tokens/s, with it 9.1k" in fla
    assert "causal-conv1d is missing" in conv
    installed.add("fla")
    assert kernel_notes(folder) == [conv]
    installed.add("causal_conv1d")
    assert kernel_notes(folder) == []


def test_a_target_of_attention_only_needs_none(make_folder: Callable[..., Path], installed: set[str]) -> None:
    assert kernel_notes(make_folder("qwen3")) == []


def test_doctor_and_the_first_lines_of_a_run_say_it(config_of: Callable[[str], Path], installed: set[str]) -> None:
    path = config_of("qwen3_5")
    expected = kernel_notes(path.parent / "target")
    assert len(expected) == 2
    report, lines, _ = examine(path)
    assert [note for note in report["notes"] if "linear attention" in note] == expected
    assert [line for line in lines if "linear attention" in line] == [f"note: {note}" for note in expected]
    config = load_config(path)
    found = outline(config, path.parent / "target", place(config.gpus, 0), [], 8 << 30)
    assert [note for note in found.notes if "linear attention" in note] == expected


def test_doctor_has_nothing_to_say_about_other_targets(config_of: Callable[[str], Path], installed: set[str]) -> None:
    report, _, _ = examine(config_of("qwen3"))
    assert not [note for note in report["notes"] if "attention" in note]
