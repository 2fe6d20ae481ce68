"""`draftwire eval` and `draftwire export`: what can be done with a checkpoint alone, also while its run lives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from consumer.checkpoints import newest_good, problem_of, read_cursor
from consumer.config import EvalConfig
from launch.machine import threads_per_process
from launch.runfolder import find_run
from protocol.errors import RequestError
from protocol.job import read_section


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


def evaluate(name: str) -> tuple[dict[str, Any], list[str]]:
    """Acceptance length of a checkpoint, as a report and as lines."""
    import torch

    from consumer.acceptance import load_eval_rows, measure
    from consumer.checkpoint import read_weights
    from consumer.drafter import Drafter, load
    from consumer.export import check_pairing
    from consumer.target_ends import read_target_ends
    from consumer.walk import acceptance_row

    run_dir, checkpoint = find_checkpoint(name)
    torch.set_num_threads(threads_per_process())  # a run may be alive beside this
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights, shape = read_weights(checkpoint)
    ends = read_target_ends(run_dir / "target_io.safetensors", device)
    check_pairing(shape, ends.config)
    drafter = Drafter(shape, next(iter(weights.values())).dtype).to(device)
    load(drafter, weights)
    rows = load_eval_rows(run_dir / "eval.safetensors")
    limit = read_section(run_dir, "eval", EvalConfig).max_new_tokens
    found = measure(drafter, ends.embedding, ends.head, rows, max_new_tokens=limit)
    report = acceptance_row(found) | {
        "lengths": [list(lengths) for lengths in found.lengths],
        "checkpoint": str(checkpoint),
        "definition": found.definition,
    }
    low, high = found.interval
    positions = " ".join(f"{share:.3f}" for share in found.per_position)
    lines = [
        f"{checkpoint}",
        f"acceptance length {found.mean:.3f} (95 % interval {low:.3f} to {high:.3f}), "
        f"token-weighted {found.token_weighted:.3f}, {found.prompts} prompts, {found.tokens} tokens",
        f"accepted at least k drafts, k = 1, 2, ...: {positions}",
        f"acceptance length: {found.definition}",
    ]
    return report, lines


def export_checkpoint(name: str, out: Path) -> None:
    """Writes a checkpoint in z-lab's format."""
    from consumer.checkpoint import read_weights
    from consumer.export import export
    from consumer.facts import export_facts

    run_dir, checkpoint = find_checkpoint(name)
    weights, shape = read_weights(checkpoint)
    export(weights, shape, out, export_facts(run_dir, read_cursor(checkpoint)))
