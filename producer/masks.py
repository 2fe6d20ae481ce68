"""Training texts to token ids and loss masks, many at once.

A token is learned when its characters lie inside a span (turns.py). The tokens before a span are those of its
generation prompt: a tokenizer may merge the prompt's last characters with the answer's first (two newlines, a blank and
a word), and then a server never sees these tokens. Such an answer is not learned, and counted.

Added tokens (`<|im_start|>`) split a text before anything is merged, so the comparison begins at the last one of a
prompt. What stands from there to the prompt's end is mostly the same in every row, and remembered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.borders import Borders
from producer.turns import Draft, Span

MERGED = "answer's first token would reach into its prompt"
_REMEMBERED_CHARS = 64
_REMEMBERED = 4096


@dataclass(frozen=True)
class Tokenised:
    """Token ids int32 `[L]` and loss mask uint8 `[L]`; `truncated` when the conversation was longer."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    truncated: bool = False
    left_out: Counter[str] = field(default_factory=Counter)


class Masker:
    """Tokenises for one fast tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        # A tokenizer file may carry limits of its own; a sample is cut by max_length alone.
        self._backend.no_truncation()
        self._backend.no_padding()
        added = sorted(tokenizer.added_tokens_decoder)
        self._is_added = np.zeros(max(len(tokenizer), *added, 0) + 1, dtype=np.bool_)
        self._is_added[added] = True
        self._known: dict[str, list[int]] = {}

    def tokenise(self, drafts: Sequence[Draft]) -> list[Tokenised]:
        """Whole samples, uncut, in the order of `drafts`; a mask may be all zero."""
        encodings = self._backend.encode_batch([draft.text for draft in drafts], add_special_tokens=False)
        return [self._masked(draft, encoding) for draft, encoding in zip(drafts, encodings, strict=True)]

    def document(self, text: str) -> Tokenised:
        """A text without turns, with the start token that the tokenizer adds: all of it learned but the first token,
        which nothing comes before."""
        ids = np.asarray(self._backend.encode(text).ids, dtype=np.int32)
        mask = np.ones(len(ids), dtype=np.uint8)
        mask[:1] = 0
        return Tokenised(ids, mask)

    def _masked(self, draft: Draft, encoding: Any) -> Tokenised:
        ids = np.asarray(encoding.ids, dtype=np.int32)
        mask = np.zeros(len(ids), dtype=np.uint8)
        left_out: Counter[str] = Counter()
        added = self._is_added[ids].nonzero()[0]
        borders = Borders(encoding, len(ids))
        for span in draft.spans:
            first, last = borders.inside(span.start, span.end)
            if first >= last:
                continue
            merged = borders.start(first) < span.start
            if span.asked and (merged or not self._as_asked(draft.text, ids, borders, added, first, span)):
                left_out[MERGED] += 1
                continue
            mask[first + merged : last] = 1
        return Tokenised(ids, mask, left_out=left_out)

    def _as_asked(
        self, text: str, ids: NDArray[np.int32], borders: Borders, added: NDArray[np.int64], first: int, span: Span
    ) -> bool:
        """Whether the tokens before an answer are those of its prompt alone."""
        before = int(added.searchsorted(first))
        begin = int(added[before - 1]) if before else 0
        tail = text[borders.start(begin) if before else 0 : span.start]
        expected = self._known.get(tail)
        if expected is None:
            expected = self._backend.encode(tail, add_special_tokens=False).ids
            if len(tail) <= _REMEMBERED_CHARS and len(self._known) < _REMEMBERED:
                self._known[tail] = expected
        return bool(ids[begin:first].tolist() == expected)
