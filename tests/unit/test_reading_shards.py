"""docs/operations.md says how other tools read a shard: what stands there is run, on a shard of either kind."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.quantise import quantise_rows
from protocol.cache import Cache, Manifest
from protocol.shard_writer import ShardWriter
from protocol.shards import FP8

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


@pytest.mark.parametrize("kept", ["bfloat16", FP8])
def test_the_documented_lines_read_a_shard(tmp_path: Path, kept: str) -> None:
    ids, mask = np.arange(5, dtype=np.int32), np.array([0, 1, 1, 0, 1], np.uint8)
    features = np.resize(np.array([0x3F80, 0xBF80, 0x4040, 0x3E80], np.uint16), (5, 8))  # 1, -1, 3, 0.25
    cache = Cache.create(tmp_path / "cache", Manifest(1, 8, kept, {}, scales=2 if kept == FP8 else 0))
    writer = ShardWriter(cache)
    writer.add(ids, mask, *(quantise_rows(features, "bfloat16", 2) if kept == FP8 else (features,)))
    writer.close()
    (shard,) = cache.folder.glob("*.safetensors")
    (lines,) = re.findall(r"```python\n(from safetensors.*?)```", OPERATIONS.read_text(encoding="utf-8"), re.DOTALL)
    lines = re.sub(r'"cache/shard-\w+\.safetensors"', repr(str(shard)), textwrap.dedent(lines))
    found: dict[str, Any] = {}
    exec(compile(lines, "docs/operations.md", "exec"), found)
    assert found["token_ids"].tolist() == ids.tolist()
    assert found["loss_mask"].tolist() == mask.tolist()
    expected = np.resize(np.array([1, -1, 3, 0.25]), (5, 8))
    assert found["features"].shape == (5, 8)
    assert found["features"].float().numpy() == pytest.approx(expected, rel=2**-4)
