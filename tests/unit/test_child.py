"""How a child ends: a line and an exit code for what draftwire raises on purpose, a traceback for what it does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from protocol.child import FAILED_FOR_GOOD, WRONG_REQUEST


def ended(error: str) -> tuple[int, str]:
    code = (
        f"import errno\nfrom protocol.child import run_child\nfrom protocol.errors import *\ndef body():\n    {error}"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nrun_child('setup', body)"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("error", "code"), [("RequestError", WRONG_REQUEST), ("FinalError", FAILED_FOR_GOOD), ("RunError", 1)]
)
def test_an_expected_error_is_one_line_and_its_code(error: str, code: int) -> None:
    assert ended(f"raise {error}('why')") == (code, "error: why\n")


@pytest.mark.parametrize("number", ["ENOSPC", "EDQUOT"])
def test_a_full_disk_is_one_line_too(number: str) -> None:
    code, said = ended(f"raise OSError(errno.{number}, 'no room', 'eval.safetensors')")
    assert code == 1
    assert said.startswith("error: there is no room left to write to: [Errno ")
    assert said.count("\n") == 1
    assert "eval.safetensors" in said


def test_any_other_error_of_the_system_keeps_its_traceback() -> None:
    code, said = ended("open('/no/such/file')")
    assert code == 1
    assert "Traceback" in said
    assert said.splitlines()[-1] == "error: [Errno 2] No such file or directory: '/no/such/file'"


def test_a_thread_that_is_still_at_work_does_not_change_the_code() -> None:
    """Within the interpreter's own end one in PyTorch would now and then be aborted, and the process with it."""
    busy = "import threading, torch; a = torch.ones(64, 64)\n    def work():\n        while True: a @ a"
    start = "for _ in range(4): threading.Thread(target=work, daemon=True).start()"
    assert ended(f"{busy}\n    {start}\n    raise FinalError('why')") == (FAILED_FOR_GOOD, "error: why\n")
