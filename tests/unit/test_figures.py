"""What a producer says of its taps now and then: the right rows, each tap by itself, in any dtype.

Case E1 of the public failure reports: mean, deviation and share of zeros of each tapped layer are logged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from producer import figures
from producer.lease_layout import lease_table
from protocol.block import views
from protocol.messages import Lease

LENGTHS = (3, 2, 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("positions", [(0, 1, 2), (2, 0)])
def test_each_tap_of_the_leased_rows(make_job: Callable[..., Any], dtype: str, positions: tuple[int, ...]) -> None:
    """E1: mean, deviation and share of zeros, layer by layer."""
    job = make_job(width=8, dtype=dtype, taps=(4, 9))
    lease = Lease(
        step=0, index=0, kind="model", attempt=1, slot=0, samples=(5, 6, 7), lengths=LENGTHS, positions=positions,
        token_ids=b"", loss_mask=b"",
    )  # fmt: skip
    slot = memoryview(bytearray(4096))
    values = torch.full((9, 8), 7.0)
    for at in positions:
        rows = slice(sum(LENGTHS[:at]), sum(LENGTHS[: at + 1]))
        values[rows, :4], values[rows, 4:] = 2.0, torch.tensor([0.0, 0.0, -1.0, 1.0])
    stored = values.to(getattr(torch, dtype))
    words = stored.view(torch.uint16) if dtype == "bfloat16" else stored
    views(slot, lease_table(lease, job))["features"][:] = words.numpy()
    first, second = figures.tap_figures(lease, slot, job)
    assert first == (2.0, 0.0, 0.0)
    assert second == pytest.approx((0.0, np.sqrt(0.5), 0.5))


def test_no_more_rows_than_its_bound(make_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "ROWS", 2)
    job = make_job(width=1, dtype="float32", taps=(0,))
    lease = Lease(
        step=0, index=0, kind="model", attempt=1, slot=0, samples=(5,), lengths=(3,), positions=(0,), token_ids=b"",
        loss_mask=b"",
    )  # fmt: skip
    slot = memoryview(bytearray(4096))
    views(slot, lease_table(lease, job))["features"][:, 0] = (1.0, 3.0, 100.0)
    assert figures.tap_figures(lease, slot, job) == ((2.0, 1.0, 0.0),)
