"""What a rank sees on disk decides nothing: job.json does, and a rank that misses a file ends the run by its name."""

from __future__ import annotations

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
