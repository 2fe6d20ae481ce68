"""Files, folders, globs, packed files, arrays and tables as sources."""

from __future__ import annotations

import gzip
import json
import sys
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer import inputs
from producer.inputs import read_source, source_bytes, source_digest, source_files
from producer.meter import Meter
from protocol.errors import RequestError

ROWS: list[dict[str, Any]] = [{"text": f'row {n} [,] \u00e9 \\" }}'} for n in range(5)]


def values(path: Path | str) -> list[Any]:
    return [json.loads(payload) if isinstance(payload, bytes) else payload for _, _, payload in read_source(str(path))]


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Makes packages look as if they were not installed."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("piece_chars", [1, 7, 1 << 20])
def test_an_array_gives_its_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, piece_chars: int
) -> None:
    monkeypatch.setattr(inputs, "PIECE_BYTES", max(piece_chars, 4))
    path = tmp_path / "a.json"
    path.write_text("\ufeff" + json.dumps(ROWS, indent=indent, ensure_ascii=False), encoding="utf-8")
    assert values(path) == ROWS
    assert [number for _, number, _ in read_source(str(path))] == [1, 2, 3, 4, 5]


@given(st.lists(st.recursive(st.none() | st.floats(allow_nan=False) | st.text(), st.lists, max_leaves=5)))
def test_any_array_reads_back(tmp_path_factory: pytest.TempPathFactory, items: list[Any]) -> None:
    path = tmp_path_factory.mktemp("any") / "a.json"
    path.write_text(json.dumps(items))
    assert values(path) == items


@pytest.mark.parametrize("text", ['[{"a": 1}, {"a"', '[{"a": 1}', '[{"a": 1}, oops]', "["])
def test_a_broken_array_names_the_row(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=r"a\.json: row [12] is not JSON"):
        values(path)


def test_json_lines_under_the_name_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(lines(ROWS))
    assert values(path) == ROWS


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz"])
def test_packed_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    plain = lines(ROWS) if name == "a.jsonl.gz" else json.dumps(ROWS).encode()
    path.write_bytes(gzip.compress(plain))
    assert values(path) == ROWS
    path.write_bytes(gzip.compress(plain * 50)[:-20])
    with pytest.raises(RequestError, match=r"a\.jsonl?\.gz: (cannot be read behind row|row \d+ is not JSON)"):
        values(path)


def test_zstd_with_whichever_package_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All frames are read, and a file that is cut off is named; zlib stands in for a package that is not there."""
    packed = types.ModuleType("zstandard")
    packed.ZstdError = zlib.error  # type: ignore[attr-defined]
    packed.ZstdDecompressor = lambda: types.SimpleNamespace(decompressobj=zlib.decompressobj)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    monkeypatch.setitem(sys.modules, "zstandard", packed)
    check_zstd(tmp_path / "a.jsonl.zst", zlib.compress)


def test_real_zstd(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    check_zstd(tmp_path / "a.jsonl.zst", zstandard.ZstdCompressor().compress)


def check_zstd(path: Path, compress: Callable[[bytes], bytes]) -> None:
    path.write_bytes(compress(lines(ROWS)) + compress(lines(ROWS[:1])))
    assert values(path) == [*ROWS, ROWS[0]]
    array = path.with_name("a.json.zst")
    array.write_bytes(compress(json.dumps(ROWS).encode()))
    assert values(array) == ROWS
    path.write_bytes(compress(lines(ROWS * 50))[:-9])
    with pytest.raises(RequestError, match=r"cannot be read behind row \d+: the file is cut off"):
        values(path)
    path.write_bytes(b"not packed at all")
    with pytest.raises(RequestError, match="cannot be read behind row 0: "):
        values(path)


def test_real_parquet(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.Table.from_pylist(ROWS), path)
    assert values(path) == ROWS


def test_parquet_is_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class File:
        def __init__(self, path: Path) -> None:
            assert path.name == "a.parquet"
            self.metadata = types.SimpleNamespace(num_rows=len(ROWS))

        def iter_batches(self, batch_size: int) -> Any:
            for part in (ROWS[:3], ROWS[3:]):
                yield types.SimpleNamespace(to_pylist=lambda part=part: part, num_rows=len(part))

    module = types.ModuleType("pyarrow.parquet")
    module.ParquetFile = File  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow", types.ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    (tmp_path / "a.parquet").write_bytes(bytes(100))
    meter, found, seen = Meter(), [], []
    for _, number, value in read_source(str(tmp_path / "a.parquet"), meter):
        found.append((number, value))
        seen.append(meter.at)
    assert found == list(enumerate(ROWS, start=1))
    assert seen == [300 // len(ROWS)] * 3 + [100] * (len(ROWS) - 3)


@pytest.mark.parametrize(
    ("name", "packages", "install"),
    [
        ("a.parquet", ["pyarrow", "pyarrow.parquet"], "pip install pyarrow"),
        ("a.jsonl.zst", ["compression.zstd", "zstandard"], "pip install zstandard"),
        ("hub:some/set", ["datasets"], "pip install datasets"),
    ],
)
def test_a_missing_package_is_one_line_with_its_install_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, packages: list[str], install: str
) -> None:
    """U2: optional parts are optional, and say what they are called."""
    without(monkeypatch, *packages)
    (tmp_path / name.replace(":", "_").replace("/", "_")).write_bytes(b"x")
    with pytest.raises(RequestError) as caught:
        values(name if name.startswith("hub:") else tmp_path / name)
    assert str(caught.value).endswith(install)
    assert "\n" not in str(caught.value)


def test_hub_sets_go_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Loaded(list[Any]):
        _fingerprint = "abc"
        data = types.SimpleNamespace(nbytes=1000)

    def load_dataset(name: str, split: str) -> Loaded:
        asked.append((name, split))
        if name == "none":
            raise FileNotFoundError("no such\ndata set")
        return Loaded(ROWS)

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert values("hub:some/set") == ROWS
    assert values("hub:some/set:test[:10]") == ROWS
    assert asked == [("some/set", "train"), ("some/set", "test[:10]")]
    assert source_digest("hub:some/set") == "abc"
    assert source_bytes("hub:some/set") == 1000
    with pytest.raises(RequestError, match="hub:none: no such data set"):
        values("hub:none")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rows in (("b.jsonl", ROWS[:2]), ("a/z.jsonl", ROWS[2:3]), ("a/.hidden.jsonl", ROWS), ("notes.md", [])):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_bytes(lines(rows))
    (tmp_path / "d" / "c.json.gz").write_bytes(gzip.compress(json.dumps(ROWS[3:]).encode()))
    return tmp_path / "d"


def test_a_folder_is_its_data_files_in_order(folder: Path) -> None:
    assert [path.name for path in source_files(str(folder))] == ["z.jsonl", "b.jsonl", "c.json.gz"]
    assert values(folder) == [ROWS[2], *ROWS[:2], *ROWS[3:]]


def test_a_glob_is_sorted_too(folder: Path) -> None:
    assert [path.name for path in source_files(f"{folder}/**/*.jsonl")] == ["z.jsonl", "b.jsonl"]
    with pytest.raises(RequestError, match="no file matches"):
        source_files(f"{folder}/*.csv")
    (folder / "a[1].jsonl").write_bytes(lines(ROWS))
    assert values(folder / "a[1].jsonl") == ROWS


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no data file in this folder"):
        source_files(str(tmp_path))


def test_a_digest_knows_content_and_not_place(folder: Path, tmp_path: Path) -> None:
    before = source_digest(str(folder))
    moved = folder.rename(tmp_path / "moved")
    assert source_digest(str(moved)) == before
    (moved / "b.jsonl").write_bytes(lines(ROWS))
    assert source_digest(str(moved)) != before


def test_reading_is_a_stream(tmp_path: Path) -> None:
    """Nothing behind the rows that were asked for is read."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS * 20_000))
    meter = Meter()
    rows = read_source(str(path), meter)
    assert next(rows)[2] == ROWS[0]
    assert 0 < meter.at < path.stat().st_size
    assert len(list(rows)) == 20_000 * len(ROWS) - 1
    assert meter.at == path.stat().st_size


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_meter_counts_bytes_as_they_lie(tmp_path: Path, name: str) -> None:
    """Over several files, packed or not."""
    for part in ("1", "2"):
        noise = np.random.default_rng(0).bytes(4 << 20).hex()
        plain = lines([{"text": noise[place : place + 4096]} for place in range(0, len(noise), 4096)])
        (tmp_path / f"{part}{name}").write_bytes(gzip.compress(plain, 1) if name.endswith("gz") else plain)
    meter, seen = Meter(source_bytes(str(tmp_path))), []
    for place, _ in enumerate(read_source(str(tmp_path), meter)):
        if place in (1024, 2048, 3072):  # of 4,096
            seen.append(meter.at / meter.total_bytes)
    assert 0.15 < seen[0] < 0.5 <= seen[1] < 0.9
    assert seen[1] < seen[2] <= 1
    assert meter.at == meter.total_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
