"""`draftwire plan` from a config.json alone, on named cards, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch import plan_command, site
from launch.cli import main
from launch.config import Config, load_config
from launch.kept import kept_path
from launch.machine import Gpu
from launch.measurements import Measurements, write_measurements
from launch.placement import GpusConfig
from launch.plan_command import Request, plan_run
from launch.plan_table import describe
from protocol.errors import RequestError

FOLDER = Path(__file__).parents[1] / "fixtures" / "qwen3.6-27b"
TOLD = Request(samples=913_786, mean_tokens=335)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "big.toml"
    path.write_text(
        f'[run]\ndir = "{tmp_path}/runs"\n[target]\nmodel = "{FOLDER}"\n[data]\ntrain = [{{ path = "no" }}]\n'
    )
    return path


def planned(config: Path, request: Request = TOLD, *overrides: str) -> dict[str, Any]:
    return plan_run(load_config(config, overrides), request, lambda line: None)


def asked(request: Request, **options: Any) -> Request:
    return Request(**{name: getattr(request, name) for name in request.__struct_fields__} | options)


def test_the_arithmetic_that_decides_everything(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN 1: five taps of 5,120 numbers in bf16; no weights, no data, no GPU."""
    monkeypatch.setattr(site, "visible_gpus", lambda: [])
    bill = planned(config)
    assert bill["taps"] == [1, 16, 31, 46, 61]
    assert bill["bytes_per_token"] == 51_200
    assert bill["full_dump_bytes"] == pytest.approx(15.7e12, rel=0.003)
    assert bill["bytes_per_sample"] == pytest.approx(17.15e6, rel=0.0005)
    assert bill["weights_from"] == "shapes"
    assert bill["weight_bytes"] == pytest.approx(53.8e9, rel=0.001)
    text = "\n".join(describe(bill))
    for figure in ("51,200 bytes a token", "17.15 MB a sample", "15.67 TB", "of it would fit"):
        assert figure in text


def test_the_keys_that_scripts_rely_on(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main_ok(
        ["plan", str(config), "--samples", "1000", "--mean-tokens", "300", "--gpu", "h200", "--gpus", "8", "--json"]
    )
    found = json.loads(capfd.readouterr().out)
    promised = "samples tokens bytes_per_token bytes_per_sample bytes_per_epoch full_dump_bytes free_disk_bytes "
    assert set(promised.split()) | {"ring_bytes", "steps", "gpu_memory"} <= found.keys()
    assert set(found["gpu_memory"]) == {"producer", "consumer"}
    assert found["hours"]["total"] == max(found["hours"]["producer"], found["hours"]["consumer"])
    assert [row["device"] for row in found["devices"]] == [f"cuda:{index}" for index in range(8)]


def main_ok(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0


def test_lines_are_aligned_and_few(config: Path) -> None:
    lines = describe(planned(config, asked(TOLD, gpu="h200", gpus=8)))
    table = [line for line in lines if not line.startswith("note")]
    column = table[0].index("913,786")
    assert len(table) <= 14
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in table)
    assert any(line.startswith("cuda:2 to cuda:7") for line in table)


def test_a_27b_target_and_its_trainer_on_one_80_gb_card_are_refused(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(config), "--samples", "9", "--mean-tokens", "300", "--gpu", "h100-80", "--gpus", "1"])
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert "for the producer" in said
    assert "for the consumer" in said
    assert "do not fit into the 85.52 GB" in said
    assert "what would fit: 2 x NVIDIA H100 80GB HBM3, or 1 x h200" in said


def test_what_would_fit_fits(config: Path) -> None:
    assert planned(config, asked(TOLD, gpu="h100-80", gpus=2))["devices"][1]["name"] == "NVIDIA H100 80GB HBM3"
    assert planned(config, asked(TOLD, gpu="h200", gpus=1))["devices"][0]["needs"].keys() == {"producer", "consumer"}


def test_cards_that_hold_no_target_of_this_size_are_refused_in_any_number(config: Path) -> None:
    with pytest.raises(RequestError, match=r"53\.79 GB for the producer.*what would fit: 2 x h100-80$"):
        planned(config, asked(TOLD, gpu="a100-40", gpus=2))


def test_a_wrong_tap_is_no_matter_of_memory(config: Path) -> None:
    with pytest.raises(RequestError, match=r"drafter\.taps is \[64\]") as refused:
        planned(config, asked(TOLD, gpu="h200"), "drafter.taps=[64]")
    assert "would fit" not in str(refused.value)


def test_this_machine_is_held_against_the_plan(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Gpu("NVIDIA H100 80GB HBM3", 80 << 30, 80 << 30, "0", "GPU-1")
    monkeypatch.setattr(site, "visible_gpus", lambda: [small])
    monkeypatch.setattr(site, "free_memory_bytes", lambda: 1 << 40)
    with pytest.raises(RequestError, match="what would fit"):
        planned(config)
    assert planned(config, asked(TOLD, gpu="b200"))["devices"][0]["name"] == "NVIDIA B200"


def test_host_memory_counts_where_it_is_known(config: Path) -> None:
    assert planned(config, asked(TOLD, gpu="h200", gpus=2))["host_memory"]["checkpoint"] > 20 << 30
    with pytest.raises(RequestError, match=r"ring\.bytes"):
        planned(config, asked(TOLD, gpu="h200", gpus=2, memory="16GiB"))


def test_the_split_of_the_config_says_how_many_cards(config: Path) -> None:
    assert len(planned(config, asked(TOLD, gpu="h200"), "gpus.split='3:5'")["devices"]) == 8
    assert site.asked_gpus(GpusConfig(producers=[0, 4], consumers=[2])) == 5
    with pytest.raises(RequestError, match="needs 8 GPUs"):
        planned(config, asked(TOLD, gpu="h200", gpus=4), "gpus.split='3:5'")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 5}, "go together"),
        ({"mean_tokens": 5}, "go together"),
        ({"samples": 5, "mean_tokens": 5, "estimate": 4}, "leave one out"),
        ({"samples": 5, "mean_tokens": 3073}, r"data\.max_length = 3072"),
        ({"gpus": 2}, "--gpus goes with --gpu"),
        ({"memory": "1GiB"}, "--memory goes with --gpu"),
        ({"samples": 5, "mean_tokens": 5, "gpu": "h200", "gpus": 0}, "--gpus 0"),
        ({"samples": 5, "mean_tokens": 5, "gpu": "h200", "memory": "lots"}, "--memory: cannot read"),
        ({"gpu": "h2000"}, "did you mean h200"),
    ],
)
def test_case_u3_no_option_is_taken_without_effect(config: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        planned(config, Request(**options))


def test_a_target_that_this_machine_cannot_hold_is_planned_for_any(
    make_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder("llama")
    path = tmp_path / "c.toml"
    path.write_text('[target]\nmodel = "target"\n[data]\ntrain = [{ path = "x" }]\n[drafter]\ntaps = [0, 2]\n')
    loaded: Config = load_config(path, (f"run.dir='{tmp_path}'", "ring.bytes='1GiB'"))
    monkeypatch.setattr(site, "visible_gpus", lambda: [])
    monkeypatch.setattr(site, "free_memory_bytes", lambda: 1 << 20)
    monkeypatch.setattr(plan_command, "_corpus", lambda *_: (None, plan_command.given(10, 20)))
    bill = plan_run(loaded, Request(), lambda line: None)
    assert any(note.startswith("not on this machine: ") for note in bill["notes"])
    assert bill["free_memory_bytes"] is None
    monkeypatch.setattr(site, "free_memory_bytes", lambda: 4 << 30)
    bill = plan_run(loaded, Request(), lambda line: None)
    assert (bill["free_memory_bytes"], bill["weights_from"], bill["devices"][0]["name"]) == (4 << 30, "files", "cpu")


def test_auto_is_the_quickest_split_and_another_one_is_seen_beside_it(config: Path) -> None:
    eight = asked(TOLD, gpu="h200", gpus=8)
    bill = planned(config, eight)
    assert (bill["split"], list(bill["splits"])[:3]) == ("2:6", ["2:6", "3:5", "1:7"])
    assert bill["splits"]["2:6"] == pytest.approx(bill["hours"]["total"])
    assert len(bill["devices"]) == 8
    assert "splits" in "\n".join(describe(bill))
    even = planned(config, eight, "gpus.split=4:4")
    assert even["split"] == "4:4"
    assert even["splits"] == pytest.approx(bill["splits"], rel=0.01)
    assert even["hours"]["total"] > bill["hours"]["total"]
    assert even["hours"]["total"] == pytest.approx(even["splits"]["4:4"])
    assert "4:4 (this plan)" in "\n".join(describe(even))
    assert planned(config, eight, "target.dtype=float32")["splits"] == {}


def test_hours_come_from_what_tune_measured_here(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the split that a run would take after `tune`, and of a given one; a table of cards until then."""
    gpu = Gpu("NVIDIA H200", 141 << 30, 141 << 30)
    monkeypatch.setattr(site, "visible_gpus", lambda: [gpu] * 4)
    monkeypatch.setattr(site, "free_memory_bytes", lambda: 1 << 40)
    request = asked(TOLD, samples=1_000, mean_tokens=360)
    bill = planned(config, request)
    assert bill["hours"]["source"] == "cards"
    assert any("an estimate from a table of cards" in line for line in describe(bill))
    loaded = load_config(config, [])
    work = {"steps": [[(100, 50)] * 840] * 4, "tokens_per_epoch": 1_000_000, "epochs": 3, "microbatch_tokens": 100,
            "microbatch_draft_tokens": 1000, "anchors": 8, "bytes_per_token": 1000}  # fmt: skip
    trainer = {"cost_s": 100 / 500 / (100 + 12 * 50)}  # 500 tokens/s a rank, 1,000 a producer
    room = {"gpu_bytes": 10**12, "host_bytes": 10**12, "slot_bytes": 10**6}
    kept = {"producers": [{"tokens_per_s": 1000.0}], "trainer": trainer, "work": work, "room": room}
    write_measurements(kept_path(loaded, [gpu] * 4), msgspec.convert(kept, Measurements))
    bill = planned(config, request)
    epochs = loaded.train.epochs
    assert bill["hours"]["source"] == "measured"
    assert [row["needs"].keys() for row in bill["devices"]] == [{"producer"}] + [{"consumer"}] * 3
    assert bill["hours"]["producer"] == pytest.approx(epochs * 360_000 / 1000 / 3600)
    assert bill["hours"]["total"] == pytest.approx(epochs * 360_000 / 1000 / 3600, rel=0.02)
    assert bill["hours"]["consumer"] == pytest.approx(epochs * 360_000 / 1500 / 3600)
    assert list(bill["splits"]) == ["1:3", "2:2", "3:1"]
    assert bill["splits"]["1:3"] == pytest.approx(bill["hours"]["total"])
    assert any("from what draftwire tune measured here" in line for line in describe(bill))
    assert planned(config, asked(request, gpu="h200", gpus=4))["hours"]["source"] == "cards"
    bill = planned(config, request, "gpus.split=3:1")
    assert bill["hours"]["total"] == pytest.approx(epochs * 360_000 / 500 / 3600, rel=0.02)
