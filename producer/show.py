"""Samples of a token dataset for a person to look at: what is learned stands out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from protocol.dataset import TokenDataset
from protocol.keyed import choose

# Which samples are shown is the same each time.
_SHOW_KEY = 11
_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
_OPEN, _CLOSE = "\u00ab", "\u00bb"


def show_samples(dataset: TokenDataset, tokenizer: Any, count: int, colour: bool) -> list[str]:
    """`count` samples, drawn from all of the data, as lines: where each was read, and its text with the supervised
    tokens in green, or without `colour` between \u00ab and \u00bb."""
    places, files = np.load(dataset.folder / "places.npy"), dataset.meta["files"]
    begin, end = (_GREEN, _PLAIN) if colour else (_OPEN, _CLOSE)
    lines = []
    for sample in choose(len(dataset), count, _SHOW_KEY).tolist():
        ids, mask = dataset.tokens(sample), dataset.mask(sample)
        borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
        text = ""
        for start, stop in pairwise(borders):
            piece = tokenizer.decode(ids[start:stop], skip_special_tokens=False)
            text += f"{begin}{piece}{end}" if mask[start] else piece
        file, row = places[sample].tolist()
        lines += [f"--- sample {sample}, {files[file]}:{row}, {len(ids)} tokens, {int(mask.sum())} supervised", text]
    return lines
