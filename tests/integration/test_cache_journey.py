"""The cache journey in real processes: build, train from it without a target, resume a build, refuse what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from launch.cache_commands import verify_cache
from protocol.cache import Cache

ONE_EPOCH = ("--set", "train.epochs=1")


def test_training_from_the_cache_equals_streaming_bit_for_bit_and_loads_no_target(
    cached: Any, as_json: Any, patch_children: Any, no_target: dict[str, str]
) -> None:
    """K4: the losses, the acceptance and the exported drafter are those of the streamed run."""
    assert cached.run("streamed", *ONE_EPOCH).returncode == 0
    report = as_json(cached.draftwire("cache", "build", str(cached.config), "--json"))
    assert (report["computed"], report["already"], report["samples"]) == (64, 0, 64)
    # The estimate, made before anything was computed, is the true size within 5 %, headers aside.
    heads = sum(json.loads(path.read_bytes())["header_bytes"] for path in Path(report["folder"]).glob("shard-*.json"))
    assert report["bytes"] - heads == pytest.approx(report["needed_bytes"], rel=0.05)
    patch_children(no_target)
    only = cached.run("replayed", *ONE_EPOCH, "--set", "cache.mode=only")
    assert only.returncode == 0, only.stderr
    assert "64 of the 64 samples are in" in only.stdout
    assert len(cached.losses("streamed")) > 5
    assert cached.losses("replayed") == cached.losses("streamed")
    exports = [cached.runs / name / "export/model.safetensors" for name in ("streamed", "replayed")]
    assert exports[0].read_bytes() == exports[1].read_bytes()
    accepted = [[row["acceptance_mean"] for row in cached.rows(name, "eval")] for name in ("streamed", "replayed")]
    assert accepted[0] == accepted[1] != []
    assert not list((cached.runs / "replayed/log").glob("producer-*"))


def test_a_build_computes_only_what_is_missing(cached: Any, as_json: Any) -> None:
    """K1: 40 rows, then all 64, then once more: 40, 24 and 0 samples go through the target."""
    build = ("cache", "build", str(cached.config), "--json")
    assert as_json(cached.draftwire(*build, "--set", "data.max_samples=40"))["computed"] == 40
    before = {path: path.read_bytes() for path in (cached.folder / "cache").glob("shard-*")}
    short = cached.run("short", *ONE_EPOCH, "--set", "cache.mode=only")
    assert short.returncode == 2
    assert "cache: 40 of the 64 samples are in" in short.stdout
    assert "cache build" in short.stderr
    more = as_json(cached.draftwire(*build))
    assert (more["computed"], more["already"]) == (24, 40)
    again = as_json(cached.draftwire(*build))
    assert (again["computed"], again["already"]) == (0, 64)
    assert {path: path.read_bytes() for path in before} == before
    # Another seed, batch and number of anchors train from the same cache.
    other = ("--set", "train.seed=7", "--set", "train.batch_tokens=320", "--set", "train.anchors=4")
    assert cached.run("other", "--set", "train.epochs=2", *other, "--set", "cache.mode=only").returncode == 0


def test_fp8_is_kept_by_the_builder_and_another_dtype_is_refused_by_its_name(cached: Any, as_json: Any) -> None:
    fp8 = ("--set", "cache.dtype=fp8")
    report = as_json(cached.draftwire("cache", "build", str(cached.config), *fp8, "--json"))
    assert (report["computed"], report["samples"]) == (64, 64)
    cache = Cache.open(cached.folder / "cache")
    tokens = sum(sample.tokens for _, sample in cache.samples.values())
    width, scales = cache.manifest.width, cache.manifest.scales
    assert (width, scales) == (32 * scales, len(json.loads(str(cache.manifest.fingerprint["taps"]))))
    assert report["needed_bytes"] == tokens * (width + 4 * scales + 4 + 1)  # a byte a feature, scales, id and mask
    (shard,) = (cached.folder / "cache").glob("shard-*.safetensors")
    with safe_open(shard, framework="pt") as file:
        names = [name for name in file.keys() if name.endswith(".features")]  # noqa: SIM118 - it is no dict
        assert {str(file.get_slice(name).get_dtype()) for name in names} == {"F8_E4M3"}
    assert verify_cache(cached.folder / "cache", print)[0]["damaged"] == []
    other = cached.run("other", "--set", "cache.mode=only")
    assert other.returncode == 2
    assert "was made with cache.dtype = fp8, this configuration has bf16" in other.stderr


@pytest.mark.slow
def test_fp8_trains_nearly_the_same(cached: Any) -> None:
    """Quantised by the builder, read back by replay."""
    fp8 = ("--set", "cache.dtype=fp8")
    assert cached.draftwire("cache", "build", str(cached.config), *fp8).returncode == 0
    quantised = cached.run("quantised", *ONE_EPOCH, *fp8, "--set", "cache.mode=only")
    assert quantised.returncode == 0, quantised.stderr
    assert cached.run("streamed", *ONE_EPOCH).returncode == 0
    found, exact = (np.array(cached.losses(name)) for name in ("quantised", "streamed"))
    assert found[:, 1] == pytest.approx(exact[:, 1], rel=0.02)
    assert (found != exact).any()


@pytest.mark.slow
def test_a_full_budget_ends_a_build_and_more_room_goes_on(cached: Any, as_json: Any) -> None:
    """K2: no partial shard is left, code 1 says what to do, and nothing is computed twice."""
    build = ("cache", "build", str(cached.config))
    full = cached.draftwire(*build, "--set", "cache.max_bytes=2200000")
    assert full.returncode == 1
    assert "cache.max_bytes is used up" in full.stderr
    assert not list((cached.folder / "cache").glob("*.part"))
    there = as_json(cached.draftwire("cache", "verify", str(cached.folder / "cache"), "--json"))
    assert 0 < there["samples"] < 64
    assert there["damaged"] == []
    short = cached.run("short", "--set", "cache.mode=only")
    assert short.returncode == 2
    assert f"holds {there['samples']} of the 64 samples" in short.stderr
    assert f"{64 - there['samples']} are missing" in short.stderr
    rest = as_json(cached.draftwire(*build, "--json"))
    assert (rest["already"], rest["computed"]) == (there["samples"], 64 - there["samples"])


def test_other_features_and_damaged_ones_are_refused(cached: Any) -> None:
    """E1, K4: by the name of what differs, and by the name of the shard."""
    build = ("cache", "build", str(cached.config))
    assert cached.draftwire(*build).returncode == 0
    other = cached.run("other", "--set", "cache.mode=only", "--set", "drafter.taps=[0, 2]")
    assert other.returncode == 2
    assert "was made with taps" in other.stderr
    (shard,) = (cached.folder / "cache").glob("shard-*.safetensors")
    content = np.fromfile(shard, np.uint8)
    content[-100_000:-50_000] = 0
    shard.write_bytes(content.tobytes())
    spoilt = cached.run("spoilt", "--set", "cache.mode=only")
    assert spoilt.returncode == 1
    assert shard.name in spoilt.stderr
    assert "cache verify" in spoilt.stderr
    assert cached.rows("spoilt", "quarantine") == []
    assert cached.draftwire("cache", "verify", str(cached.folder / "cache")).returncode == 1
