"""Which tokens lie between two characters, found by look-ups, is what all offsets say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.borders import Borders

PIECES = ["hello", " world", "\n", "  ", "\u00e9", "\U0001f642", "<|im_start|>", "<|im_end|>", "a", "\t x"]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12), st.data())
def test_look_ups_say_what_all_offsets_say(make_tokenizer: Callable[..., Any], pieces: list[str], data: Any) -> None:
    """Blanks have no width, and one character may be several tokens."""
    text = "".join(pieces)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    encoding = make_tokenizer().backend_tokenizer.encode(text, add_special_tokens=False)
    offsets = np.asarray(encoding.offsets).reshape(-1, 2)
    first, last = np.searchsorted(offsets[:, 1], (start, end), side="right").tolist()
    borders = Borders(encoding, len(encoding))
    found = borders.inside(start, end)
    if start == end:
        assert found[0] >= found[1]
        return
    assert found == (first, last) or (first >= last and found[0] >= found[1])
    if first < last:
        assert borders.start(first) == offsets[first, 0]
