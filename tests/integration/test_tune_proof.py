"""Splits of processes whose rates are known: the model of `draftwire tune` against the clock."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "tune.py"


@pytest.mark.slow
def test_rate_limited_processes_run_as_predicted_and_the_recommended_split_is_the_fastest() -> None:
    command = [sys.executable, str(BENCHMARK), "--seconds", "6", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stderr
    found = {row["name"].partition(" (")[0]: row for row in json.loads(done.stdout)["rows"]}
    assert len(found) == 7
    for name, row in found.items():
        assert 0.9 < row["ratio"] < 1.1, name
    rates = {name: row["value"] for name, row in found.items()}
    for best, others in (
        ("2:1, producer 1000, rank 2000", ["1:2, producer 1000, rank 2000"]),
        ("1:2, producer 2000, rank 1000", ["2:1, producer 2000, rank 1000"]),
        ("3:5, producer 1000, rank 600", ["4:4, producer 1000, rank 600", "2:6, producer 1000, rank 600"]),
    ):
        assert rates[best] > max(rates[other] for other in others)
