"""The launcher's bound on compiled products reaches its children, and the PyTorch in use obeys both variables."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from launch.crew import COMPILED_PRODUCTS, Crew

# Memory in use by malloc, in KiB, that products of 300 new shapes leave behind.
SCRIPT = """
import ctypes, torch

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena b c d mmapped f g used h i".split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Info
used = lambda: (lambda info: info.used + info.mmapped)(mallinfo2())
weight, rows = torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(400, 64, dtype=torch.bfloat16)
with torch.inference_mode():
    torch.nn.functional.linear(rows, weight)
    before = used()
    for count in range(1, 301):
        torch.nn.functional.linear(rows[:count], weight)
print((used() - before) // 1024)
"""


def left_behind_kib(environment: dict[str, str]) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={name: value for name, value in os.environ.items() if name not in COMPILED_PRODUCTS} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(done.stdout)


def test_children_start_with_the_bound(
    monkeypatch: pytest.MonkeyPatch, make_job: Callable[..., Any], tmp_path: Path
) -> None:
    class Started(Exception):
        pass

    child = Mock(side_effect=Started)
    monkeypatch.setattr("launch.crew.Child", child)
    with pytest.raises(Started):
        Crew(make_job(), tmp_path, -1, Mock(), Mock(), {}).work()
    environment = next(argument for argument in child.call_args.args if isinstance(argument, dict))
    assert environment.items() >= COMPILED_PRODUCTS.items()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another malloc: nothing to read it from")
def test_each_variable_bounds_what_new_shapes_leave_behind() -> None:
    unbounded = left_behind_kib({})
    if unbounded < 300 * 32:
        pytest.skip("this processor multiplies bfloat16 without compiling for each shape")
    bounded = left_behind_kib(COMPILED_PRODUCTS)
    assert bounded < unbounded / 3
    for name, value in COMPILED_PRODUCTS.items():
        assert bounded < left_behind_kib({name: value}) / 1.5, f"{name} alone does as much: is the other still read?"
