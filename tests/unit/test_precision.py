"""Quantised targets run as they are served, or are refused before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from producer import precision
from producer.config import TargetConfig
from producer.precision import check_precision, quantisation
from producer.target import load_target
from protocol.errors import RequestError

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
BNB_4BIT = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BNB_8BIT = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"input_activations": {"dynamic": True, "num_bits": 8, "strategy": "token"}}},
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.fixture
def quantised(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config.json with these settings, under `key`; a model folder without weights."""

    def write(settings: Any, key: str = "quantization_config", nested: bool = False) -> Path:
        config = {"hidden_size": 8, key: settings} if settings else {"hidden_size": 8}
        (tmp_path / "config.json").write_text(json.dumps({"text_config": config} if nested else config))
        return tmp_path

    return write


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision.importlib.util, "find_spec", lambda name: name)


def test_plain_weights_pass(quantised: Callable[..., Path]) -> None:
    folder = quantised(None)
    assert quantisation(folder) is None
    check_precision(folder, "cpu")


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(
    "settings", [BLOCKS, STATIC, MXFP4, GPTQ, AWQ, BNB_4BIT], ids=lambda found: found["quant_method"]
)
def test_kernels_that_compute_each_row_by_itself_pass_on_a_gpu(
    quantised: Callable[..., Path], settings: dict[str, Any]
) -> None:
    folder = quantised(settings)
    assert quantisation(folder) == settings["quant_method"]
    check_precision(folder, "cuda:1")
    with pytest.raises(RequestError, match=rf"config\.json.*\({settings['quant_method']}\).*on cpu.*unquantised"):
        check_precision(folder, "cpu")


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (PER_TENSOR, r"\(fp8\).*one scale a tensor.*pad rows"),
        (BNB_8BIT, r"\(bitsandbytes\).*outlier columns.*pad rows"),
        (PACKED, r"\(compressed-tensors\).*knows of no kernels"),
        (MODELOPT, r"\(modelopt\).*knows of no kernels"),
        ({"bits": 4}, r"\(unnamed\).*knows of no kernels"),
    ],
)
def test_what_is_not_served_row_by_row_is_refused(
    quantised: Callable[..., Path], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=f"{reason}.*unquantised checkpoint"):
        check_precision(quantised(settings), "cuda:0")


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(("settings", "least"), [(BLOCKS, (8, 9)), (STATIC, (8, 9)), (MXFP4, (7, 5))])
def test_a_gpu_that_is_too_old_for_the_kernels_is_refused(
    quantised: Callable[..., Path], settings: dict[str, Any], least: tuple[int, int]
) -> None:
    folder, (major, minor) = quantised(settings), least
    for enough in (least, (major + 1, 0), None):
        check_precision(folder, "cuda:1", enough)
    for less in ((major, minor - 1), (major - 1, 9)):
        with pytest.raises(
            RequestError, match=rf"capability {major}\.{minor} or more, cuda:1 has {less[0]}\.{less[1]}"
        ):
            check_precision(folder, "cuda:1", less)


@pytest.mark.usefixtures("all_installed")
def test_methods_without_such_a_limit_pass_on_any_gpu(quantised: Callable[..., Path]) -> None:
    for settings in (GPTQ, AWQ, BNB_4BIT, None):
        check_precision(quantised(settings), "cuda:0", (6, 0))


@pytest.mark.usefixtures("all_installed")
def test_loading_asks_the_device_itself(make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": BLOCKS}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {"cuda:1": (8, 0)}[device])
    with pytest.raises(RequestError, match=r"capability 8\.9 or more, cuda:1 has 8\.0"):
        load_target(folder, TargetConfig(), "cuda:1")


def test_missing_kernels_are_named(quantised: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision.importlib.util, "find_spec", lambda name: None if name == "kernels" else name)
    with pytest.raises(RequestError, match=r"need kernels \(pip install kernels\)"):
        check_precision(quantised(MXFP4), "cuda:0")


@pytest.mark.usefixtures("all_installed")
def test_settings_are_found_wherever_they_lie(quantised: Callable[..., Path]) -> None:
    assert quantisation(quantised(GPTQ, nested=True)) == "gptq"
    assert quantisation(quantised(PACKED, key="compression_config")) == "compressed-tensors"
    folder = quantised(None)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(RequestError, match=r"\(modelopt\)"):
        check_precision(folder, "cuda:0")


def test_eight_bit_weights_without_settings_are_noticed(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("up_proj.weight"))
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(RequestError, match=r"\(unnamed\).*knows of no kernels"):
        check_precision(folder, "cuda:0")


def test_refused_before_the_weights_are_read(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": BLOCKS}))
    (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(RequestError, match="quantised"):
        load_target(folder, TargetConfig(), "cpu")


@pytest.mark.usefixtures("all_installed")
def test_packed_weights_are_loaded_onto_their_device(
    quantised: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, make_folder: Callable[..., Path]
) -> None:
    import transformers

    asked: dict[str, Any] = {}

    def stop(folder: Path, **options: Any) -> Any:
        asked.update(options)
        raise OSError("far enough")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", stop)
    for settings in (None, GPTQ):
        folder = make_folder(name=f"quantised-{settings is not None}")
        config = json.loads((folder / "config.json").read_text())
        extra = {"quantization_config": settings} if settings else {}
        (folder / "config.json").write_text(json.dumps({**config, **extra}))
        asked.clear()
        with pytest.raises(RequestError, match="far enough"):
            load_target(folder, TargetConfig(), "cuda:1")
        assert asked.get("device_map") == ({"": "cuda:1"} if settings else None)
