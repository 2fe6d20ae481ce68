"""The training loop's side of the feed: it waits for GO as long as it takes, and says so."""

from __future__ import annotations

import logging
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from consumer import feed as feed_module
from consumer.feed import Feed
from protocol import messages as m
from protocol.block import block_table


@pytest.fixture
def feed() -> Any:
    """A feed whose peer is a queue and a list: `inbox` and `sent`."""
    sent: list[m.Message] = []
    peer = SimpleNamespace(inbox=queue.Queue(), send=sent.append)
    made: Any = Feed(peer, SimpleNamespace(), torch.device("cpu"), 1)  # type: ignore[arg-type]
    made.inbox, made.sent = peer.inbox, sent
    yield made
    peer.inbox.put(m.Stop(reason="the end"))


def empty_block(step: int) -> m.Deliver:
    table = block_table(0, 0, 4, "float32")
    return m.Deliver(
        step=step,
        index=0,
        micro_step=0,
        micro_steps=1,
        epoch=0,
        attempt=1,
        slot=-1,
        table=table,
        samples=(),
        writers=(),
        checksum=0,
    )


def test_a_long_wait_for_go_is_logged_counted_and_no_error(
    feed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feed_module, "SAY_WAIT_S", 0.1)
    feed.inbox.put(empty_block(12))
    late = threading.Timer(
        0.35,
        lambda: feed.inbox.put(m.Go(step=12, micro_step=0, stop=False, finish=False, trained_s=0.0, cooldown_step=-1)),
    )
    late.start()
    started = time.monotonic()
    with caplog.at_level(logging.INFO):
        block = feed.next(12, 0)
    assert block is not None
    assert block.step == 12
    said = [record.getMessage() for record in caplog.records]
    assert len(said) >= 2
    assert all(line.startswith("waiting for GO of step 12, micro-step 0: ") for line in said)
    assert 0.3 < feed.waited_s <= time.monotonic() - started


def test_verified_and_released_before_go(feed: Any) -> None:
    feed.inbox.put(empty_block(0))
    feed.inbox.put(m.Go(step=0, micro_step=0, stop=False, finish=False, trained_s=0.0, cooldown_step=-1))
    assert feed.next(0, 0) is not None
    assert [type(message).__name__ for message in feed.sent] == ["Credit", "Verified", "Release", "Credit"]
