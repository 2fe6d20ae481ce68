"""A drafter measured on a run's held-out prompts: a checkpoint of that run, or any drafter that fits its target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from consumer.checkpoints import newest_good, problem_of
from consumer.config import EvalConfig
from launch.machine import threads_per_process
from launch.runfolder import find_run
from protocol.errors import RequestError
from protocol.job import read_section

if TYPE_CHECKING:
    from consumer.walk import Acceptance


class Subject(NamedTuple):
    """What is measured: `folder` is a checkpoint or a drafter, `run_dir` the run whose prompts it is measured on."""

    folder: Path
    run_dir: Path


def find_checkpoint(name: str) -> tuple[Path, Path]:
    """(run folder, checkpoint folder) of RUN, RUN@best or RUN@STEP. RequestError when it is not there or damaged."""
    run_name, _, which = name.partition("@")
    run_dir = find_run(run_name)
    folder = run_dir / "checkpoints"
    if not which:
        found, damaged = newest_good(folder)
        if found is None:
            raise RequestError(f"{run_dir}: no checkpoint that can be used" + "".join(f"; {line}" for line in damaged))
        return run_dir, found
    checkpoint = folder / (f"step-{int(which):06d}" if which.isdecimal() else which)
    if "/" in which or not checkpoint.exists():
        there = ", ".join(path.name for path in sorted(folder.glob("[!.]*"))) or "none"
        raise RequestError(f"{name}: no such checkpoint (there: {there})")
    if (problem := problem_of(checkpoint)) is not None:
        raise RequestError(f"{checkpoint}: {problem}")
    return run_dir, checkpoint.resolve()


def is_drafter(name: str) -> bool:
    """Whether a name is the folder of an export or of a published drafter."""
    return all((Path(name) / file).is_file() for file in ("config.json", "model.safetensors"))


def shard_of(run_dir: Path) -> str:
    """What names the prompts, answers and features of a run's evaluation. Raises RequestError without any."""
    from safetensors import SafetensorError, safe_open

    path = run_dir / "eval.safetensors"
    try:
        with safe_open(path, framework="numpy") as file:
            return str((file.metadata() or {})["fingerprint"])
    except (OSError, SafetensorError, KeyError) as error:
        raise RequestError(f"{path}: not a readable eval shard: {error}") from error


def measured(subject: Subject) -> Acceptance:
    """Its acceptance, on a GPU where there is one. Raises RequestError for what does not belong together."""
    import torch

    from consumer.acceptance import load_eval_rows, measure
    from consumer.checkpoint import read_weights
    from consumer.drafter import Drafter, load
    from consumer.export import check_pairing, load_trained
    from consumer.target_ends import read_target_ends

    folder, run_dir = subject
    torch.set_num_threads(threads_per_process())  # a run may be alive beside this
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ends = read_target_ends(run_dir / "target_io.safetensors", device)
    is_checkpoint = (folder / "cursor.json").exists()
    weights, shape = read_weights(folder) if is_checkpoint else load_trained(folder, ends)
    check_pairing(shape, ends.config)
    drafter = Drafter(shape, next(iter(weights.values())).dtype).to(device)
    load(drafter, weights)
    rows = load_eval_rows(run_dir / "eval.safetensors")
    limit = read_section(run_dir, "eval", EvalConfig).max_new_tokens
    return measure(drafter, ends.embedding, ends.head, rows, max_new_tokens=limit)
