"""Whether a quantised target can run here as a server will run it: told by its `config.json`, nothing is loaded.

transformers answers a missing kernel or a missing GPU by unpacking the weights, mostly without a word. The features
would then be those of another model than the one that is served, and the weights several times as large as planned.
And where one scale is made for all rows of a batch, pad rows and other samples change a sample's features. Such targets
are refused.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from producer.locate import read_config, stored_dtypes
from protocol.errors import RequestError

_REMEDY = "name the unquantised checkpoint as target.model, and serve that one"
# Method -> the packages whose kernels compute with the packed weights. Activations are left in 16 bits by all of them
# but fp8, so no row of a batch sees another one.
_KERNELS: dict[str, tuple[str, ...]] = {
    "fp8": ("accelerate", "kernels"),
    "mxfp4": ("accelerate", "kernels", "triton"),
    "bitsandbytes": ("accelerate", "bitsandbytes"),
    "gptq": ("accelerate", "gptqmodel", "optimum"),
    "awq": ("accelerate", "gptqmodel"),
}


# Method -> the least compute capability on which transformers uses these kernels; below it the weights are unpacked.
_LEAST_CAPABILITY: dict[str, tuple[int, int]] = {"fp8": (8, 9), "mxfp4": (7, 5)}


def quantisation(folder: Path) -> str | None:
    """The method by which the weights in `folder` are quantised, as its config names it; None for plain weights."""
    settings = _settings(folder)
    return None if settings is None else str(settings.get("quant_method") or "unnamed")


def check_precision(folder: Path, device: str, capability: tuple[int, int] | None = None) -> None:
    """Raises RequestError, naming the method and the remedy, for a quantised target that would not run on `device`
    ("cpu", "cuda:0") as it is served. `capability` is the device's compute capability, where it is known. Plain weights
    pass."""
    settings = _settings(folder)
    if settings is None:
        return
    method = str(settings.get("quant_method") or "unnamed")
    reason = _sees_the_whole_batch(method, settings) or _lacks(method, device) or _too_old(method, device, capability)
    if reason:
        raise RequestError(f"{folder / 'config.json'}: the target is quantised ({method}): {reason}; {_REMEDY}")


def _settings(folder: Path) -> Mapping[str, Any] | None:
    config = read_config(folder)
    for key in ("quantization_config", "compression_config"):
        if isinstance(config.get(key), dict):
            return dict(config[key])
    # What the config does not name, transformers loads as if it were plain weights, and leaves their scales out.
    if (folder / "hf_quant_config.json").is_file():
        return {"quant_method": "modelopt"}
    return {} if any(dtype.startswith(("F4", "F8")) for dtype in stored_dtypes(folder)) else None


def _sees_the_whole_batch(method: str, settings: Mapping[str, Any]) -> str | None:
    """Why a sample's features would depend on the other rows of its batch, if they would."""
    dynamic = settings.get("activation_scheme", "dynamic") == "dynamic"
    if method == "fp8" and dynamic and not settings.get("weight_block_size"):
        return "its activations get one scale a tensor, made from all rows of a batch, pad rows included"
    if method == "bitsandbytes" and not settings.get("load_in_4bit"):
        return "LLM.int8() picks its outlier columns from all rows of a batch, pad rows included"
    return None


def _lacks(method: str, device: str) -> str | None:
    """What keeps the method's own kernels from running on `device`, if anything does."""
    if method not in _KERNELS:
        return "draftwire knows of no kernels by which transformers would run it as a server does"
    if not device.startswith("cuda"):
        return f"its kernels need a CUDA device, and on {device} transformers would unpack the weights or fail"
    missing = [name for name in _KERNELS[method] if importlib.util.find_spec(name) is None]
    if missing:
        return f"its kernels need {' and '.join(missing)} (pip install {' '.join(missing)})"
    return None


def _too_old(method: str, device: str, capability: tuple[int, int] | None) -> str | None:
    least = _LEAST_CAPABILITY.get(method)
    if least is None or capability is None or capability >= least:
        return None
    needed, found = (".".join(map(str, version)) for version in (least, capability))
    return (
        f"its kernels need a GPU of compute capability {needed} or more, {device} has {found}, and transformers would "
        "unpack the weights to bfloat16"
    )
