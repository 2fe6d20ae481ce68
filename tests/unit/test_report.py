"""report.md: everything a reader who was not there needs, and nothing that was not measured."""

from __future__ import annotations

import json

from launch.metrics import append_row
from launch.report import write_report
from launch.runfolder import RunLock

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
        "data": {"train": [{"path": "chats.jsonl"}], "eval": [{"path": "held_out.jsonl"}]},
        "drafter": {"layers": 5, "block_size": 16, "taps": "auto"},
        "train": {"batch_tokens": 16384, "schedule": "cosine", "lr": 6e-4, "loss": "ce"},
    }
    plan = {
        "samples": 1000,
        "tokens": 335_000,
        "steps": 3,
        "epochs": 1,
        "eligible_anchors": 4000,
        "anchors_per_epoch": 1000,
        "anchor_coverage": 0.25,
        "full_dump_bytes": 13_721_600_000,
    }
    (run / "config.resolved.json").write_text(json.dumps(config))
    (run / "plan.json").write_text(json.dumps(plan))
    metrics = run / "metrics.jsonl"
    start = {
        "step": 0,
        "placement": {"producers": ["cuda:0"], "consumers": ["cuda:1"]},
        "versions": {"draftwire": "0.1.0", "torch": "2.13.0"},
        "host": "node7",
        "machine": {"system": "Linux-6.18", "processors": 96, "gpus": ["NVIDIA H200"] * 2},
        "command": "draftwire run my.toml --gpus 1:1",
    }
    append_row(metrics, "start", start)
    if evaluated:
        append_row(metrics, "baseline", {"bigram": EVAL | {"acceptance_mean": 1.31}})
        append_row(metrics, "eval", {"step": 0} | EVAL)
    for step in (1, 2, 3):
        append_row(metrics, "step", {"step": step, "loss": 9.0 - step, "accuracy": [0.1 * step, 0.0]})
    for step, stall_s, write_s in ((1, 0.25, 20.0), (3, 0.5, 31.0)):
        text = f"checkpoint at step {step}"
        cost = {"stall_s": stall_s, "write_s": write_s}
        append_row(metrics, "event", {"what": "checkpoint", "text": text, "step": step} | cost)
    append_row(metrics, "event", {"what": "gone", "text": "producer-0 is gone; blocks to lease anew: step 2 block 0"})
    append_row(
        metrics,
        "stream",
        {"producer_wait_share": 0.4, "consumer_wait_share": 0.01, "bytes_streamed": 5e9, "quarantined": 2}
        | {"advice": {"text": "the consumers are short by 39%"}}
        | {"imbalance": 1.25, "imbalance_planned": 1.1, "rss_bytes": [1, 2]},
    )
    if evaluated:
        append_row(metrics, "eval", {"step": 3} | EVAL | {"acceptance_mean": 2.25, "interval": [2.1, 2.4]})
    append_row(metrics, "end", {"state": "done", "reason": ""})
    return run


def test_a_report_tells_the_whole_story(tmp_path):
    run = make_run(tmp_path)
    (run / "export").mkdir()
    (run / "export/README.md").write_text("vLLM:\n\n    vllm serve T --model THIS_FOLDER -n 15\n\nmore\n")
    # Whoever writes the report still holds the run's lock.
    lock = RunLock(run)
    text = write_report(run).read_text()
    for part in (
        "# mine: done",
        "/models/Qwen3-8B",
        "chats.jsonl",
        "1,000 samples, 335,000 tokens",
        "held out: `held_out.jsonl`",
        "machine: node7, 96 processors, 2 x NVIDIA H200, Linux-6.18",
        "versions: draftwire 0.1.0, torch 2.13.0",
        "command: `draftwire run my.toml --gpus 1:1`",
        f"    vllm serve T --model {run}/export -n 15",
        "5 layers, block size 16",
        "the slowest rank worked 1.25 times the mean of all; planned: 1.10",
        "anchors: 1,000 of 4,000 possible ones in an epoch (25.0%)",
        "producers on cuda:0; consumers on cuda:1",
        "| bigram baseline | 1.310 |",
        "| after 0 steps | 1.000 |",
        "| after 3 steps | 2.250 | 2.100 to 2.400 |",
        "streamed 5 GB; a full dump of one epoch would have taken 13.72 GB",
        "producers waited 40%",
        "consumers waited 1%",
        "- split: the consumers are short by 39%",
        "restarts: 1; quarantined samples: 2",
        "2 checkpoint(s): the step loop stood still for 0.50 s at most, 0.75 s in all; writing one took 31.00 s",
        "producer-0 is gone",
        "15 speculative tokens in vLLM, 16 draft tokens in SGLang",
    ):
        assert part in text, part
    lock.release()
    for picture in ("loss", "accuracy", "acceptance"):
        assert f"report/{picture}.svg" in text
        assert (run / f"report/{picture}.svg").read_text().startswith("<svg")


def test_a_resumed_and_forked_run_says_what_changed_and_whose_figures_it_gives(tmp_path):
    run = make_run(tmp_path)
    config = json.loads((run / "config.resolved.json").read_text())
    config["drafter"] |= {"init_from": "/runs/other/checkpoints/step-000500", "init_optimiser": True}
    (run / "config.resolved.json").write_text(json.dumps(config))
    again = {"step": 3, "changed": ["mine had another train.lr: 0.002 -> 0.001"], "command": "draftwire run --resume"}
    append_row(run / "metrics.jsonl", "start", again)
    append_row(run / "metrics.jsonl", "stream", {"producer_wait_share": 0.5, "bytes_streamed": 1e9})
    text = write_report(run).read_text()
    for part in (
        "- 2 start(s) over ",
        ", the figures above of the last\n  - from step 3: mine had another train.lr: 0.002 -> 0.001",
        "started from the weights of `/runs/other/checkpoints/step-000500` and its optimiser's state",
        "producers waited 50% of their time in the last stretch",
        "streamed 6 GB",
    ):
        assert part in text, part


def test_what_was_not_measured_is_not_shown(tmp_path):
    text = write_report(make_run(tmp_path, evaluated=False)).read_text()
    assert "Not measured" in text
    assert "acceptance.svg" not in text
    assert "Not exported yet" in text
