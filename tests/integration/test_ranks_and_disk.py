"""What a rank sees on disk decides nothing: job.json does, and a rank that misses a file ends the run by its name.
A disk that is slow, or full, costs checkpoints and no step.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

# Imported by every Python process; hides one file from one rank.
DOUBLE = """
import os, sys

name = os.environ.get("HIDDEN_FILE", "")

def is_hidden(path):
    return isinstance(path, (str, bytes, os.PathLike)) and os.path.basename(os.fsdecode(path)) == name

def hide(event, arguments):
    if event == "open" and is_hidden(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])

def stat(path, *arguments, _stat=os.stat, **options):
    if is_hidden(path):
        raise FileNotFoundError(2, "No such file or directory", path)
    return _stat(path, *arguments, **options)

if name and os.environ.get("RANK") == "1":
    sys.addaudithook(hide)
    os.stat = stat
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_rank_that_misses_a_file_ends_the_run_by_name(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """M3: here it does not even come to the ranks' meeting, where the other one would wait for an hour."""
    (workspace.folder / "double").mkdir()
    (workspace.folder / "double/sitecustomize.py").write_text(DOUBLE)
    monkeypatch.setenv("PYTHONPATH", f"{workspace.folder / 'double'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("HIDDEN_FILE", "job.json")
    failed = workspace.run("split", "--set", "data.eval=[]", "--set", 'gpus.split="1:2"')  # with a deadline
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "consumer-1 ended with code 1" in failed.stderr
    assert "job.json" in failed.stderr
    assert workspace.losses("split") == []


# In consumer/saver.py: a disk that takes its time, and has room for one checkpoint.
DISK = """
import time
_write, _written = write_checkpoint, []

def write_checkpoint(folder, snapshot):
    if _written:
        raise OSError(28, "No space left on device")
    _written.append(snapshot)
    metrics, deadline = folder.parent / "metrics.jsonl", time.monotonic() + 90
    while metrics.read_text().count('"kind": "step"') < 12 and time.monotonic() < deadline:
        time.sleep(0.05)
    return _write(folder, snapshot)
"""


@pytest.mark.timeout(200)
def test_a_slow_disk_that_then_is_full_stops_no_step_and_keeps_the_last_good_checkpoint(
    workspace: Any, patch_children: Any
) -> None:
    """The first of a checkpoint a step is written during all other steps; there is no room for the last one."""
    settings = ("data.eval=[]", "train.max_steps=12", "train.checkpoint_every=1")
    arguments = [word for setting in settings for word in ("--set", setting)]
    patch_children({"consumer.saver": DISK})
    failed = workspace.run("full", *arguments)
    assert failed.returncode == 1, failed.stdout
    last = workspace.losses("full")[-1][0]
    assert f"checkpoint at step {last}: [Errno 28] No space left on device" in failed.stderr
    events = [row for row in workspace.rows("full", "event") if row["what"].startswith("checkpoint")]
    assert [(row["what"], row.get("step")) for row in events] == [
        ("checkpoint postponed", 2),
        ("checkpoint", 1),
        ("checkpoint failed", None),
    ]
    assert events[0]["text"] == "checkpoint at step 2 is postponed: the one before is still being written"
    assert events[1]["write_s"] > 0
    assert events[1]["stall_s"] >= 0
    assert "the step loop stood still for" in (workspace.runs / "full/report.md").read_text()
    newest = workspace.runs / "full/checkpoints/latest"
    assert json.loads((newest / "cursor.json").read_text())["next_step"] == 1
    disturbed = workspace.losses("full")

    patch_children({})
    resumed = workspace.run("full", "--resume", *arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert workspace.losses("full") == disturbed
