"""A device without room ends a rank for good, with the keys to change, and so does every place where it can happen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from consumer import worker
from producer import worker as producer_worker
from producer.stage import HostStage
from protocol.errors import FinalError
from protocol.messages import Lease

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB\nand so on"


@pytest.mark.parametrize("place", ["__init__", "run"])
def test_out_of_memory_is_final_and_names_the_options_to_change(
    make_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """N6: while the drafter is built, or at a certain block: the next start would end in the same way."""

    def refuse(*args: Any) -> Any:
        raise torch.OutOfMemoryError(SAID)

    monkeypatch.setattr(worker, "read_job", lambda run_dir: make_job({"microbatch_tokens": 4096, "anchors": 512}))
    monkeypatch.setattr(worker, "join_ranks", lambda device: None)
    monkeypatch.setattr(worker, "Arena", lambda *args: None)
    monkeypatch.setattr(worker.Rank, "__init__", lambda *args: None)
    monkeypatch.setattr(worker.Rank, place, refuse)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    with pytest.raises(FinalError) as ended:
        worker.main(Path(), 0, -1)
    said = str(ended.value)
    for part in (
        "lower train.microbatch_tokens (now 4096), train.microbatch_draft_tokens (now 64) or train.anchors (now 512)",
        "--resume",
        "CUDA out of memory",
    ):
        assert part in said
    assert "\n" not in said


def test_a_producer_without_room_for_one_sample_says_what_to_lower(
    make_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """N6: it is said once and for all; the sample is not tried again."""

    def refuse(*args: Any) -> Any:
        raise torch.OutOfMemoryError(SAID)

    monkeypatch.setattr(producer_worker, "fill", refuse)
    nothing: Any = None
    peer: Any = SimpleNamespace(inbox=None, send=None)
    outlet: Any = SimpleNamespace(room=lambda lease, wanted: memoryview(bytearray(8)))
    lease = Lease(
        step=3, index=1, kind="model", attempt=5, slot=0, samples=(11,), lengths=(4,), positions=(0,), token_ids=b"",
        loss_mask=b"",
    )  # fmt: skip
    producer = producer_worker.Producer(make_job(), nothing, nothing, peer, outlet, HostStage())
    refused = producer._work(lease)
    assert refused is not None
    assert not refused.retryable
    for part in ("lower data.max_length", "gpus.split", "CUDA out of memory"):
        assert part in refused.reason
    assert "\n" not in refused.reason
