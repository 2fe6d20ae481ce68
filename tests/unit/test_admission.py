"""Who may join, and by which door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from launch.admission import refusal, remote_refusal
from launch.remotes import REMOTE_SILENCE_S, Remotes
from protocol.codec import Envelope
from protocol.job import Job
from protocol.messages import Hello

LOCAL_TOKEN, REMOTE_TOKEN = "local", "remote"


def greeting(**changes: Any) -> Hello:
    fields = {"role": "producer", "name": "remote-a", "token": REMOTE_TOKEN, "schema": "s"} | changes
    return Hello(rank=0, pid=1, host="h", versions={}, **fields)


def test_a_producer_of_another_host_comes_in_by_its_own_door_only(make_job: Callable[..., Job]) -> None:
    job, envelope = make_job(), Envelope("r", 0)
    assert remote_refusal(job, REMOTE_TOKEN, greeting(), envelope) is None
    assert refusal(job, LOCAL_TOKEN, job.producer_names, greeting(), envelope) == "the run token is wrong"
    # Not even with the token of that door.
    stranger = greeting(token=LOCAL_TOKEN)
    assert refusal(job, LOCAL_TOKEN, job.producer_names, stranger, envelope) == "this run has no such peer"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token": LOCAL_TOKEN}, "the run token is wrong"),
        ({"token": "ü"}, "the run token is wrong"),
        ({"schema": "other"}, "target, taps, dtype or plan differ"),
        ({"name": "producer-0"}, "only producers join from other hosts"),
        ({"name": "launcher", "role": "launcher"}, "only producers join from other hosts"),
        ({"role": "consumer"}, "only producers join from other hosts"),
        ({"name": "remote-"}, "only producers join from other hosts"),
        ({"name": "remote-a\nb"}, "only producers join from other hosts"),
        ({"name": "remote-" + "a" * 101}, "only producers join from other hosts"),
    ],
)
def test_everyone_else_is_refused_there(make_job: Callable[..., Job], changes: dict[str, Any], reason: str) -> None:
    assert reason in str(remote_refusal(make_job(), REMOTE_TOKEN, greeting(**changes), Envelope("r", 0)))


def test_another_start_of_the_run_is_another_run(make_job: Callable[..., Job]) -> None:
    assert remote_refusal(make_job(), REMOTE_TOKEN, greeting(), Envelope("q", 0)) == "this is run r, not q"


def test_as_many_as_are_allowed_and_whoever_is_there_may_come_anew() -> None:
    remotes = Remotes(2)
    for name in ("remote-a", "remote-b"):
        assert remotes.refusal(name) is None
        remotes.heard(name, 0.0)
    assert remotes.refusal("remote-a") is None
    assert "2 producers of other hosts are here already: raise hosts.producers" in str(remotes.refusal("remote-c"))
    remotes.left("remote-b")
    assert remotes.refusal("remote-c") is None


def test_silence_is_counted_from_the_last_word_of_each() -> None:
    remotes = Remotes(2)
    remotes.heard("remote-a", 0.0)
    remotes.heard("remote-b", 10.0)
    assert remotes.silent(REMOTE_SILENCE_S) == []
    assert remotes.silent(REMOTE_SILENCE_S + 1) == ["remote-a"]
    remotes.heard("remote-a", REMOTE_SILENCE_S + 1)
    assert remotes.silent(REMOTE_SILENCE_S + 11) == ["remote-b"]
    remotes.left("remote-b")
    assert remotes.silent(REMOTE_SILENCE_S + 11) == []
