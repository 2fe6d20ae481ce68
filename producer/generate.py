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

from producer.config import DataConfig
from producer.rows import SkipRow, Skips
from producer.samples import Item, SampleMaker
from producer.target import Target
from protocol.errors import RequestError

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
    """What `draftwire generate` did: `resumed` rows were there already, `unfinished` answers hit the token limit."""

    rows: int
    resumed: int
    answered: int
    unfinished: int
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
    batch_rows: int = 32,
    say: Callable[[str], None] | None = None,
) -> GenerateReport:
    """Answers every row of `data.train` and appends one JSON line per row to `out`, in input order.

    A line holds `messages` (to read), `input_ids` and `loss_mask` (the exact tokens; only this answer is supervised,
    and its end token only when the target produced it), `tokenizer`, `source`, `finished` and `provenance`. As input
    of `prepare` such a line counts as pre-tokenised, so nothing is lost by tokenising the answer's text again.

    The last assistant turn of a row is replaced by the new answer. Interrupted work goes on behind the last complete
    line. `weights` names the target's weights. Raises RequestError when `out` was made with other settings.
    """
    provenance = {
        "model": target.facts["model"],
        "weights": weights,
        "dtype": str(target.dtype).removeprefix("torch."),
        "max_new_tokens": max_new_tokens,
        "decoding": "greedy",
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    resumed, last = _resume(out, provenance)
    skips = Skips(data.strict)
    counts = {"rows": resumed, "answered": 0, "unfinished": 0}
    waiting = _questions(data, maker, skips, last, counts)
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
                line = _line(item, ids, answer, maker, stop_ids, provenance)
                stream.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                counts["answered"] += 1
                counts["unfinished"] += not line["finished"]
            stream.flush()
            os.fsync(stream.fileno())
            if say is not None:
                say(f"generate: {resumed + counts['answered']} answers written")
    return GenerateReport(resumed=resumed, skipped=skips.counts, **counts)


def _questions(
    data: DataConfig, maker: SampleMaker, skips: Skips, last: str | None, counts: dict[str, int]
) -> Iterator[tuple[Item, IntArray]]:
    behind = last is None
    for item in maker.items(data.train):
        row = item[0] if isinstance(item, tuple) else item.row
        if not behind:
            behind = row.place == last
            continue
        if data.max_samples is not None and counts["rows"] - sum(skips.counts.values()) >= data.max_samples:
            return
        counts["rows"] += 1
        try:
            if isinstance(item, tuple):
                raise item[1]
            yield item, maker.prompt(item)
        except SkipRow as skip:
            skips.add(row.place, skip)
    if not behind:
        raise RequestError(f"the answers written so far end with {last}, which data.train no longer holds")


def _line(
    item: Item,
    ids: IntArray,
    answer: list[int],
    maker: SampleMaker,
    stop_ids: frozenset[int],
    provenance: dict[str, Any],
) -> dict[str, Any]:
    finished = answer[-1] in stop_ids
    text = maker.tokenizer.decode(answer[:-1] if finished else answer, skip_special_tokens=False)
    line: dict[str, Any] = {"source": item.row.place, "finished": finished, "provenance": provenance}
    if item.conversation is not None:
        question = item.conversation.prompt()
        line["messages"] = [*question.messages, {"role": "assistant", "content": text}]
        if question.tools:
            line["tools"] = list(question.tools)
    line["input_ids"] = [*ids.tolist(), *answer]
    line["loss_mask"] = [0] * len(ids) + [1] * len(answer)
    line["tokenizer"] = maker.tokenizer_id
    return line


def _resume(out: Path, provenance: dict[str, Any]) -> tuple[int, str | None]:
    """How many complete lines `out` holds and the source of the last; a line that was cut off is removed."""
    if not out.exists():
        return 0, None
    lines, last, good_bytes = 0, None, 0
    with out.open("rb") as stream:
        for raw in stream:
            if not raw.endswith(b"\n"):
                break
            try:
                line = json.loads(raw)
                made_with, last = line["provenance"], str(line["source"])
            except (ValueError, KeyError, TypeError):
                raise RequestError(
                    f"{out}:{lines + 1}: not a line of `draftwire generate`; name another file"
                ) from None
            if made_with != provenance:
                differ = [key for key in provenance if made_with.get(key) != provenance[key]]
                raise RequestError(f"{out} was made with another {', '.join(differ)}; name another file or delete it")
            lines += 1
            good_bytes += len(raw)
    os.truncate(out, good_bytes)
    return lines, last
