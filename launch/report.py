"""report.md: what a run was and what came of it, for somebody who was not there. Written when a run ends.

Everything is read from the run's folder, so a report can be made again at any time.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from launch.metrics import Row, learned, of_kind, read_rows
from launch.plot import Point, line_chart, smooth
from launch.progress import show_cache
from launch.summary import summarise
from protocol.units import show_bytes, show_seconds


def write_report(run_dir: Path) -> Path:
    """Writes `report.md` and its pictures into the run's folder; returns the report's path."""
    rows = read_rows(run_dir / "metrics.jsonl")
    pictures = _pictures(rows)
    (run_dir / "report").mkdir(exist_ok=True)
    for name, svg in pictures.items():
        (run_dir / "report" / name).write_text(svg, encoding="utf-8")
    text = report(
        summarise(run_dir, ended=True),
        rows,
        _read(run_dir / "config.resolved.json"),
        _read(run_dir / "plan.json"),
        pictures,
        _commands(run_dir / "export"),
    )
    path = run_dir / "report.md"
    path.write_text(text, encoding="utf-8")
    return path


def report(
    summary: dict[str, Any],
    rows: list[Row],
    config: dict[str, Any],
    plan: dict[str, Any],
    pictures: dict[str, str],
    commands: list[str],
) -> str:
    """The report as Markdown; `commands` serve the export. Pure."""
    sections = [
        f"# {summary['run']}: {summary['state']}",
        summary["reason"] or "",
        _what_ran(rows, config, plan),
        _acceptance(summary, rows),
        "\n\n".join(f"![{name.removesuffix('.svg')}](report/{name})" for name in pictures),
        _stream(summary, rows),
        _serving(summary, config, commands),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _what_ran(rows: list[Row], config: dict[str, Any], plan: dict[str, Any]) -> str:
    drafter, train = config["drafter"], config["train"]
    starts = of_kind(rows, "start")
    start = starts[-1] if starts else {}
    placement = start.get("placement", {"producers": [], "consumers": []})
    versions = [f"{name} {version}" for name, version in start.get("versions", {}).items()]
    machine = start.get("machine", {})
    gpus = [f"{count} x {name}" for name, count in Counter(machine.get("gpus", [])).items()]
    lived_s = rows[-1]["time"] - rows[0]["time"] if rows else 0.0
    lines = [
        f"- target: `{config['target']['model']}`"
        + (f", revision {config['target']['revision']}" if config["target"].get("revision") else ""),
        f"- data: {_paths(config['data']['train'])}; {plan['samples']:,} samples, {plan['tokens']:,} tokens",
        f"- held out: {_paths(config['data'].get('eval', [])) or 'nothing'}",
        f"- drafter: {drafter['layers']} layers, block size {drafter['block_size']}, taps {drafter['taps']}",
        f"- plan: {plan['epochs']} epochs, {plan['steps']:,} steps of about {train['batch_tokens']:,} tokens; "
        f"{train['schedule']} schedule, rate {train['lr']:g}, loss {train['loss']}",
        *([f"- anchors: {show_coverage(plan)}"] if "anchor_coverage" in plan else []),
        f"- producers on {', '.join(placement['producers'])}; consumers on {', '.join(placement['consumers'])}",
        f"- machine: {start.get('host', 'unknown')}, {machine.get('processors', '?')} processors, "
        f"{', '.join(gpus) or 'no GPU'}, {machine.get('system', 'unknown system')}",
        f"- versions: {', '.join(versions) or 'not recorded'}",
        f"- command: `{start.get('command', 'not recorded')}`",
        f"- {len(starts)} start(s) over {show_seconds(lived_s)}"
        + (", the figures above of the last" if starts[1:] else ""),
        *(f"  - from step {each['step']}: {changed}" for each in starts for changed in each.get("changed", [])),
    ]
    if drafter.get("init_from"):
        with_optimiser = " and its optimiser's state" if drafter.get("init_optimiser") else ""
        lines.insert(4, f"- started from the weights of `{drafter['init_from']}`{with_optimiser}")
    return "## What ran\n\n" + "\n".join(lines)


def show_coverage(plan: dict[str, Any]) -> str:
    """How many of the tokens that a draft block could begin at do begin one, in an epoch; `plan` is plan.json."""
    if plan["anchor_coverage"] is None:
        return "no token of the data can be one: nothing can be learned"
    share = f"{plan['anchor_coverage']:.1%}"
    return f"{plan['anchors_per_epoch']:,} of {plan['eligible_anchors']:,} possible ones in an epoch ({share})"


def _paths(sources: list[dict[str, Any]]) -> str:
    return ", ".join(f"`{source['path']}`" for source in sources)


def _acceptance(summary: dict[str, Any], rows: list[Row]) -> str:
    evaluations = of_kind(rows, "eval")
    if not evaluations:
        return "## Acceptance length\n\nNot measured: `data.eval` names no held-out prompts."
    lines = ["| | acceptance length | 95 % interval | k drafts accepted, k = 1, 2, ... |", "|---|---|---|---|"]
    for name, row in (of_kind(rows, "baseline") or [{}])[-1].items():
        if isinstance(row, dict):
            lines.append(_line(f"{name} baseline", row))
    lines += [_line(f"after {row['step']} steps", row) for row in evaluations]
    last = evaluations[-1]
    words = (
        f"Tokens committed per verification of the target, bonus token included, on {last['prompts']} held-out prompts "
        f"({last['tokens']:,} tokens), walked over the target's own greedy answers. 1.0 is no gain."
    )
    return f"## Acceptance length\n\n{words}\n\n" + "\n".join(lines)


def _line(name: str, row: dict[str, Any]) -> str:
    low, high = row["interval"]
    positions = " ".join(f"{share:.2f}" for share in row["acceptance_per_position"])
    return f"| {name} | {row['acceptance_mean']:.3f} | {low:.3f} to {high:.3f} | {positions} |"


def _stream(summary: dict[str, Any], rows: list[Row]) -> str:
    events = [row for row in of_kind(rows, "event") if row["what"] != "checkpoint"]
    waits = [(side, summary[f"{side}_wait_share"]) for side in ("producer", "consumer")]
    since = " in the last stretch" if summary["starts"] > 1 else ""
    lines = [
        f"- streamed {show_bytes(summary['bytes_streamed'])}; a full dump of one epoch would have taken "
        f"{show_bytes(summary['full_dump_bytes'] or 0)} of disk",
        *(f"- {side}s waited {share:.0%} of their time{since}" for side, share in waits if share is not None),
        *([f"- split: {summary['advice']['text']}"] if summary["advice"] is not None else []),
        *([f"- cache: {show_cache(summary['cache'])}"] if summary["cache"] is not None else []),
        f"- restarts: {summary['restarts']}; quarantined samples: {summary['quarantined']}; "
        f"skipped steps: {summary['skipped']}",
        *_balance(rows),
        *_checkpoints(rows),
        *(f"- {row['what']}: {row['text']}" for row in events),
    ]
    return "## The stream\n\n" + "\n".join(lines)


def _balance(rows: list[Row]) -> list[str]:
    """How evenly several ranks shared the work, by the last that is known."""
    known = [row for row in of_kind(rows, "stream") if row.get("imbalance") is not None and len(row["rss_bytes"]) > 1]
    return [
        f"- the slowest rank worked {row['imbalance']:.2f} times the mean of all; "
        f"planned: {row['imbalance_planned']:.2f}"
        for row in known[-1:]
    ]


def _checkpoints(rows: list[Row]) -> list[str]:
    """What checkpoints cost, if there were any: rows of earlier versions have no times."""
    costs = [(row["stall_s"], row["write_s"]) for row in of_kind(rows, "event") if "stall_s" in row]
    if not costs:
        return []
    stalls, writes = zip(*costs, strict=True)
    return [
        f"- {len(costs)} checkpoint(s): the step loop stood still for {max(stalls):.2f} s at most, {sum(stalls):.2f} s "
        f"in all; writing one took {max(writes):.2f} s at most, in the background"
    ]


def _serving(summary: dict[str, Any], config: dict[str, Any], commands: list[str]) -> str:
    if summary["export"] is None:
        return "## The drafter\n\nNot exported yet: `draftwire export RUN OUT` does it from any checkpoint."
    block_size = config["drafter"]["block_size"]
    return (
        f"## The drafter\n\nOf step {summary['export_step']}, in `{summary['export']}`. "
        f"Its README.md says how to serve it: {block_size - 1} "
        f"speculative tokens in vLLM, {block_size} draft tokens in SGLang.\n\n" + "\n".join(commands)
    )


def _commands(export: Path) -> list[str]:
    """The command lines of the export's own README.md, with its folder filled in."""
    try:
        lines = (export / "README.md").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.replace("THIS_FOLDER", str(export)) for line in lines if line.startswith("    ")]


def _pictures(rows: list[Row]) -> dict[str, str]:
    steps, evaluations = [row for row in of_kind(rows, "step") if learned(row)], of_kind(rows, "eval")
    pictures: dict[str, str] = {}
    if steps:
        found = [(row["step"], row["loss"]) for row in steps]
        pictures["loss.svg"] = _curve("loss", found)
        found = [(row["step"], row["accuracy"][0]) for row in steps]
        pictures["accuracy.svg"] = _curve("accuracy of the first drafted token, in training", found)
    if evaluations:
        baseline = (of_kind(rows, "baseline") or [{}])[-1]
        levels = {name: row["acceptance_mean"] for name, row in baseline.items() if isinstance(row, dict)}
        curve = [(row["step"], row["acceptance_mean"]) for row in evaluations]
        pictures["acceptance.svg"] = line_chart("acceptance length, held out", "step", curve, levels)
    return pictures


def _curve(title: str, points: list[Point]) -> str:
    means, width = smooth([y for _, y in points])
    title += f" (mean of {width} steps)" if width > 1 else ""
    return line_chart(title, "step", list(zip([x for x, _ in points], means, strict=True)), {})


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
