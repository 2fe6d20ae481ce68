"""Export and load: exact, strict, atomic, and paired with its target."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from consumer.export import check_pairing, export, load_export
from consumer.shape import DrafterShape
from consumer.zlab import tensor_shapes
from protocol.errors import RequestError

SHAPE = DrafterShape(
    hidden_size=16,
    target_layer_ids=(1, 3),
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    block_size=4,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    vocab_size=6,
    mask_token_id=5,
    layer_types=("full_attention",),
    sliding_window=None,
    is_causal=None,
    num_target_layers=6,
    max_position_embeddings=64,
    eos_token_ids=(0,),
    pad_token_id=None,
    bos_token_id=None,
    input_embedding_scale=1.0,
)
FACTS: dict[str, Any] = {"target": "some/model", "revision": "abc", "train_rows": 12, "thinking_share": 0.25}


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in tensor_shapes(SHAPE).items()}


def test_the_way_back_is_bit_equal(tmp_path: Path) -> None:
    exported = weights(dtype=torch.bfloat16)
    export(exported, SHAPE, tmp_path / "export", FACTS)
    loaded, shape, facts = load_export(tmp_path / "export")
    assert shape == SHAPE
    assert facts == FACTS
    assert loaded.keys() == exported.keys()
    assert all(torch.equal(loaded[name], exported[name]) for name in exported)
    # fp32 masters are rounded once, to what the config says the file holds.
    export(weights(), SHAPE, tmp_path / "export", FACTS)
    assert all(torch.equal(value, exported[name]) for name, value in load_export(tmp_path / "export")[0].items())
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_readme_says_how_to_serve(tmp_path: Path) -> None:
    export(weights(), SHAPE, tmp_path / "export", FACTS)
    text = (tmp_path / "export" / "README.md").read_text()
    assert '"num_speculative_tokens": 3' in text
    assert "--speculative-num-draft-tokens 4" in text
    for fact in ("some/model", "abc", "| 6, 16, 6 |", "| 1, 3 |", "0.25", "| full_attention, none |"):
        assert fact in text
    assert "final norm" not in text


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    export(weights(), SHAPE, tmp_path / "export", FACTS)
    file = tmp_path / "export" / "model.safetensors"
    stored = load_file(file)
    broken = {**stored, "lm_head.weight": torch.zeros(1), "fc.weight": stored["fc.weight"][:, 1:].contiguous()}
    del broken["norm.weight"]
    save_file(broken, file)
    with pytest.raises(
        RequestError, match=r"missing norm\.weight; unexpected lm_head\.weight; fc\.weight is \(16, 31\)"
    ):
        load_export(tmp_path / "export")
    with pytest.raises(RequestError, match=r"weights: missing norm\.weight"):
        export({name: value for name, value in weights().items() if name != "norm.weight"}, SHAPE, tmp_path, FACTS)


def test_a_folder_of_something_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(RequestError, match="not an exported drafter"):
        export(weights(), SHAPE, tmp_path / "data", FACTS)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_failed_export_leaves_the_old_one_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(weights(dtype=torch.bfloat16), SHAPE, tmp_path / "export", FACTS)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        export(weights(seed=1), SHAPE, tmp_path / "export", FACTS)
    loaded, _, _ = load_export(tmp_path / "export")
    assert all(torch.equal(loaded[name], value) for name, value in weights(dtype=torch.bfloat16).items())
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_folder_without_a_drafter_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=str(tmp_path)):
        load_export(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("num_layers", 4), ("hidden_size", 32), ("vocab_size", 7)])
def test_another_target_is_refused_with_both_values(key: str, value: int) -> None:
    """X3: other layers, another width, another vocabulary: refused at load, before a matrix is multiplied."""
    target = {"num_layers": 6, "hidden_size": 16, "vocab_size": 6}
    check_pairing(SHAPE, target)
    with pytest.raises(RequestError, match=rf"{key} \d+ against {value}"):
        check_pairing(SHAPE, {**target, key: value})


def test_others_may_read_what_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export(weights(), SHAPE, tmp_path / "out", {})
    finally:
        os.umask(before)
    assert (tmp_path / "out/model.safetensors").stat().st_mode & 0o777 == 0o640
