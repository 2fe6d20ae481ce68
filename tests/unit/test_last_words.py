"""A child with much to say: its log is a file, so that nobody has to read along while it ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from protocol.supervise import Child

MIB = 1 << 20


@pytest.mark.parametrize("end", ["sys.exit(1)", "os.kill(os.getpid(), 9)"])
def test_a_megabyte_of_last_words_is_kept_and_holds_nothing_up(tmp_path: Path, end: str) -> None:
    """H2: a report of 1 MiB at exit, and death right after it."""
    (tmp_path / "wordy.py").write_text(
        f"import os, sys\nprint('error: ' + 'x' * {MIB} + ' the end', flush=True)\n{end}"
    )
    started = time.monotonic()
    child = Child("consumer-0", "wordy", [], tmp_path / "log", {"PYTHONPATH": str(tmp_path)})
    assert child.wait(10) in (1, -9)
    assert child.obituary().endswith(f"x the end (log: {tmp_path / 'log'})")
    assert time.monotonic() - started < 5
    assert (tmp_path / "log").stat().st_size == MIB + len("error:  the end\n")


def test_killed_in_the_middle_of_a_line_it_is_reaped_at_once(tmp_path: Path) -> None:
    """H2: half a message, and no reader that waits for the other half."""
    (tmp_path / "wordy.py").write_text("import sys\nwhile True:\n    sys.stdout.write('y' * 65536)")
    child = Child("consumer-0", "wordy", [], tmp_path / "log", {"PYTHONPATH": str(tmp_path)})
    deadline = time.monotonic() + 10
    while (tmp_path / "log").stat().st_size < MIB:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    started = time.monotonic()
    child.end(0.0)
    assert child.obituary().startswith("consumer-0 was killed by SIG")
    assert "yyy" in child.last_error()
    assert time.monotonic() - started < 2
