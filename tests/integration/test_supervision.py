"""Children that hang or die again and again: who is ended, what is saved, what is said."""

from __future__ import annotations

import os
import signal
import time

import pytest

SHORT = ("--set", "data.eval=[]", "--set", "train.checkpoint_every=1000")
HANG = ("--set", 'run.hang_after="8s"')
PAUSE_S = 150.0


QUIET: list[tuple[int, float]] = []  # losses of an undisturbed run: the same whoever asks


@pytest.fixture
def quiet(workspace) -> list[tuple[int, float]]:
    if not QUIET:
        assert workspace.run("quiet", *SHORT).returncode == 0
        QUIET.extend(workspace.losses("quiet"))
        assert len(QUIET) > 100
    return QUIET


def said(workspace, name: str) -> str:
    return (workspace.folder / f"{name}.out").read_text()


@pytest.mark.parametrize("child", ["producer-0", pytest.param("consumer-0", marks=pytest.mark.slow)])
def test_a_child_that_hangs_is_ended_and_replaced(workspace, quiet, child):
    started = workspace.start("hung", *SHORT, *HANG)
    workspace.wait_for_step("hung", 20)
    pid = workspace.pid_of("hung", child)
    os.kill(pid, signal.SIGSTOP)
    assert started.wait(90) == 0, said(workspace, "hung")
    assert f"{child} hangs (it has " in said(workspace, "hung")
    assert f"{child} was killed by SIGKILL" in said(workspace, "hung")
    assert workspace.losses("hung") == quiet


def test_a_crash_loop_of_the_only_producer_ends_after_a_checkpoint_with_its_name_code_and_log(workspace, quiet, deadly):
    """H3, C3: it is named, restarts are capped, and what was trained is saved, although no step boundary comes."""
    deadly("producer-mid_fill-40", *["producer-mid_fill-1"] * 5)
    started = workspace.start("looping", *SHORT)
    assert started.wait(90) == 1
    text = said(workspace, "looping")
    assert text.count("starting it again") in (3, 4)  # the ring lasted for some steps after the first
    assert "producer-0 was killed by SIGKILL" in text.splitlines()[-2] + text.splitlines()[-1]
    (end,) = workspace.rows("looping", "end")
    assert end["state"] == "failed"
    trained = len(workspace.losses("looping"))
    assert 0 < trained < len(quiet)
    assert (workspace.runs / "looping" / "checkpoints" / f"step-{trained:06d}").exists()
    for death in (workspace.folder / "killpoints").iterdir():
        death.unlink()
    assert workspace.run("looping", "--resume", *SHORT).returncode == 0
    assert workspace.losses("looping") == quiet


@pytest.mark.slow
def test_a_crash_loop_of_a_consumer_ends_with_the_tail_of_its_log(workspace, deadly):
    deadly(*["consumer-before_verified-3"] * 4)
    started = workspace.start("looping", *SHORT)
    assert started.wait(90) == 1
    assert said(workspace, "looping").count("every consumer starts again from step 0") == 3
    assert "consumer-0 was killed by SIGKILL" in said(workspace, "looping").splitlines()[-1]


@pytest.mark.timeout(240)
def test_schedulers_signals_end_at_a_checkpoint_and_the_folder_is_refused_while_the_run_lives(workspace, quiet):
    """C1: closing the terminal is HUP; a scheduler that wants its node back sends USR1 (or TERM, as `stop` does)."""
    started = workspace.start("asked", *SHORT)
    for number in (signal.SIGHUP, signal.SIGUSR1):
        trained = len(workspace.losses("asked"))
        workspace.wait_for_step("asked", trained + 15)
        if number == signal.SIGHUP:
            second = workspace.run("asked", "--resume", *SHORT)
            assert (second.returncode, "this run is alive" in second.stderr) == (2, True)
        started.send_signal(number)
        assert started.wait(30) == 75, said(workspace, "asked")
        newest = max((workspace.runs / "asked" / "checkpoints").glob("step-*")).name
        assert newest == f"step-{len(workspace.losses('asked')):06d}"
        started = workspace.start("asked", "--resume", *SHORT)
    assert started.wait(60) == 0
    assert workspace.losses("asked") == quiet


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("paused", [("producer-0",), ("consumer-0",), ("coordinator",), ("producer-0", "coordinator")])
def test_slow_is_not_dead(workspace, quiet, paused):
    """A machine may stand still for minutes: nobody is taken for dead, and nothing is lost."""
    started = workspace.start("paused", *SHORT)
    workspace.wait_for_step("paused", 20)
    pids = [workspace.pid_of("paused", child) for child in paused]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert started.wait(90) == 0, said(workspace, "paused")
    assert workspace.losses("paused") == quiet
    assert not {row["what"] for row in workspace.rows("paused", "event")} & {"gone", "rewind", "hang"}
