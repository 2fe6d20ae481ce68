"""Where the target lives and what its `config.json` says, without loading it: no torch here.

The launcher plans with these facts: it refuses wrong taps and models that cannot fit before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from producer.config import EMBEDDED, TargetConfig
from producer.embedded import embedded_target
from protocol.cpu import cpu_has_bfloat16
from protocol.errors import RequestError

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
# Other spellings of a key in older model families; the first that is present counts.
_ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "rms_norm_eps": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
}
_FINGERPRINT_SAMPLES = 64
_FINGERPRINT_SAMPLE_BYTES = 64 << 10


def locate_target(config: TargetConfig, say: Callable[[str], None] | None = None, with_weights: bool = True) -> Path:
    """The local folder of `[target] model`: converted, found or downloaded.

    Only a hub id that the config names reaches the network. Without `with_weights` its config.json is enough, and
    weights are not downloaded. Raises RequestError for a folder that is no model and for gated, missing or unreachable
    hub repositories.
    """
    if config.model == EMBEDDED:
        return embedded_target(say)
    folder = Path(config.model).expanduser()
    if folder.is_dir():
        return _checked(folder, f"target.model = {config.model!r}", with_weights)
    if config.model.lower().endswith(".gguf"):
        raise RequestError(
            f"target.model = {config.model!r}: a GGUF file is not trained for: its weights would be unpacked "
            "to several times its size: name the folder or hub id of the model that it was made from"
        )
    if config.model.startswith(("/", ".", "~")) or config.model.count("/") > 1:
        raise RequestError(f"target.model = {config.model!r}: there is no such folder")
    patterns = [*_HUB_FILES, *(["*.py"] if config.trust_remote_code else [])]
    if not with_weights:
        patterns.remove("*.safetensors")
    key = f"target.model = {config.model!r}"
    return _checked(from_hub(config.model, config.revision, patterns, key), key, with_weights)


def _checked(folder: Path, key: str, with_weights: bool) -> Path:
    if not (folder / "config.json").is_file():
        raise RequestError(f"{key}: {folder} has no config.json, so it is not a Hugging Face model folder")
    if with_weights and not any(folder.glob("*.safetensors")):
        raise RequestError(f"{key}: {folder} has no *.safetensors weights; convert the model to safetensors first")
    return folder


def from_hub(name: str, revision: str | None, patterns: list[str], key: str) -> Path:
    """The local folder of these files of a hub repository, downloaded or found in the cache. Raises RequestError, which
    begins with `key`: what names the repository."""
    import huggingface_hub as hub  # only who names a hub id needs it, and importing it takes a while
    from huggingface_hub import errors

    try:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except errors.HFValidationError:
        raise RequestError(f"{key} is neither a folder here nor a hub id (owner/name)") from None
    except errors.GatedRepoError:
        raise RequestError(f"{key}: the repository is gated; accept its terms and set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise RequestError(f"target.revision = {revision!r}: {name} has no such revision") from None
    except errors.RepositoryNotFoundError:
        raise RequestError(f"{key}: no such folder, and the hub knows no such model (private? set HF_TOKEN)") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise RequestError(f"{key}: not in the local hub cache and the hub is out of reach; give a folder") from None
    except (errors.HfHubHTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RequestError(f"{key}: download failed: {reason}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json`, with the text model that a multimodal one nests laid over it. Raises RequestError."""
    whole = read_whole_config(folder)
    nested = [whole[key] for key in ("text_config", "language_config") if isinstance(whole.get(key), dict)]
    return {**whole, **(nested[0] if nested else {})}


def read_whole_config(folder: Path) -> dict[str, Any]:
    """`config.json` as it is. Raises RequestError."""
    return _read_json(folder / "config.json")


def read_target_facts(folder: Path) -> dict[str, Any]:
    """The target's shape out of `config.json` (and the end tokens of `generation_config.json`), nothing is loaded.

    Keys: model, revision, model_type, hidden_size, num_layers, vocab_size, num_attention_heads, num_key_value_heads,
    head_dim, intermediate_size, rms_norm_eps, rope_theta, max_position_embeddings, bos_token_id, eos_token_id,
    pad_token_id, input_embedding_scale, dtype, tied. A text model nested in a multimodal one is found. Raises
    RequestError that names the file and the missing key.
    """
    path = folder / "config.json"
    merged = read_config(folder)

    def first(name: str, default: Any = None) -> Any:
        found = [merged[key] for key in _ALIASES.get(name, (name,)) if merged.get(key) is not None]
        if not found and default is None:
            raise RequestError(f"{path}: no key {name!r}; draftwire cannot plan for this model")
        return found[0] if found else default

    def number(name: str, default: float | None = None) -> float:
        value = first(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise RequestError(
                f"{path}: {name} is {value!r}, not a positive number; draftwire cannot plan for this model"
            )
        return value

    def whole(name: str, default: float | None = None) -> int:
        if (value := number(name, default)) != int(value):
            raise RequestError(f"{path}: {name} is {value!r}, not a whole number")
        return int(value)

    name, revision = _named(folder)
    hidden, heads = whole("hidden_size"), whole("num_attention_heads")
    ends_path = folder / "generation_config.json"
    ends = _read_json(ends_path) if ends_path.is_file() else {}
    return {
        "model": name,
        "revision": revision,
        "model_type": str(merged.get("model_type", "")),
        "hidden_size": hidden,
        "num_layers": whole("num_layers"),
        "vocab_size": whole("vocab_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole("num_key_value_heads", heads),
        "head_dim": whole("head_dim", max(hidden // heads, 1)),
        "intermediate_size": whole("intermediate_size", 4 * hidden),
        "rms_norm_eps": number("rms_norm_eps", 1e-6),
        "rope_theta": _rope_theta(path, merged),
        "max_position_embeddings": whole("max_position_embeddings", 2048),
        "bos_token_id": _token_ids(path, "bos_token_id", merged),
        "eos_token_id": _token_ids(ends_path if "eos_token_id" in ends else path, "eos_token_id", {**merged, **ends}),
        "pad_token_id": _token_ids(path, "pad_token_id", merged),
        "input_embedding_scale": 1.0,
        "dtype": str(merged.get("dtype") or merged.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        "tied": bool(merged.get("tie_word_embeddings", False)),
    }


def _token_ids(path: Path, key: str, config: dict[str, Any]) -> int | list[int] | None:
    value = config.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in listed):
        raise RequestError(f"{path}: {key} is {value!r}, not a token id or a list of them")
    return value


def _named(folder: Path) -> tuple[str, str | None]:
    """The model's name and revision; a folder of the hub cache tells both: models--OWNER--NAME/snapshots/COMMIT."""
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        return folder.parents[1].name.removeprefix("models--").replace("--", "/"), folder.name
    return folder.name, None


def _rope_theta(path: Path, config: dict[str, Any]) -> float:
    # Newer files nest it, some of them once per layer type; the full-attention layers are the ones to follow.
    nested = config.get("rope_parameters") or {}
    nested = nested.get("full_attention", nested) if isinstance(nested, dict) else nested
    theta = (nested.get("rope_theta") if isinstance(nested, dict) else nested) or config.get("rope_theta") or 10000.0
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise RequestError(f"{path}: rope_theta is {theta!r}, not a number")
    return float(theta)


def feature_dtype(config: TargetConfig, facts: dict[str, Any], device: str) -> str:
    """The dtype that the target runs in and its features travel in, as "bfloat16", "float32" or "float16".

    "auto" is the checkpoint's dtype, bfloat16 where it names none; on a CPU without native bfloat16 (which would
    emulate it slowly) it is float32.
    """
    if config.dtype != "auto":
        return config.dtype
    stored = str(facts["dtype"])
    if device.startswith("cpu") and (stored == "float16" or not cpu_has_bfloat16()):
        return "float32"
    return stored if stored in ("bfloat16", "float32", "float16") else "bfloat16"


def weight_size(folder: Path, left_out: Callable[[str], bool] = lambda name: False) -> tuple[int, int]:
    """(parameters, bytes) of the stored weights, from the safetensors headers alone. `left_out` tells by its name what
    is not counted."""
    parameters = total_bytes = 0
    for path in _weight_files(folder):
        for name, entry in _header(path).items():
            if name != "__metadata__" and not left_out(name):
                count = 1
                for size in entry["shape"]:
                    count *= size
                parameters += count
                total_bytes += entry["data_offsets"][1] - entry["data_offsets"][0]
    return parameters, total_bytes


def stored_sizes(folder: Path) -> dict[str, int]:
    """The bytes of each stored tensor by its name, from the headers alone."""
    headers = [_header(path) for path in _weight_files(folder)]
    return {
        name: entry["data_offsets"][1] - entry["data_offsets"][0]
        for header in headers
        for name, entry in header.items()
        if name != "__metadata__"
    }


def stored_dtypes(folder: Path) -> set[str]:
    """The dtypes of the stored tensors as safetensors names them, "BF16" or "F8_E4M3", from the headers alone."""
    headers = [_header(path) for path in _weight_files(folder)]
    return {entry["dtype"] for header in headers for name, entry in header.items() if name != "__metadata__"}


def weights_fingerprint(folder: Path) -> str:
    """A hash that tells one target's weights from another's without reading all of them.

    Covers config.json, every header and evenly spread samples of every weight file: a fine-tune changes nearly all
    bytes, so it cannot hide between the samples.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in _weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        digest.update(json.dumps(_header(path), sort_keys=True).encode())
        with path.open("rb") as stream:
            for place in range(_FINGERPRINT_SAMPLES):
                stream.seek(place * max(size - _FINGERPRINT_SAMPLE_BYTES, 0) // (_FINGERPRINT_SAMPLES - 1))
                digest.update(stream.read(_FINGERPRINT_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def target_fingerprint(folder: Path, config: TargetConfig, device: str) -> str:
    """Names what decides features and answers: the weights, the dtype they run in and the attention kernel."""
    dtype = feature_dtype(config, read_target_facts(folder), device)
    return f"{weights_fingerprint(folder)}-{dtype}-{config.attn}"


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    places = _read_json(index).get("weight_map", {})
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise RequestError(f"{index}: weight_map does not name a file for each tensor")
    files = [folder / name for name in sorted(set(places.values()))]
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise RequestError(f"{index}: weight files are missing: {', '.join(absent)}")
    return files


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if 0 < length <= path.stat().st_size else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise RequestError(f"{path}: not a safetensors file (cut off or still a Git LFS pointer?)")
    return header


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(f"{path}: expected a JSON object")
    return content
