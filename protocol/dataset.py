"""The token dataset: tokenised samples with their loss masks in one memory-mapped folder. No torch here.

    tokens.bin    int32, all samples one after the other
    mask.bin      uint8 0/1 beside it; 1 = supervised token
    offsets.npy   int64 [n + 1], sample i is tokens[offsets[i] : offsets[i + 1]]
    anchors.npy   int32 [n], how many anchors sample i could take
    meta.json     fingerprint, settings and counts
    places.npy    where `prepare` wrote it: int64 [n, 2], the file (by its place in meta's `files`) and the row of each
                  sample

An anchor is eligible at position a when tokens a and a + 1 are both supervised.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import RequestError

META = "meta.json"
Sample = tuple[NDArray[np.int32], NDArray[np.uint8]]


def eligible_anchors(mask: NDArray[np.uint8]) -> int:
    """How many positions of a loss mask `[L]` can be anchors: the token and its successor are supervised."""
    return int(np.count_nonzero(mask[:-1] & mask[1:]))


def eligible_of(mask: NDArray[np.uint8], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same for each of several samples, one behind the other in `mask` `[T]`; none of `lengths` `[n]` is 0."""
    ends = np.cumsum(lengths)
    pairs = np.zeros(len(mask), dtype=np.int64)
    pairs[:-1] = mask[:-1] & mask[1:]
    pairs[ends - 1] = 0  # what comes behind a sample's last token is another sample's
    return np.add.reduceat(pairs, ends - lengths) if len(ends) else pairs


class TokenDataset:
    """A reader of a dataset folder; arrays are views of the mapped files, so opening is instant at any size."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder = folder
        self.meta = meta
        self.fingerprint = str(meta["fingerprint"])
        self._offsets: NDArray[np.int64] = np.load(folder / "offsets.npy")
        self.lengths: NDArray[np.int64] = np.diff(self._offsets)
        self.eligible: NDArray[np.int64] = np.load(folder / "anchors.npy").astype(np.int64)
        total = int(self._offsets[-1])
        self._tokens = _mapped(folder / "tokens.bin", np.dtype(np.int32), total)
        self._mask = _mapped(folder / "mask.bin", np.dtype(np.uint8), total)
        if len(self.eligible) != len(self.lengths):
            raise RequestError(f"{folder}: anchors.npy and offsets.npy disagree; delete the folder and prepare again")

    @classmethod
    def open(cls, path: Path | str) -> TokenDataset:
        """Opens the dataset folder `path`. Raises RequestError when it is missing, incomplete or cut off."""
        folder = Path(path)
        try:
            return cls(folder, json.loads((folder / META).read_text()))
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise RequestError(f"{folder} is not a token dataset ({error}); run `draftwire prepare`") from None

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, sample: int) -> NDArray[np.int32]:
        """Token ids of a sample, int32 `[L]`, a read-only view."""
        return self._tokens[self._offsets[sample] : self._offsets[sample + 1]]

    def mask(self, sample: int) -> NDArray[np.uint8]:
        """Loss mask of a sample, uint8 `[L]`, a read-only view."""
        return self._mask[self._offsets[sample] : self._offsets[sample + 1]]

    def occurring_ids(self) -> NDArray[np.int32]:
        """The token ids that occur anywhere in the data, sorted."""
        return np.unique(self._tokens)


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    if path.stat().st_size != count * dtype.itemsize:
        raise RequestError(f"{path}: {path.stat().st_size} bytes, not {count * dtype.itemsize}; prepare again")
    if count == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r", shape=(count,))


def write_dataset(
    folder: Path, samples: Iterable[Sample], meta: dict[str, Any], arrays: dict[str, NDArray[Any]] | None = None
) -> TokenDataset:
    """Writes `samples` (token ids int32 `[L]`, mask uint8 `[L]`) to `folder` and opens it. `arrays` become NAME.npy.

    `meta` must hold `fingerprint`; it and `arrays` are written after the last sample was drawn, so an iterator may
    fill them on its way. `samples`, `tokens`, `supervised_tokens` and `eligible_anchors` are added. The folder appears
    complete or not at all: everything is written beside it and renamed, and a reader of an older version keeps its
    mapped files.
    """
    offsets, supervised = array("q", [0]), 0
    anchors = array("i")
    with _part(folder) as part:
        with (part / "tokens.bin").open("wb") as tokens_file, (part / "mask.bin").open("wb") as mask_file:
            for tokens, mask in samples:
                if len(tokens) != len(mask):
                    raise ValueError(f"sample {len(anchors)}: {len(tokens)} tokens but {len(mask)} mask entries")
                tokens_file.write(np.ascontiguousarray(tokens, dtype=np.int32).tobytes())
                mask_file.write(np.ascontiguousarray(mask, dtype=np.uint8).tobytes())
                offsets.append(offsets[-1] + len(tokens))
                anchors.append(eligible_anchors(mask))
                supervised += int(mask.sum())
        _complete(part, np.asarray(offsets), np.asarray(anchors), supervised, meta, arrays)
        _replace(part, folder)
    return TokenDataset.open(folder)


def adopt_dataset(
    folder: Path,
    files: tuple[Path, Path],
    lengths: NDArray[np.int64],
    eligible: NDArray[np.int64],
    supervised: int,
    meta: dict[str, Any],
    arrays: dict[str, NDArray[Any]] | None = None,
) -> TokenDataset:
    """The same of samples whose tokens and masks lie in two `files` already: these are not copied where the file system
    can give a file a second name, and must not be written to any more. `lengths` and `eligible` anchors `[n]`."""
    with _part(folder) as part:
        for file, name in zip(files, ("tokens.bin", "mask.bin"), strict=True):
            try:
                os.link(file, part / name)
            except OSError:
                shutil.copyfile(file, part / name)
        _complete(part, np.concatenate(([0], np.cumsum(lengths))), eligible, supervised, meta, arrays)
        _replace(part, folder)
    return TokenDataset.open(folder)


@contextmanager
def _part(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` for what is being written, gone at the end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _complete(
    part: Path,
    offsets: NDArray[np.int64],
    anchors: NDArray[np.integer[Any]],
    supervised: int,
    meta: dict[str, Any],
    arrays: dict[str, NDArray[Any]] | None,
) -> None:
    """Everything beside the tokens and masks."""
    np.save(part / "offsets.npy", offsets.astype(np.int64))
    np.save(part / "anchors.npy", anchors.astype(np.int32))
    for name, values in (arrays or {}).items():
        np.save(part / f"{name}.npy", values)
    counts = {"samples": len(anchors), "tokens": int(offsets[-1]), "supervised_tokens": supervised}
    whole = {**meta, **counts, "eligible_anchors": int(anchors.sum())}
    (part / META).write_text(json.dumps(whole, indent=1) + "\n")


def _replace(part: Path, folder: Path) -> None:
    for path in part.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    old = part.with_name(part.name + ".old")
    if folder.exists():
        folder.rename(old)
    try:
        part.rename(folder)
    except OSError as error:  # another run made the same dataset at the same moment
        if error.errno != errno.ENOTEMPTY:
            raise
    shutil.rmtree(old, ignore_errors=True)
