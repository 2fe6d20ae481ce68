"""The disk cache's shards: readable by safetensors alone, whole or absent, never twice, bounded in every way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from producer.quantise import quantise_rows
from producer.replay import read_features
from protocol import direct, shard_writer
from protocol.cache import Cache, Damaged, Manifest, in_use
from protocol.errors import RequestError
from protocol.shard_writer import Full, ShardWriter, remove_fragments
from protocol.shards import FP8, Limits, sample_key

WIDTH = 16
MANIFEST = Manifest(1, WIDTH, "bfloat16", {"weights": "w", "taps": "[0, 1]"})
QUANTISED = Manifest(1, WIDTH, FP8, {"weights": "w", "cache.dtype": "fp8"}, scales=2)
SMALL = Limits(nbytes=1 << 20, samples=4)
ONES = np.full((3, WIDTH), 0x3F80, np.uint16)
Row = tuple[np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture
def rows() -> Callable[..., list[Row]]:
    def make(count: int, first: int = 0) -> list[Row]:
        made = []
        for at in range(first, first + count):
            draw = np.random.default_rng(at)
            tokens = 1 + at % 7
            ids = np.concatenate(([at], draw.integers(0, 1000, tokens - 1))).astype(np.int32)
            features = draw.integers(0, 1 << 16, (tokens, WIDTH)).astype(np.uint16)
            made.append((ids, draw.integers(0, 2, tokens).astype(np.uint8), features))
        return made

    return make


def filled(folder: Path, rows: list[Row], limits: Limits = SMALL, max_bytes: int | None = None) -> ShardWriter:
    writer = ShardWriter(Cache.create(folder, MANIFEST), max_bytes, limits=limits)
    for row in rows:
        writer.add(*row)
    writer.close()
    return writer


def test_safetensors_alone_reads_a_shard(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    import torch

    made = rows(6)
    filled(tmp_path, made)
    found = {}
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as shard:
            assert shard.metadata()["weights"] == "w"
            found |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 - it is no dict
    assert len(found) == 3 * len(made)
    for ids, mask, features in made:
        key = sample_key(ids)
        assert found[f"{key}.features"].dtype == torch.bfloat16
        assert np.array_equal(found[f"{key}.features"].view(torch.uint16).numpy(), features)
        assert np.array_equal(found[f"{key}.token_ids"].numpy(), ids)
        assert np.array_equal(found[f"{key}.loss_mask"].numpy(), mask)


def test_quantised_features_lie_beside_their_scales(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    """Half the bytes of bfloat16, in torch's own fp8; what is read back is what torch makes of the shard."""
    import torch

    made = rows(6)
    writer = ShardWriter(Cache.create(tmp_path, QUANTISED), limits=SMALL)
    for ids, mask, features in made:
        small = (features & 0x83FF) | 0x3C00  # about one, so that nothing is infinite
        assert writer.add(ids, mask, *quantise_rows(small, "bfloat16", 2))
    writer.close()
    cache = Cache.open(tmp_path)
    assert cache.manifest.features_bytes == MANIFEST.features_bytes / 2
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as shard:
            for name in [name for name in shard.keys() if name.endswith(".features")]:  # noqa: SIM118 - it is no dict
                values, scales = shard.get_tensor(name), shard.get_tensor(name.replace("features", "scales"))
                assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
                rebuilt = (values.float().unflatten(1, (scales.shape[1], -1)) * scales[:, :, None]).flatten(1)
                room = np.zeros(values.shape, np.uint16)
                read_features(cache, name.partition(".")[0], room, "bfloat16")
                assert np.array_equal(room, rebuilt.to(torch.bfloat16).view(torch.uint16).numpy())
    cache.close()


def test_a_damaged_scale_is_not_handed_out(tmp_path: Path) -> None:
    writer = ShardWriter(Cache.create(tmp_path, QUANTISED))
    writer.add(np.arange(3, dtype=np.int32), np.ones(3, np.uint8), *quantise_rows(ONES, "bfloat16", 2))
    writer.close()
    (path,) = tmp_path.glob("*.safetensors")
    cache = Cache.open(tmp_path)
    ((key, (_, sample)),) = cache.samples.items()
    with path.open("r+b") as file:
        file.seek(sample.scales_at + 3)
        file.write(b"\x7f")
    with pytest.raises(Damaged, match=key):
        read_features(cache, key, np.zeros_like(ONES), "bfloat16")
    cache.close()


def test_features_of_another_form_are_never_kept(tmp_path: Path) -> None:
    """A cache of fp8 takes no bfloat16, and the other way round: nothing is silently kept as something else."""
    ids, mask = np.arange(3, dtype=np.int32), np.ones(3, np.uint8)
    values, scales = quantise_rows(ONES, "bfloat16", 2)
    plain = ShardWriter(Cache.create(tmp_path / "plain", MANIFEST))
    quantised = ShardWriter(Cache.create(tmp_path / "quantised", QUANTISED))
    for writer, form in (
        (quantised, (ONES,)),
        (quantised, (values,)),
        (quantised, (values, scales[:, :1])),
        (quantised, (values[:, 1:], scales)),
        (plain, (values, scales)),
        (plain, (ONES.view(np.float16),)),
    ):
        with pytest.raises(ValueError, match="takes no"):
            writer.add(ids, mask, *form)
    assert quantised.add(ids, mask, values, scales)
    assert plain.add(ids, mask, ONES)


def test_what_was_written_is_read_bit_for_bit(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    made = rows(10)
    filled(tmp_path, made)
    cache = Cache.open(tmp_path)
    assert (len(cache.samples), len(cache.shards)) == (10, 3)
    assert cache.nbytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    for ids, _, features in made:
        room = np.zeros_like(features)
        cache.read_into(sample_key(ids), room)
        assert np.array_equal(room, features)
    cache.close()


def test_a_sample_is_written_once_however_often_it_comes(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    """K1: a resumed build finds what is there, in the open shard and in whole ones."""
    made = rows(5)
    writer = filled(tmp_path, [*made, *made])
    assert writer.samples == 5
    before = {path: path.read_bytes() for path in tmp_path.glob("shard-*")}
    again = filled(tmp_path, [*made, *rows(2, first=5)])
    assert again.samples == 2
    assert {path: path.read_bytes() for path in before} == before


def test_pieces_larger_than_the_buffer_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "BUFFER_BYTES", 8192)
    draw = np.random.default_rng(1)
    made = [
        (np.full(tokens, tokens, np.int32), np.ones(tokens, np.uint8), draw.integers(0, 1 << 16, (tokens, WIDTH)))
        for tokens in (700, 1, 256, 513)
    ]
    made = [(ids, mask, features.astype(np.uint16)) for ids, mask, features in made]
    filled(tmp_path, made)
    cache = Cache.open(tmp_path)
    for ids, _, features in made:
        room = np.zeros_like(features)
        cache.read_into(sample_key(ids), room)
        assert np.array_equal(room, features)
    cache.close()


def test_a_hundred_thousand_tiny_samples_stay_readable(tmp_path: Path) -> None:
    """K2: tensors per shard are capped; a header never grows with the data."""
    manifest = Manifest(1, 1, "float32", {})
    writer = ShardWriter(Cache.create(tmp_path, manifest), limits=Limits(samples=512))
    mask, features = np.ones(1, np.uint8), np.zeros((1, 1), np.float32)
    for at in range(1200):
        writer.add(np.array([at], np.int32), mask, features)
    writer.close()
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, framework="np") as shard:
            assert len(shard.keys()) <= 3 * 512
    assert Limits().samples * 3 < 20_000
    assert Limits().head_bytes < 4 << 20


def test_the_budget_holds_and_what_is_there_stays(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    """Fill and hold: at the budget writing stops, nothing is evicted, and a larger budget goes on."""
    manifest_cache = Cache.create(tmp_path, MANIFEST)
    writer = ShardWriter(manifest_cache, max_bytes=3 * SMALL.head_bytes, limits=SMALL)
    with pytest.raises(Full, match="max_bytes"):
        all(writer.add(*row) for row in rows(40))
    cache = Cache.open(tmp_path)
    assert 0 < len(cache.samples) == writer.samples < 40
    assert cache.nbytes <= 3 * SMALL.head_bytes
    before = set(cache.samples)
    filled(tmp_path, rows(40))
    assert len(Cache.open(tmp_path).samples) == 40
    assert before < set(Cache.open(tmp_path).samples)


def test_a_full_disk_leaves_whole_shards_only(
    tmp_path: Path, rows: Callable[..., list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """K2: no partial shard is visible, and the same rows go on once there is room."""
    writer = ShardWriter(Cache.create(tmp_path, MANIFEST), limits=SMALL)
    for row in rows(6):
        writer.add(*row)

    def no_room(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(Full, match="disk is full"):
        writer.close()
    monkeypatch.undo()
    assert len(list(tmp_path.glob("*.safetensors"))) == len(list(tmp_path.glob("shard-*.json"))) == 1
    assert not list(tmp_path.glob("*.part"))
    assert len(Cache.open(tmp_path).samples) == 4
    assert filled(tmp_path, rows(6)).samples == 2


def test_the_disk_keeps_some_room(
    tmp_path: Path, rows: Callable[..., list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_writer, "FREE_SHARE", 1.0)
    monkeypatch.setattr(shard_writer, "MOST_FREE_BYTES", 1 << 60)
    with pytest.raises(Full, match="kept free"):
        filled(tmp_path, rows(1))
    assert not list(tmp_path.glob("shard-*"))


def test_fragments_of_a_dead_writer_are_ignored_and_removed_foreign_files_never(
    tmp_path: Path, rows: Callable[..., list[Row]]
) -> None:
    filled(tmp_path, rows(4))
    (whole,) = tmp_path.glob("*.safetensors")
    fragments = [tmp_path / "shard-0123456789ab.safetensors.part", tmp_path / "shard-0123456789ac.safetensors"]
    foreign = [tmp_path / "mine.safetensors", tmp_path / "shard-of-glass.safetensors", tmp_path / "x.part"]
    for path in (*fragments, *foreign):
        path.write_bytes(b"x")
    assert len(Cache.open(tmp_path).samples) == 4
    assert set(remove_fragments(tmp_path)) == set(fragments)
    assert all(path.exists() for path in (*foreign, whole))


def test_a_damaged_sample_is_not_handed_out(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    """E1: zeroed and flipped bytes are refused, with the shard and the sample."""
    made = rows(3)
    filled(tmp_path, made)
    (path,) = tmp_path.glob("*.safetensors")
    cache = Cache.open(tmp_path)
    key = sample_key(made[2][0])
    with path.open("r+b") as file:
        file.seek(cache.samples[key][1].features_at)
        file.write(bytes(8))
    with pytest.raises(Damaged, match=rf"{path.name}.*{key}"):
        cache.read_into(key, np.zeros_like(made[2][2]))
    cache.read_into(sample_key(made[0][0]), np.zeros_like(made[0][2]))
    cache.close()


def test_features_of_other_making_are_refused_by_the_fields_name(tmp_path: Path) -> None:
    Cache.create(tmp_path, MANIFEST)
    other = Manifest(1, WIDTH, "bfloat16", {"weights": "v", "taps": "[0, 1]"})
    with pytest.raises(RequestError, match=r"weights = w.*has v"):
        Cache.create(tmp_path, other)
    with pytest.raises(RequestError, match="no cache"):
        Cache.open(tmp_path / "nowhere")
    kept = Manifest(1, WIDTH, "bfloat16", MANIFEST.fingerprint | {"cache.dtype": "bf16"})
    with pytest.raises(RequestError, match=r"cache\.dtype = None.*has bf16"):
        Cache.create(tmp_path, kept)


def test_one_writer_at_a_time_and_nobody_while_it_is_pruned(tmp_path: Path) -> None:
    with in_use(tmp_path), in_use(tmp_path), in_use(tmp_path, ".writing", alone=True):
        with pytest.raises(RequestError, match="another run writes"), in_use(tmp_path, ".writing", alone=True):
            pass
        with pytest.raises(RequestError, match="in use"), in_use(tmp_path, alone=True):
            pass
    with in_use(tmp_path, alone=True):
        pass


def test_a_write_that_fails_behind_the_writers_back_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full buffer is written by a thread: what becomes of it is heard by the next call at the latest."""
    monkeypatch.setattr(direct, "BUFFER_BYTES", 8192)
    writer = ShardWriter(Cache.create(tmp_path, MANIFEST))
    descriptors = len(os.listdir("/proc/self/fd"))
    real = os.pwrite

    def no_room(fd: int, piece: memoryview, at: int) -> int:
        if at > 3 * 8192 + writer._limits.head_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, piece, at)

    monkeypatch.setattr(os, "pwrite", no_room)
    mask = np.ones(400, np.uint8)
    many = ((np.full(400, at, np.int32), mask, np.full((400, WIDTH), at, np.uint16)) for at in range(40))
    with pytest.raises(Full, match="disk is full"):
        all(writer.add(*row) for row in many)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    monkeypatch.undo()
    assert writer.add(np.full(400, 0, np.int32), mask, np.full((400, WIDTH), 0, np.uint16))
    writer.close()
    assert len(Cache.open(tmp_path).samples) == 1
