"""What `draftwire status` says of a run folder, at every stage of its life."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.metrics import append_row
from launch.runfolder import RunLock
from launch.summary import describe, summarise

KEYS = {
    "state",
    "step",
    "steps",
    "epoch",
    "samples_trained",
    "tokens_trained",
    "loss",
    "acceptance_before",
    "acceptance_after",
    "producer_wait_share",
    "consumer_wait_share",
    "bytes_streamed",
    "full_dump_bytes",
    "quarantined",
    "restarts",
    "export",
}


def step(number: int) -> tuple[str, dict[str, Any]]:
    trained = {"samples_trained": 10 * number, "tokens_trained": 1000 * number}
    return "step", {"step": number, "epoch": number // 5, "loss": 3 - 0.1 * number} | trained


def evaluated(number: int, mean: float) -> tuple[str, dict[str, Any]]:
    row = {"acceptance_mean": mean, "acceptance_per_position": [0.5, 0.25], "interval": [mean - 0.1, mean + 0.1]}
    return "eval", {"step": number} | row


def stream(number_of_bytes: int) -> tuple[str, dict[str, Any]]:
    waits = {"producer_wait_share": 0.25, "consumer_wait_share": 0.04, "advice": {"text": "producers are short"}}
    return "stream", {"bytes_streamed": number_of_bytes, "quarantined": 2} | waits


def folder(tmp_path: Path, *rows: tuple[str, dict[str, Any]]) -> Path:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "plan.json").write_text(json.dumps({"steps": 9, "full_dump_bytes": 15_700_000_000_000}))
    for kind, row in rows:
        append_row(run_dir / "metrics.jsonl", kind, row)
    return run_dir


def test_an_empty_folder_has_every_key_and_failed(tmp_path: Path) -> None:
    found = summarise(tmp_path)
    assert found.keys() >= KEYS
    assert (found["state"], found["step"], found["steps"], found["loss"], found["export"]) == (
        "failed",
        0,
        None,
        None,
        None,
    )
    assert describe(found) == [f"{tmp_path.name}: failed", "no plan yet: nothing trained"]


def test_a_finished_run(tmp_path: Path) -> None:
    run_dir = folder(
        tmp_path,
        ("start", {"step": 0}),
        ("baseline", {"bigram": {"acceptance_mean": 1.2}, "prompt lookup": {"acceptance_mean": 1.1}}),
        evaluated(0, 1.0),
        step(1),
        stream(500),
        ("event", {"what": "gone", "text": "producer-0"}),
        ("event", {"what": "checkpoint", "text": "", "step": 1}),
        step(9),
        evaluated(9, 2.5),
        stream(2_000_000),
        ("end", {"state": "done", "reason": ""}),
    )
    (run_dir / "export").mkdir()
    found = summarise(run_dir)
    assert json.loads(json.dumps(found)) == found
    assert (found["state"], found["step"], found["steps"], found["epoch"]) == ("done", 9, 9, 1)
    assert (found["samples_trained"], found["tokens_trained"], found["loss"]) == (90, 9000, pytest.approx(2.1))
    assert (found["acceptance_before"], found["acceptance_after"]) == (1.0, 2.5)
    assert (found["producer_wait_share"], found["consumer_wait_share"]) == (0.25, 0.04)
    assert (found["bytes_streamed"], found["full_dump_bytes"]) == (2_000_000, 15_700_000_000_000)
    assert (found["restarts"], found["quarantined"], found["export"]) == (1, 2, str(run_dir / "export"))
    assert describe(found) == [
        "run: done",
        "step 9 of 9, 90 samples, 9000 tokens trained, loss 2.100",
        "acceptance length 1.000 before, 2.500 after (95 % interval 2.400 to 2.600); "
        "baselines: bigram 1.200, prompt lookup 1.100",
        "waits: producer 25%, consumer 4%; streamed 2 MB; restarts 1, quarantined samples 2",
        "split: producers are short",
        f"drafter: {run_dir}/export (its README.md says how to serve it)",
    ]


def test_the_json_answer_of_a_run_that_diverged_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = folder(tmp_path, ("start", {"step": 0}))
    (run_dir / "config.resolved.json").write_text("{}")
    with (run_dir / "metrics.jsonl").open("a") as file:  # as other writers of JSON put it
        file.write(json.dumps({"kind": "step", "time": 0} | step(1)[1] | {"loss": float("nan")}) + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["status", str(run_dir), "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["loss"] is None


def test_a_run_is_running_while_its_lock_is_held(tmp_path: Path) -> None:
    run_dir = folder(tmp_path, ("start", {"step": 0}), step(1))
    assert summarise(run_dir)["state"] == "failed"
    lock = RunLock(run_dir)
    assert (summarise(run_dir)["state"], summarise(run_dir)["reason"]) == ("running", None)
    assert summarise(run_dir, ended=True)["state"] == "failed"
    lock.release()


def test_a_run_that_is_being_prepared(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run")
    assert describe(summarise(tmp_path / "run")) == ["run: running, being prepared", "no plan yet: nothing trained"]
    lock.release()


def test_only_a_run_that_is_alive_has_rates_and_waits(tmp_path: Path) -> None:
    now = {
        "producer_tokens_per_s": 1234.5,
        "consumer_tokens_per_s": 987.6,
        "producer_mfu": None,
        "consumer_mfu": 0.7,
        "remote_producers": ["remote-far-7-ab"],
        "waiting": "producer-0 to load and join, for 9 s now",
        "eta_s": 61.0,
    }
    run_dir = folder(tmp_path, ("start", {"step": 0}), step(1), ("stream", stream(100)[1] | now))
    assert {key: summarise(run_dir)[key] for key in now} == dict.fromkeys(now)
    lock = RunLock(run_dir)
    found = summarise(run_dir)
    assert {key: found[key] for key in now} == now
    assert (
        "now: produced 1234 tok/s, trained 988 tok/s, left: 1 min 01 s; "
        "waiting for producer-0 to load and join, for 9 s now"
    ) in describe(found)
    assert "producers on other hosts: remote-far-7-ab" in describe(found)
    lock.release()


def test_bytes_of_all_stretches_are_added_up(tmp_path: Path) -> None:
    run_dir = folder(
        tmp_path,
        ("start", {"step": 0}),
        stream(100),
        stream(300),
        ("end", {"state": "interrupted", "reason": "stopped"}),
        ("start", {"step": 2}),
        ("start", {"step": 2}),  # one that streamed nothing
        stream(50),
        stream(70),
    )
    assert summarise(run_dir)["bytes_streamed"] == 370


def test_a_failure_has_its_reason(tmp_path: Path) -> None:
    run_dir = folder(tmp_path, ("start", {"step": 0}), ("end", {"state": "failed", "reason": "consumer-0 was killed"}))
    assert describe(summarise(run_dir))[0] == "run: failed (consumer-0 was killed)"


def test_the_first_evaluation_alone_is_not_an_after(tmp_path: Path) -> None:
    found = summarise(folder(tmp_path, evaluated(0, 1.25)))
    assert (found["acceptance_before"], found["acceptance_after"]) == (1.25, None)


def test_a_resumed_run_whose_launcher_was_killed_has_failed(tmp_path: Path) -> None:
    run_dir = folder(
        tmp_path,
        ("start", {"step": 0}),
        ("end", {"state": "interrupted", "reason": "stopped at a step boundary"}),
        ("start", {"step": 2}),
        step(3),
    )
    found = summarise(run_dir)
    assert (found["state"], found["reason"]) == ("failed", "its launcher ended without a word; --resume goes on")
