"""Export in z-lab's or speculators' format (config.json, model.safetensors in bf16, README.md), and the way back."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from consumer.shape import DrafterShape
from consumer.speculators import BORROWED, MAPS, is_speculators, shape_from_speculators, speculators_json
from consumer.target_ends import TargetEnds
from consumer.zlab import ARCHITECTURE, check_tensors, config_json, shape_from_config_json
from protocol.errors import RequestError
from protocol.files import open_to_others

FORMS = {"zlab": "z-lab's", "speculators": "speculators'"}
FACTS_KEY = "draftwire"  # in config.json: what the drafter was trained for and on


def export(
    weights: Mapping[str, Tensor],
    shape: DrafterShape,
    out_dir: Path,
    facts: Mapping[str, Any],
    form: Literal["zlab", "speculators"] = "zlab",
) -> None:
    """Write a folder that z-lab's `dflash`, vLLM and SGLang load, or speculators; an earlier export there is replaced
    whole.

    weights: names of `tensor_shapes`, any float dtype, rounded to bf16. facts: JSON values, kept in config.json and
    listed in the README; "target" and "revision" name the model that the drafter belongs to.
    Raises RequestError for weights that do not fit, and for an out_dir that holds something else.
    """
    check_tensors("weights", {name: value.shape for name, value in weights.items()}, shape)
    if out_dir.exists() and not _is_export(out_dir):
        raise RequestError(f"{out_dir}: exists and is not an exported drafter: choose another folder or remove it")
    config = config_json(shape) if form == "zlab" else _speculators_json(shape, facts)
    config[FACTS_KEY] = dict(facts)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in weights.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        open_to_others(folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(readme(shape, facts, form), encoding="utf-8")
        folder.chmod(0o755)
        _replace(folder, out_dir)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load_trained(folder: Path, ends: TargetEnds) -> tuple[dict[str, Tensor], DrafterShape]:
    """(weights, shape) of a drafter in either format, for the target whose `ends` these are. Raises RequestError as
    `load_export` does, and for a copy of embedding or head that is not the target's own."""
    config, weights = _read(folder)
    if not is_speculators(config):
        return load_export(folder)[:2]
    shape = shape_from_speculators(config, ends.config)
    for name, own in zip(BORROWED, (ends.embedding, ends.head), strict=True):
        if (copy := weights.pop(name, None)) is not None and not _same(copy, own):
            raise RequestError(f"{folder}: {name} is not the target's own: this drafter belongs to another target")
    for name in MAPS:
        weights.pop(name, None)  # of a full vocabulary they say nothing
    check_tensors(str(folder / "model.safetensors"), {name: value.shape for name, value in weights.items()}, shape)
    return weights, shape


def load_export(folder: Path) -> tuple[dict[str, Tensor], DrafterShape, dict[str, Any]]:
    """(weights as stored, shape, facts) of an exported or published z-lab drafter.

    Raises RequestError naming the file and every missing, unexpected or misshapen tensor.
    """
    config, weights = _read(folder)
    try:
        shape = shape_from_config_json(config)
    except RequestError as error:
        raise RequestError(f"{folder}: {error}") from None
    check_tensors(str(folder / "model.safetensors"), {name: value.shape for name, value in weights.items()}, shape)
    return weights, shape, config.get(FACTS_KEY, {})


def check_pairing(shape: DrafterShape, target: Mapping[str, Any]) -> None:
    """Refuse (RequestError, both values named) a target other than the drafter's kind; `target` as in resolve_shape."""
    pairs = {
        "num_layers": (shape.num_target_layers, target["num_layers"]),
        "hidden_size": (shape.hidden_size, target["hidden_size"]),
        "vocab_size": (shape.vocab_size, target["vocab_size"]),
    }
    wrong = [f"{name} {ours} against {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    if wrong:
        raise RequestError(f"this drafter was trained for another target: {', '.join(wrong)} (drafter against target)")


def readme(shape: DrafterShape, facts: Mapping[str, Any], form: str = "zlab") -> str:
    """The export's README.md."""
    target = facts.get("target_from") or facts.get("target", "TARGET")
    drafts = json.dumps({"method": "dflash", "model": "THIS_FOLDER", "num_speculative_tokens": shape.block_size - 1})
    rows = [
        ("target layers, width, vocabulary", (shape.num_target_layers, shape.hidden_size, shape.vocab_size)),
        ("tapped layers (0-based, output of)", list(shape.target_layer_ids)),
        ("block size, mask token", (shape.block_size, shape.mask_token_id)),
        ("layer types, window", (list(shape.layer_types), shape.sliding_window)),
        *facts.items(),
    ]
    table = "\n".join(f"| {name} | {_in_words(value)} |" for name, value in rows)
    last = ""
    if shape.num_target_layers - 1 in shape.target_layer_ids:
        last = (
            "\nThis drafter taps the target's last layer *before* the final norm. Engines that read it from "
            "`hidden_states[-1]` see it after the norm and will accept less.\n"
        )
    return f"""# DFlash drafter for {facts.get("target", "TARGET")}

Weights are bf16 in {FORMS[form]} format, without embedding and head: both are the target's own.

vLLM (`num_speculative_tokens` is the block size minus the anchor):

    vllm serve {target} --speculative-config '{drafts}'

SGLang (draft tokens include the anchor):

    python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\
        --speculative-draft-model-path THIS_FOLDER --speculative-num-draft-tokens {shape.block_size}
{last}
| trained for and on | |
|---|---|
{table}
"""


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return config, load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise RequestError(f"{folder}: not a readable drafter: {error}") from error


def _speculators_json(shape: DrafterShape, facts: Mapping[str, Any]) -> dict[str, Any]:
    verifier = str(facts.get("target_from") or facts.get("target", ""))
    return speculators_json(shape, verifier)


def _same(copy: Tensor, own: Tensor) -> bool:
    """Whether a stored copy is this tensor, the rounding of its dtype apart."""
    mine = own.detach().to("cpu", copy.dtype)
    return copy.shape == mine.shape and torch.equal(copy, mine)


def _in_words(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_in_words, value))
    return "none" if value is None else str(value)


def _is_export(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return ARCHITECTURE in config.get("architectures", []) or is_speculators(config)


def _replace(folder: Path, out_dir: Path) -> None:
    """Put a finished folder in place: on the disk before it is visible, never half there."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    if out_dir.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-old-", dir=out_dir.parent))
        os.rename(out_dir, old / "export")
        os.rename(folder, out_dir)
        shutil.rmtree(old)
    else:
        os.rename(folder, out_dir)
