"""The rows of `data.train` as dialogues to be answered, in order, those behind what is answered already."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from producer.config import DataConfig
from producer.decoding import Decoding
from producer.dialogue import Dialogue, dialogue
from producer.rows import SkipRow, Skips
from producer.samples import SampleMaker

_THINKING_ON = {"enable_thinking": True, "thinking": True}


def open_dialogues(
    data: DataConfig, maker: SampleMaker, decoding: Decoding, skips: Skips, resumed: int, counts: dict[str, int]
) -> Iterator[tuple[Dialogue, NDArray[np.int32]]]:
    """The usable rows behind the first `resumed` ones with their first prompts int32 `[P]`, as many as
    `data.max_samples` allows. Which rows are usable depends on the data alone. Counts `rows`."""
    usable = 0
    for item in maker.items(data.train):
        if usable == data.max_samples:
            return
        counts["rows"] += 1
        try:
            if isinstance(item, tuple):
                raise item[1]
            found = dialogue(usable, item, decoding)
            prompt = prompt_ids(maker, found, decoding)
        except SkipRow as skip:
            skips.add((item[0] if isinstance(item, tuple) else item.row).place, skip)
            continue
        usable += 1
        if usable > resumed:
            yield found, prompt


def prompt_ids(maker: SampleMaker, asked: Dialogue, decoding: Decoding) -> NDArray[np.int32]:
    """Ids int32 `[P]` of what the target is asked next. Raises SkipRow, for a prompt over `data.max_length` too."""
    item = asked.asking
    ids = maker.prompt(item)
    if decoding.thinking != "on" or item.conversation is None:
        return ids
    # A template may leave thinking off unless it is told.
    template, _ = maker.template(item.source.thinking)
    question = asked.question
    text = template.render(question.messages, question.tools, ask=True, options=_THINKING_ON)
    ids = np.asarray(maker.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    if maker.max_length is not None and len(ids) > maker.max_length:
        raise SkipRow("prompt longer than max_length", f"{len(ids)} tokens")
    return ids
