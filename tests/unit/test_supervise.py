"""Children: what is said of them when they end, that they are reaped, and what they may not pick up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol.supervise import Child

Start = Callable[..., Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Runs Python text as a child's module; whatever it leaves running is ended."""
    started: list[Child] = []

    def make(text: str, *arguments: str, name: str = "producer-0", pass_fds: tuple[int, ...] = ()) -> Child:
        (tmp_path / "small_child.py").write_text(text)
        environment = {"PYTHONPATH": str(tmp_path)}
        log_path = tmp_path / "log" / f"{name}.log"
        started.append(Child(name, "small_child", arguments, log_path, environment, pass_fds))
        return started[-1]

    yield make
    for child in started:
        child.end(0.0)


def wait_for(child: Child, text: str) -> None:
    deadline = time.monotonic() + 10
    while text not in child.log_path.read_text():
        assert time.monotonic() < deadline, child.log_path.read_text()
        time.sleep(0.005)


def test_a_good_end(start: Start) -> None:
    child = start("import sys; print('said', *sys.argv[1:])", "one", "two words")
    assert child.wait(10) == 0
    assert child.exit_code() == 0
    assert child.log_path.read_text() == "said one two words\n"


def test_the_obituary_names_code_error_line_and_log(start: Start) -> None:
    child = start("import sys; print('busy'); print('error: no such file'); print('bye'); sys.exit(2)")
    assert child.wait(10) == 2
    assert child.obituary() == f"producer-0 ended with code 2: no such file (log: {child.log_path})"
    assert child.last_error() == "no such file"


def test_the_obituary_names_the_signal(start: Start) -> None:
    child = start("import os, signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGSEGV)")
    assert child.wait(10) == -signal.SIGSEGV
    assert (
        child.obituary() == f"producer-0 was killed by SIGSEGV; its log ends with: last words (log: {child.log_path})"
    )


def test_an_unexpected_error_is_told_by_the_last_line_of_its_traceback(start: Start) -> None:
    child = start("import sys\nraise ZeroDivisionError('no anchors')")
    assert child.wait(10) == 1
    assert child.last_error() == "ZeroDivisionError: no anchors"


def test_a_silent_death_says_that_there_is_no_line(start: Start, tmp_path: Path) -> None:
    child = start("import sys; sys.exit(3)")
    assert child.wait(10) == 3
    assert child.obituary() == f"producer-0 ended with code 3: no error line (log: {child.log_path})"
    child.log_path.unlink()
    assert child.last_error() == ""


def test_only_the_end_of_a_long_log_is_read(start: Start) -> None:
    child = start("print('error: early'); print('noise ' * 2000); print('the end')")
    assert child.wait(10) == 0
    assert child.last_error() == "the end"


def test_an_earlier_childs_error_is_not_laid_at_a_later_ones_door(start: Start) -> None:
    assert start("print('error: out of memory'); raise SystemExit(1)").wait(10) == 1
    child = start("import os; os.kill(os.getpid(), 9)")
    assert child.wait(10) == -9
    assert "out of memory" not in child.obituary()


def test_an_unnamed_signal_has_an_obituary(start: Start) -> None:
    child = start(f"import os; os.kill(os.getpid(), {signal.SIGRTMIN + 3})")
    assert child.wait(10) == -(signal.SIGRTMIN + 3)
    assert "killed by" in child.obituary()


def test_wait_returns_none_while_it_runs_and_end_reaps_it(start: Start) -> None:
    child = start("import time; print('up', flush=True); time.sleep(60)")
    assert child.wait(0.01) is None
    assert child.exit_code() is None
    wait_for(child, "up")
    child.end(10.0)
    assert child.exit_code() == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_who_ignores_term_is_killed_after_the_grace(start: Start) -> None:
    child = start(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    wait_for(child, "up")
    started = time.monotonic()
    child.end(0.1)
    assert 0.1 <= time.monotonic() - started < 5
    assert child.exit_code() == -signal.SIGKILL
    child.end(0.1)  # ending it again is no error


def test_a_stopped_child_is_ended_too(start: Start) -> None:
    child = start("import time; print('up', flush=True); time.sleep(60)")
    wait_for(child, "up")
    os.kill(child.pid, signal.SIGSTOP)
    child.end(0.05)
    assert child.exit_code() in (-signal.SIGTERM, -signal.SIGKILL)


def test_it_leads_a_group_of_its_own(start: Start) -> None:
    """Ctrl-C in the terminal must reach the launcher only."""
    child = start("import time; time.sleep(60)")
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)


def test_it_holds_only_the_descriptors_that_it_is_given(start: Start, tmp_path: Path) -> None:
    given, kept = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    os.set_inheritable(kept, True)
    try:
        # The descriptor of the listing itself is gone when the others are looked at.
        script = "import os; print([fd for fd in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + fd)])"
        child = start(script, pass_fds=(given,))
        assert child.wait(10) == 0
        assert child.log_path.read_text() == f"{['0', '1', '2', str(given)]}\n"
    finally:
        os.close(given)
        os.close(kept)


@pytest.mark.parametrize("decoy", ["launch.py", "protocol.py", "json.py"])
def test_a_file_of_that_name_in_the_working_folder_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoy: str
) -> None:
    (tmp_path / decoy).write_text("print('decoy'); raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    child = Child("doctor", "launch.runfolder", [], tmp_path / "log")
    assert child.wait(10) == 0
    assert "decoy" not in child.log_path.read_text()


def test_a_child_whose_launcher_died_while_it_still_imported_ends_at_once(tmp_path: Path) -> None:
    """Its parent is another process by then, so it goes by the pid that the launcher gave it."""
    (tmp_path / "slow.py").write_text(
        "import time\ntime.sleep(1.0)\nfrom protocol.child import run_child\n"
        "run_child('slow', lambda: time.sleep(60))\n"
    )
    launcher = (
        "import os, sys\nfrom pathlib import Path\nfrom protocol.supervise import Child\n"
        "child = Child('slow', 'slow', [], Path('log'), {'PYTHONPATH': os.getcwd() + os.pathsep + sys.argv[1]})\n"
        "print(child.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", launcher, root],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 15
    while Path(f"/proc/{pid}").exists() and "slow" in Path(f"/proc/{pid}/cmdline").read_text():
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)
