"""Greedy answers by the target itself, and the resumable job that answers a whole data set.

A drafter learns what this target says next, so the best training text is the target's own greedy continuation of the
prompts (on-policy data); acceptance length is measured on the same kind of text.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from producer.chat import conversation_of
from producer.config import DataConfig
from producer.provenance import begin_output, provenance_of
from producer.rows import Row, SkipRow, Skips
from producer.samples import Item, SampleMaker
from producer.target import Target

IntArray = NDArray[np.int32]


def greedy_answers(
    model: Any,
    prompts: Sequence[Sequence[int] | IntArray],
    *,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    batch_rows: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The greedy (temperature 0) answer of a causal LM to every prompt, in the order of `prompts`.

    An answer ends with the first id of `stop_ids`, which it includes, or after `max_new_tokens` ids without one.
    Batches hold `batch_rows` prompts of similar length, longest first, so that a batch that does not fit in memory
    fails at the start. Rows are padded on the left with a mask, which is exact enough for generation and never used
    for features. Sampling and penalty settings that ship with the model are not applied. `progress(done, all)` is
    called after each batch.
    """
    device = model.get_input_embeddings().weight.device
    pad_id = min(stop_ids, default=0)
    order = sorted(range(len(prompts)), key=lambda row: (-len(prompts[row]), row))
    answers: list[list[int]] = [[] for _ in prompts]
    shipped = model.generation_config
    # `generate` fills what a call leaves open from the model's own settings, so those are set aside as a whole.
    settings: Any = transformers.GenerationConfig
    model.generation_config = settings(eos_token_id=sorted(stop_ids) or None, pad_token_id=pad_id)
    try:
        for start in range(0, len(order), batch_rows):
            rows = order[start : start + batch_rows]
            longest = len(prompts[rows[0]])
            ids = torch.full((len(rows), longest), pad_id, dtype=torch.int64)
            mask = torch.zeros((len(rows), longest), dtype=torch.int64)
            for line, row in enumerate(rows):
                ids[line, longest - len(prompts[row]) :] = torch.as_tensor(np.asarray(prompts[row], dtype=np.int64))
                mask[line, longest - len(prompts[row]) :] = 1
            with torch.inference_mode():
                output = model.generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                )
            for row, line in zip(rows, output[:, longest:].tolist(), strict=True):
                answers[row] = _through_stop(line, stop_ids)
            if progress is not None:
                progress(start + len(rows), len(order))
    finally:
        model.generation_config = shipped
    return answers


def _through_stop(ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    end = next((place for place, token in enumerate(ids) if token in stop_ids), len(ids) - 1)
    return ids[: end + 1]


class GenerateReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `draftwire generate` did.

    `rows` were read, `skipped` ones included; the answers of `resumed` rows were there already. `unfinished` answers
    hit the token limit. `inexact` ones read back as other token ids than the target wrote: text does not always
    tokenise the way it was generated. Keep the tokens where that matters.
    """

    rows: int
    resumed: int
    answered: int
    unfinished: int
    inexact: int
    skipped: dict[str, int]


def generate_answers(
    data: DataConfig,
    target: Target,
    maker: SampleMaker,
    out: Path,
    *,
    stop_ids: frozenset[int],
    max_new_tokens: int,
    weights: str,
    with_tokens: bool = False,
    batch_rows: int = 32,
    say: Callable[[str], None] | None = None,
) -> GenerateReport:
    """Answers every row of `data.train` and appends one JSON line per usable row to `out`, in input order.

    A line holds `messages` (and `tools`, where the row has some), `finish_reason` ("stop", or "length" for an answer
    that `max_new_tokens` cut) and `source` (the row's own, or its file:line). `with_tokens` adds `input_ids`,
    `loss_mask` (only this answer is supervised, and its end token only when the target produced it) and `tokenizer`;
    `prepare` takes such a line as it is. A row that was given as tokens has no messages, so its line always has them.
    How the answers were made is in `OUT.provenance.json`, once (`producer.provenance`). `weights` names the target's.

    The last assistant turn of a row is replaced by the new answer. Interrupted work goes on behind the last complete
    line: which rows are skipped depends on the data alone, so line n always answers the n-th usable row. Raises
    RequestError when `out` was made with other settings.
    """
    provenance = provenance_of(
        data, target, maker.tokenizer_id, weights=weights, max_new_tokens=max_new_tokens, with_tokens=with_tokens
    )
    resumed = begin_output(out, provenance)
    skips = Skips(data.strict)
    counts = {"rows": 0, "answered": 0, "unfinished": 0, "inexact": 0}
    waiting = _questions(data, maker, skips, resumed, counts)
    with out.open("ab") as stream:
        # A chunk is written as a whole: large enough to sort by length, small enough to lose little.
        while chunk := list(itertools.islice(waiting, 8 * batch_rows)):
            answers = greedy_answers(
                target.model,
                [ids for _, ids in chunk],
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
                batch_rows=batch_rows,
            )
            for (item, ids), answer in zip(chunk, answers, strict=True):
                line = _line(item, ids, answer, maker, stop_ids, with_tokens)
                stream.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                counts["answered"] += 1
                counts["unfinished"] += line["finish_reason"] == "length"
                counts["inexact"] += "input_ids" not in line and not _reads_back(line, item, [*ids, *answer], maker)
            stream.flush()
            os.fsync(stream.fileno())
            if say is not None:
                say(f"generate: {resumed + counts['answered']} answers written")
    return GenerateReport(resumed=resumed, skipped=skips.counts, **counts)


def _questions(
    data: DataConfig, maker: SampleMaker, skips: Skips, resumed: int, counts: dict[str, int]
) -> Iterator[tuple[Item, IntArray]]:
    """The usable rows behind the first `resumed` ones with their prompts, as many as `data.max_samples` allows."""
    usable = 0
    for item in maker.items(data.train):
        if usable == data.max_samples:
            return
        counts["rows"] += 1
        try:
            if isinstance(item, tuple):
                raise item[1]
            prompt = maker.prompt(item)
        except SkipRow as skip:
            skips.add((item[0] if isinstance(item, tuple) else item.row).place, skip)
            continue
        usable += 1
        if usable > resumed:
            yield item, prompt


def _line(
    item: Item, ids: IntArray, answer: list[int], maker: SampleMaker, stop_ids: frozenset[int], with_tokens: bool
) -> dict[str, Any]:
    cut = answer[-1] not in stop_ids
    named = item.row.value.get("source")
    line: dict[str, Any] = {}
    if item.conversation is not None:
        text = maker.tokenizer.decode(answer if cut else answer[:-1], skip_special_tokens=False)
        if cut:
            text = text.rstrip("\ufffd")  # a character of which the limit left only some bytes
        question = item.conversation.prompt()
        template, _ = maker.template(item.source.thinking)
        line["messages"] = [*question.messages, template.answer_message(question, text, cut)]
        if question.tools:
            line["tools"] = list(question.tools)
    line["finish_reason"] = "length" if cut else "stop"
    line["source"] = named if isinstance(named, str) else item.row.place
    if with_tokens or item.conversation is None:
        line["input_ids"] = [*ids.tolist(), *answer]
        line["loss_mask"] = [0] * len(ids) + [1] * len(answer)
        line["tokenizer"] = maker.tokenizer_id
    return line


def _reads_back(line: dict[str, Any], item: Item, exact: list[int], maker: SampleMaker) -> bool:
    """Whether `prepare` will make the target's own tokens of a line, as far as both go."""
    try:
        conversation = conversation_of(line, "messages")
        ids = maker.sample(Item(Row(item.row.path, item.row.line, line), item.source, conversation, None)).ids
    except SkipRow:
        return False
    return bool((ids[: len(exact)] == np.asarray(exact[: len(ids)])).all())
