"""What of a target can be divided over several devices, and how much of it each then holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from producer.config import DataConfig, SourceConfig, TargetConfig, check
from producer.division import check_division, elsewhere_bytes
from producer.locate import read_target_facts, stored_sizes, weight_size
from protocol.errors import RequestError


def parts(count: int) -> TargetConfig:
    return TargetConfig(tensor_parallel=count)


def checked(folder: Path, count: int) -> None:
    check_division(folder, parts(count), read_target_facts(folder))


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_5_multimodal", "qwen3_moe"])
def test_a_target_whose_plan_divides_its_layers_passes(make_folder: Callable[..., Path], kind: str) -> None:
    checked(make_folder(kind), 2)


def test_one_device_asks_for_no_plan(make_folder: Callable[..., Path]) -> None:
    checked(make_folder("gpt_oss"), 1)


@pytest.mark.parametrize(
    ("kind", "changes", "count", "problem"),
    [
        # Its plan divides the embedding and nothing else.
        ("gpt_oss", {}, 2, "transformers has no plan to divide the layers of gpt_oss; use 1"),
        ("llama", {}, 4, "does not divide the target's num_key_value_heads = 2; use one of 1, 2"),
        ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}, 2, "num_attention_heads = 1; use one of 1"),
        ("llama", {"intermediate_size": 63}, 2, "intermediate_size = 63; use one of 1"),
        ("qwen3_moe", {"moe_intermediate_size": 15}, 2, "moe_intermediate_size = 15"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    make_folder: Callable[..., Path], kind: str, changes: dict[str, Any], count: int, problem: str
) -> None:
    with pytest.raises(RequestError, match=f"target.tensor_parallel = {count}.*{problem}"):
        checked(make_folder(kind, **changes), count)


def test_a_quantised_target_is_refused(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"target.tensor_parallel = 2: the target is quantised \(fp8\)"):
        checked(folder, 2)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_each_device_holds_its_part_of_the_layers_and_all_the_rest(make_folder: Callable[..., Path], kind: str) -> None:
    folder = make_folder(kind)
    assert elsewhere_bytes(folder, parts(1)) == 0
    matrices = {name: size for name, size in stored_sizes(folder).items() if ".layers." in name and "_proj" in name}
    assert len(matrices) == 4 * (7 if kind == "llama" else 4 + 3 * 4)  # experts are stored one by one
    assert elsewhere_bytes(folder, parts(2)) == sum(matrices.values()) // 2
    assert sum(stored_sizes(folder).values()) == weight_size(folder)[1]


def test_a_number_of_devices_below_one_is_refused() -> None:
    data = DataConfig(train=[SourceConfig(path="a.jsonl")])
    check(parts(1), data)
    with pytest.raises(RequestError, match=r"target\.tensor_parallel = 0: use at least 1"):
        check(parts(0), data)
