"""`draftwire eval`, `compare` and `export`: what can be done with checkpoints alone, also while their run lives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from consumer.checkpoints import read_cursor
from launch.measure import Subject, find_checkpoint, is_drafter, measured, shard_of
from protocol.errors import RequestError


def evaluate(name: str) -> tuple[dict[str, Any], list[str]]:
    """Acceptance length of a checkpoint, in all and by length and thinking, as a report and as lines."""
    from consumer.acceptance_parts import parts, row_facts, show_parts
    from consumer.walk import acceptance_row

    run_dir, checkpoint = find_checkpoint(name)
    found = measured(Subject(checkpoint, run_dir))
    divided = parts(found, *row_facts(run_dir / "eval.safetensors"))
    report = (
        acceptance_row(found)
        | divided
        | {
            "lengths": [list(lengths) for lengths in found.lengths],
            "checkpoint": str(checkpoint),
            "definition": found.definition,
        }
    )
    low, high = found.interval
    positions = " ".join(f"{share:.3f}" for share in found.per_position)
    lines = [
        f"{checkpoint}",
        f"acceptance length {found.mean:.3f} (95 % interval {low:.3f} to {high:.3f}), "
        f"token-weighted {found.token_weighted:.3f}, {found.prompts} prompts, {found.tokens} tokens",
        f"accepted at least k drafts, k = 1, 2, ...: {positions}",
        *show_parts(divided),
        f"acceptance length: {found.definition}",
    ]
    return report, lines


def compare(names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Two drafters on the same held-out prompts, as a report and as lines. Raises RequestError when there are no such
    prompts."""
    from consumer.compare import paired
    from consumer.walk import acceptance_row

    subjects = _same_prompts(names)
    found = [measured(subject) for subject in subjects]
    result = paired(found[0], found[1])
    report: dict[str, Any] = {
        key: acceptance_row(each) | {"name": name, "folder": str(subject.folder)}
        for key, name, subject, each in zip("ab", names, subjects, found, strict=True)
    }
    report |= {
        "difference": result.difference,
        "interval": list(result.interval),
        "prompts": result.prompts,
        "better": result.better,
        "worse": result.worse,
        "verdict": result.verdict,
    }
    width = max(map(len, names))
    lines = [f"  {'':{width}}  acceptance length  95 % interval   token-weighted"]
    for letter, name, each in zip("AB", names, found, strict=True):
        low, high = each.interval
        interval = f"{low:.3f} to {high:.3f}"
        lines.append(f"{letter} {name:{width}}  {each.mean:<17.3f}  {interval}  {each.token_weighted:.3f}")
    return report, [*lines, result.verdict]


def export_checkpoint(name: str, out: Path, form: Literal["zlab", "speculators"] = "zlab") -> None:
    """Writes a checkpoint as a drafter of that format."""
    from consumer.checkpoint import read_weights
    from consumer.export import export
    from consumer.facts import export_facts

    run_dir, checkpoint = find_checkpoint(name)
    weights, shape = read_weights(checkpoint)
    export(weights, shape, out, export_facts(run_dir, read_cursor(checkpoint)), form)


def _same_prompts(names: Sequence[str]) -> list[Subject]:
    """What is to be compared, on one set of prompts. A drafter's folder has none of its own and takes the other's."""
    checkpoints = [None if is_drafter(name) else find_checkpoint(name) for name in names]
    runs = [found[0] for found in checkpoints if found is not None]
    if not runs:
        raise RequestError("neither is a run: held-out prompts lie in a run's folder, so one of the two must be a RUN")
    shards = [shard_of(run_dir) for run_dir in runs]
    if shards[0] != shards[-1]:
        raise RequestError(
            f"{runs[0]} and {runs[-1]} evaluate on other prompts, taps or answers ({shards[0]} against {shards[-1]}): "
            "nothing can be paired; give both the same data, eval.* and taps, or compare an export with a run"
        )
    return [
        Subject(found[1], found[0]) if found is not None else Subject(Path(name), runs[0])
        for name, found in zip(names, checkpoints, strict=True)
    ]
