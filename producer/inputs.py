"""The files of a source and their rows: JSONL, JSON arrays, Parquet, each plain or packed, in folders, globs or a hub
data set.

What a row says is not looked at here. Readers are streams: memory does not grow with a file, with the exception of
one row of it.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from producer.config import HUB
from producer.meter import Meter
from producer.rows import Payload, Row, row_of
from producer.tables import hub_bytes, hub_fingerprint, hub_rows, parquet_rows
from producer.unpacked import PIECE_BYTES, unpacked
from protocol.errors import RequestError

_TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json")
_PACKED = (".gz", ".zst")
_DATA_SUFFIXES = (*_TEXT_SUFFIXES, *(kind + packed for kind in _TEXT_SUFFIXES for packed in _PACKED), ".parquet")
_GLOB = frozenset("*?[")


def source_files(path: str) -> list[Path]:
    """The files of a source in the order of their names: the file itself, every data file below a folder (hidden ones
    left out), or what a glob finds. Raises RequestError when there is none."""
    whole = Path(path).expanduser()
    if whole.is_dir():
        below = (entry for entry in whole.rglob("*") if entry.is_file() and entry.name.endswith(_DATA_SUFFIXES))
        found = [entry for entry in below if not any(part.startswith(".") for part in entry.relative_to(whole).parts)]
        if not found:
            raise RequestError(f"[data] {path}: no data file in this folder ({', '.join(_DATA_SUFFIXES)})")
        return sorted(found, key=lambda entry: entry.relative_to(whole).parts)
    if _GLOB & set(path) and not whole.exists():
        found = [Path(name) for name in glob.glob(str(whole), recursive=True) if Path(name).is_file()]
        if not found:
            raise RequestError(f"[data] {path}: no file matches")
        return sorted(found, key=lambda entry: entry.parts)
    return [whole]


def source_bytes(path: str) -> int:
    """How large a source is where it lies. Raises RequestError when there is none."""
    if path.startswith(HUB):
        return hub_bytes(path)
    return sum(file.stat().st_size for file in source_files(path) if file.exists())


def read_source(path: str, meter: Meter | None = None) -> Iterator[tuple[Path, int, Payload]]:
    """Every row of a source in order: file, row number (1-based) and what stands there, unread; `meter` sees it pass.

    Raises RequestError, naming file and row, for what cannot be opened or breaks off.
    """
    if path.startswith(HUB):
        for number, value in enumerate(hub_rows(path, meter), start=1):
            yield Path(path), number, value
        return
    for file in source_files(path):
        for number, payload in read_file(file, meter):
            yield file, number, payload


def read_rows(path: Path) -> Iterator[Row]:
    """Every row of one file, good or bad, in order. Raises RequestError when the file cannot be opened."""
    return (row_of(path, number, payload) for number, payload in read_file(path))


def read_file(path: Path, meter: Meter | None = None) -> Iterator[tuple[int, Payload]]:
    """Row number and content of every row of one file. A byte order mark, CRLF endings and blank lines are no fault;
    a blank line is no row, but it is counted as a line."""
    number = 0
    try:
        if path.name.endswith(".parquet"):
            for number, value in enumerate(parquet_rows(path, meter), start=1):
                yield number, value
            return
        with (
            path.open("rb", buffering=0) as raw,
            unpacked(path, raw) as stream,
            (meter or Meter()).passing(path.stat().st_size, raw.tell),
        ):
            for number, payload in _array(stream, path) if _is_array(path, stream) else _lines(stream):
                yield number, payload
    except FileNotFoundError as error:
        raise RequestError(f"[data] {path}: cannot be read: {error.strerror}; check the path") from None
    except (OSError, EOFError, zlib.error) as error:
        raise RequestError(f"[data] {path}: cannot be read behind row {number}: {error}") from None


def source_digest(path: str) -> str:
    """What tells one content of a source from another: names inside a folder count, where the folder lies does not.

    Raises RequestError when a file cannot be read.
    """
    if path.startswith(HUB):
        return hub_fingerprint(path)
    files = source_files(path)
    if len(files) == 1 and files[0] == Path(path).expanduser():
        return _file_digest(files[0])
    parts = [[file.name, _file_digest(file)] for file in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _file_digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise RequestError(f"[data] {file}: cannot be read: {error.strerror}") from None


def _is_array(path: Path, stream: BufferedReader) -> bool:
    """Whether a .json file is one array; one that is not is taken line by line."""
    if not path.name.removesuffix(".gz").removesuffix(".zst").endswith(".json"):
        return False
    return stream.peek(PIECE_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield number, line


def _array(stream: IO[bytes], path: Path) -> Iterator[tuple[int, Any]]:
    """The items of one JSON array, decoded one after the other out of a sliding piece of the text."""
    decoder, pieces = json.JSONDecoder(), _decoded(stream, path)
    text, at, number, ended = next(pieces).lstrip()[1:], 0, 0, False
    while True:
        while at < len(text) and (text[at].isspace() or (text[at] == "," and number)):
            at += 1
        if text[at : at + 1] == "]":
            return
        try:
            value, end = decoder.raw_decode(text, at)
            whole, problem = end < len(text), "the array is cut off"
        except (ValueError, RecursionError) as error:
            whole, problem = False, str(error)
        if whole:
            number, at = number + 1, end
            yield number, value
        elif ended:
            raise RequestError(f"[data] {path}: row {number + 1} is not JSON: {problem}")
        else:  # the item may go on behind this piece: as much again, so that a long one is not decoded over and over
            more = next(pieces, "")
            text, at, ended = _longer(text[at:] + more, pieces), 0, not more


def _longer(text: str, pieces: Iterator[str]) -> str:
    wanted = 2 * len(text)
    parts = [text]
    while sum(map(len, parts)) < wanted and (piece := next(pieces, "")):
        parts.append(piece)
    return "".join(parts)


def _decoded(stream: IO[bytes], path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        while raw := stream.read(PIECE_BYTES):
            if piece := decoder.decode(raw):
                yield piece
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise RequestError(f"[data] {path}: not UTF-8: {error.reason}") from None
