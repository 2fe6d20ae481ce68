"""report.md: everything a reader who was not there needs, and nothing that was not measured."""

from __future__ import annotations

import json

from launch.metrics import append_row
from launch.report import write_report

EVAL = {
    "acceptance_mean": 1.0,
    "interval": [1.0, 1.0],
    "acceptance_per_position": [0.0, 0.0],
    "prompts": 4,
    "tokens": 90,
}


def make_run(folder, *, evaluated: bool = True):
    run = folder / "mine"
    run.mkdir()
    config = {
        "target": {"model": "/models/Qwen3-8B"},
        "data": {"train": [{"path": "chats.jsonl"}]},
        "drafter": {"layers": 5, "block_size": 16, "taps": "auto"},
        "train": {"batch_tokens": 16384, "schedule": "cosine", "lr": 6e-4, "loss": "ce"},
    }
    plan = {"samples": 1000, "tokens": 335_000, "steps": 3, "epochs": 1, "full_dump_bytes": 13_721_600_000}
    (run / "config.resolved.json").write_text(json.dumps(config))
    (run / "plan.json").write_text(json.dumps(plan))
    metrics = run / "metrics.jsonl"
    append_row(metrics, "start", {"step": 0, "placement": {"producers": ["cuda:0"], "consumers": ["cuda:1"]}})
    if evaluated:
        append_row(metrics, "baseline", {"bigram": EVAL | {"acceptance_mean": 1.31}})
        append_row(metrics, "eval", {"step": 0} | EVAL)
    for step in (1, 2, 3):
        append_row(metrics, "step", {"step": step, "loss": 9.0 - step, "accuracy": [0.1 * step, 0.0]})
    append_row(metrics, "event", {"what": "gone", "text": "producer-0 is gone; blocks leased anew: step 2 block 0"})
    append_row(
        metrics,
        "stream",
        {"producer_wait_share": 0.4, "consumer_wait_share": 0.01, "bytes_streamed": 5e9, "quarantined": 2},
    )
    if evaluated:
        append_row(metrics, "eval", {"step": 3} | EVAL | {"acceptance_mean": 2.25, "interval": [2.1, 2.4]})
    append_row(metrics, "end", {"state": "done", "reason": ""})
    return run


def test_a_report_tells_the_whole_story(tmp_path):
    run = make_run(tmp_path)
    (run / "export").mkdir()
    text = write_report(run).read_text()
    for part in (
        "# mine: done",
        "/models/Qwen3-8B",
        "chats.jsonl",
        "1,000 samples, 335,000 tokens",
        "5 layers, block size 16",
        "producers on cuda:0; consumers on cuda:1",
        "| bigram baseline | 1.310 |",
        "| after 0 steps | 1.000 |",
        "| after 3 steps | 2.250 | 2.100 to 2.400 |",
        "streamed 5 GB; a full dump of one epoch would have taken 13.72 GB",
        "producers waited 40%",
        "consumers waited 1%",
        "restarts: 1; quarantined samples: 2",
        "producer-0 is gone",
        "15 speculative tokens in vLLM, 16 draft tokens in SGLang",
    ):
        assert part in text, part
    for picture in ("loss", "accuracy", "acceptance"):
        assert f"report/{picture}.svg" in text
        assert (run / f"report/{picture}.svg").read_text().startswith("<svg")


def test_what_was_not_measured_is_not_shown(tmp_path):
    text = write_report(make_run(tmp_path, evaluated=False)).read_text()
    assert "Not measured" in text
    assert "acceptance.svg" not in text
    assert "Not exported yet" in text
