"""Kills a child of a run at a named point. Python imports this by itself from PYTHONPATH, before the child's module.

KILLPOINTS names a folder with one file a death, `NN-ROLE-POINT-COUNT`: the next process of that role takes the first
one that is left, by renaming it, and dies with SIGKILL when it comes to POINT for the COUNT-th time. So each death
happens once, in order, and production code knows nothing of it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

FLUSH_S = 0.1


def _take(role: str) -> tuple[str, int] | None:
    for path in sorted(Path(os.environ["KILLPOINTS"]).glob(f"[0-9]*-{role}-*")):
        path.rename(path.with_name(f"taken.{path.name}"))
        _, _, point, count = path.name.split("-")
        return point, int(count)
    return None


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # another thread may be the one that is told first


def _arm(module: Any, name: str, count: int, before: Any = None, after: Any = None) -> None:
    """Wraps module.name: `before` or `after` its count-th call, that is called with its arguments, and then death."""
    original, calls = getattr(module, name), 0

    def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and before is not None:
            before(*arguments)
            _die()
        answer = original(*arguments, **named)
        if calls == count and after is not None:
            after(*arguments)
            _die()
        return answer

    setattr(module, name, wrapped)


def _nothing(*_: Any) -> None:
    """Death is all."""


def _half(out: Any, *_: Any) -> None:
    out[: len(out) // 2] = 1


def _flush(self: Any, *_: Any) -> None:
    while not self._peer._outbox.empty():
        time.sleep(0.001)
    time.sleep(FLUSH_S)  # from the socket to the coordinator


def _producer(point: str, count: int) -> None:
    from producer import fill, outlet

    match point:
        case "mid_fill":
            _arm(fill, "features_into", count, before=_half)
        case "before_ready":
            _arm(outlet.ArenaOutlet, "commit", count, before=_nothing)
            _arm(outlet.ChunkOutlet, "commit", count, before=_nothing)
        case "after_ready":
            _arm(outlet.ArenaOutlet, "commit", count, after=_flush)
            _arm(outlet.ChunkOutlet, "_ship", count, after=_flush)
        case _:
            raise ValueError(point)


def _consumer(point: str, count: int) -> None:
    from consumer import checkpoint, feed, saver, trainer

    match point:
        case "before_verified":
            _arm(feed.Feed, "_receive", count, before=_nothing)
        case "after_release":
            _arm(feed.Feed, "_receive", count, after=_flush)
        case "in_reduction":
            _arm(trainer, "sum_over_ranks", count, before=_nothing)
        case "mid_checkpoint":
            _arm(checkpoint, "save_file", count, after=_nothing)
        case "after_rename":
            _arm(saver, "write_checkpoint", count, after=_nothing)
        case _:
            raise ValueError(point)


if "KILLPOINTS" in os.environ:
    for _role, _set_up in (("producer", _producer), ("consumer", _consumer)):
        if f"{_role}.worker" in sys.orig_argv and (_death := _take(_role)) is not None:
            _set_up(*_death)
