"""Rows out of Parquet files and hub data sets, with packages that only their users need."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from producer.config import HUB
from producer.meter import Meter
from protocol.errors import RequestError

_BATCH_ROWS = 1024


def missing_package(package: str, needed_for: str) -> RequestError:
    """The one line for an optional package that is not there."""
    return RequestError(f"[data] {needed_for} needs the package {package}: pip install {package}")


def parquet_rows(path: Path, meter: Meter | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file, a batch at a time. Raises RequestError without pyarrow, or for no such file."""
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise missing_package("pyarrow", f"{path}: a Parquet file") from None
    try:
        file, passed = parquet.ParquetFile(path), 0
        size, rows = path.stat().st_size, max(file.metadata.num_rows, 1)
        with (meter or Meter()).passing(size, lambda: size * passed // rows):
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                passed += batch.num_rows
                yield from batch.to_pylist()
    except (ValueError, TypeError) as error:  # pyarrow's own errors are subclasses of these and of OSError
        raise RequestError(f"[data] {path}: not a Parquet file that can be read: {error}") from None


def hub_rows(path: str, meter: Meter | None = None) -> Iterator[dict[str, Any]]:
    """The rows of "hub:NAME" or "hub:NAME:SPLIT" (train when not said), in the data set's order."""
    found, passed = _hub(path), 0
    size, rows = int(found.data.nbytes), max(len(found), 1)
    with (meter or Meter()).passing(size, lambda: size * passed // rows):
        for row in found:
            passed += 1
            yield row


def hub_bytes(path: str) -> int:
    """What the rows of a hub data set take in the hub's own cache."""
    return int(_hub(path).data.nbytes)


def hub_fingerprint(path: str) -> str:
    """What the hub's own library calls this content of a data set."""
    return str(_hub(path)._fingerprint)


def _hub(path: str) -> Any:
    name, _, split = path.removeprefix(HUB).partition(":")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise missing_package("datasets", f"{path}: a hub data set") from None
    try:
        return datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError) as error:
        raise RequestError(f"[data] {path}: {' '.join(str(error).split())[:300]}") from None
