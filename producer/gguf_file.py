"""Reads a GGUF file into a plain model: says what that will take, and leaves no tensor out without a word.

transformers skips tensors whose names it does not know and fills what is missing with random numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protocol.errors import RequestError
from protocol.units import show_bytes

# What the weights are unpacked to.
DTYPE = "bfloat16"
_DTYPE_BYTES = 2


def unpacked_size(path: Path) -> str:
    """One line: what the weights in `path` take there and in memory, and in which dtype."""
    tensors = _reader(path).tensors
    stored = sum(int(tensor.n_bytes) for tensor in tensors)
    unpacked = sum(int(tensor.n_elements) for tensor in tensors) * _DTYPE_BYTES
    return f"{show_bytes(stored)} of weights become {show_bytes(unpacked)} as {DTYPE}"


def load_gguf(path: Path) -> Any:
    """The causal language model in `path`, its weights unpacked. Raises RequestError, naming them, when tensors of the
    model are missing or tensors of the file have no place."""
    import torch
    import transformers

    options: dict[str, Any] = {"dtype": getattr(torch, DTYPE), "gguf_file": path.name, "output_loading_info": True}
    # Newer transformers keep GGUF weights packed unless told otherwise; releases without GgufConfig always unpack.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loader: Any = transformers.AutoModelForCausalLM
    model, info = loader.from_pretrained(str(path.parent), **options)
    # A tied head is not stored.
    absent = sorted(
        {key for key in info["missing_keys"] if key != "lm_head.weight"}
        | {entry[0] for entry in info["mismatched_keys"]}
    )
    extra = sorted({*_without_a_place(path), *info["unexpected_keys"]})
    if absent or extra:
        raise RequestError(
            f"{path.name}: tensors do not map: missing {', '.join(absent[:8]) or 'none'}, unexpected "
            f"{', '.join(extra[:8]) or 'none'}"
        )
    return model


def _without_a_place(path: Path) -> list[str]:
    """Names of tensors in `path` that an architecture of its kind does not have."""
    import gguf

    reader = _reader(path)
    kind = reader.get_field("general.architecture").contents()
    blocks = int(reader.get_field(f"{kind}.block_count").contents())
    (known,) = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    patterns = [gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[known]]
    places = {pattern.format(bid=block) for pattern in patterns for block in range(blocks)}
    return [tensor.name for tensor in reader.tensors if tensor.name.rpartition(".")[0] not in places]


def _reader(path: Path) -> Any:
    import gguf

    return gguf.GGUFReader(path)
