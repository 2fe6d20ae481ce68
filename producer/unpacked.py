"""Files that are packed with gzip or zstd, read as what they hold."""

from __future__ import annotations

import gzip
import importlib
import io
from pathlib import Path
from typing import IO, Any

from producer.tables import missing_package

PIECE_BYTES = 1 << 20


def unpacked(path: Path, raw: io.FileIO) -> io.BufferedReader:
    """What the open file `raw`, named `path`, holds. Raises RequestError where a package is missing; reading raises
    OSError, EOFError or zlib.error for a file that is damaged or cut off."""
    if path.name.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), PIECE_BYTES)
    if path.name.endswith(".zst"):
        return io.BufferedReader(_Zstd(raw), PIECE_BYTES)
    return io.BufferedReader(raw, PIECE_BYTES)


class _Zstd(io.RawIOBase):
    """All frames of a zstd file, by the standard library since Python 3.14, else by the package `zstandard`: its own
    reader cannot be asked for lines, ends with the first frame, and takes a file that is cut off for a whole one."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._library: Any = _zstd_library()
        self._frame: Any = None
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            packed = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            packed = packed or self._raw.read(PIECE_BYTES)
            if not packed:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("the file is cut off")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._new_frame()
            try:
                self._left = memoryview(self._frame.decompress(packed))
            except self._library.ZstdError as error:
                raise OSError(str(error)) from None
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def _new_frame(self) -> Any:
        reader: Any = self._library.ZstdDecompressor()
        return reader.decompressobj() if hasattr(reader, "decompressobj") else reader


def _zstd_library() -> Any:
    for module in ("compression.zstd", "zstandard"):
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    raise missing_package("zstandard", "a file packed with zstd")
