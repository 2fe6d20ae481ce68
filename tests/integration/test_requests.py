"""Requests that cannot be carried out: one clear line, exit code 2, nothing loaded and nothing left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

CASES = {
    "unknown key": (["--set", "train.anchor=4"], ["train.anchor", "anchors"]),
    "unknown section": (["--set", "trian.lr=1"], ["trian", "train"]),
    "wrong type": (["--set", "train.lr=[1]"], ["train.lr", "float"]),
    "negative rate": (["--set", "train.lr=-1"], ["train.lr", "positive"]),
    "tap beyond the last layer": (["--set", "drafter.taps=[0,9]"], ["9", "taps"]),
    "block larger than the ring": (["--set", "ring.bytes=4KiB"], ["ring.bytes", "train.microbatch_tokens"]),
    "ring larger than the memory": (["--set", "ring.bytes=900TiB"], ["ring.bytes", "free"]),
    "sample longer than a block": (["--set", "train.microbatch_tokens=32"], ["train.microbatch_tokens", "max_length"]),
    "missing data": (["--set", 'data.train=[{path="nowhere.jsonl"}]'], ["nowhere.jsonl"]),
    "missing target": (["--set", "target.model=/nowhere/at/all"], ["/nowhere/at/all"]),
    "split without consumers": (["--set", 'gpus.split="1:0"'], ["gpus.split"]),
    "a number no machine holds": (["--set", "train.batch_tokens=99999999999999999999999"], ["train.batch_tokens"]),
    "epochs without end": (["--set", "train.epochs=9223372036854775807"], ["train.epochs"]),
    "a name that leaves the folder": (["--set", "run.name=../escaped"], ["run.name"]),
    "nothing to start from": (["--set", "drafter.init_from=/nowhere"], ["drafter.init_from", "/nowhere"]),
    "mask token in use": (["--set", "drafter.mask_token=1"], ["mask_token"]),
    "text for a size": (["--set", 'ring.bytes="much"'], ["ring.bytes", "much"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_request_is_refused_in_one_line(workspace, case):
    arguments, words = CASES[case]
    refused = workspace.run("wrong", *arguments)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    (line,) = refused.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words), line
    assert not (workspace.runs / "wrong" / "target_io.safetensors").exists()


def test_a_missing_config_is_named(workspace):
    refused = workspace.draftwire("run", "absent.toml")
    assert refused.returncode == 2
    assert "absent.toml" in refused.stderr


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_refused_before_loading(workspace):
    # A header may announce any size: nothing is read behind it before the check.
    weights = workspace.folder / "target/model.safetensors"
    huge = {"w": {"dtype": "F32", "shape": [1 << 44], "data_offsets": [0, 1 << 46]}}
    header = json.dumps(huge).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    refused = workspace.run("heavy")
    assert refused.returncode == 2
    assert "do not fit" in refused.stderr


def test_a_live_run_is_not_started_twice(workspace):
    started = workspace.start("taken")
    workspace.wait_for_step("taken", 1)
    refused = workspace.run("taken", "--resume")
    assert refused.returncode == 2
    assert "alive" in refused.stderr
    assert started.wait(90) == 0


def test_resume_with_other_steps_drafter_or_target_is_refused_and_loses_nothing(workspace, make_folder):
    assert workspace.run("fixed", "--set", "train.max_steps=4").returncode == 0
    files = [
        workspace.runs / "fixed" / name
        for name in ("target_io.safetensors", "config.resolved.json", "eval.safetensors")
    ]
    before = [path.read_bytes() for path in files]
    other = make_folder("qwen3", name="other")
    for change, word in {
        "train.batch_tokens=200": "train.batch_tokens",
        "data.max_samples=30": "the dataset",
        "drafter.taps=[0,3]": "target_layer_ids",
        "drafter.mlp=32": "intermediate_size",
        f"target.model={other}": "another target",
    }.items():
        refused = workspace.run("fixed", "--resume", "--set", "train.max_steps=8", "--set", change)
        assert refused.returncode == 2, (change, refused.stdout + refused.stderr)
        assert word in refused.stderr, refused.stderr
        assert [path.read_bytes() for path in files] == before


def test_the_command_line_starts_without_torch():
    code = "import sys, launch.cli; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'zmq')))"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=30, check=False).returncode == 0


@pytest.mark.slow
def test_an_export_that_is_missing_is_made_up_for_and_one_in_the_way_is_refused_at_once(workspace):
    short = ("--set", "train.max_steps=4")
    assert workspace.run("late", *short).returncode == 0
    export = workspace.runs / "late/export"
    shutil.rmtree(export)
    assert workspace.run("late", "--resume", *short).returncode == 0
    assert (export / "model.safetensors").exists()
    shutil.rmtree(export)
    export.mkdir()
    (export / "mine.txt").write_text("keep")
    refused = workspace.run("late", "--resume", *short)
    assert refused.returncode == 2
    assert "in the way" in refused.stderr


def test_data_of_which_no_row_can_be_used_is_refused_with_the_reasons(workspace):
    (workspace.folder / "chats.jsonl").write_text('{"messages": []}\nnot json\n')
    refused = workspace.run("nothing")
    assert refused.returncode == 2, refused.stdout
    assert "none of 2 rows can be used" in refused.stderr
    assert "chats.jsonl:2" in refused.stderr
