"""Answers by the target itself, and the resumable job that answers a whole data set.

A drafter learns what this target says next, so the best training text is the target's own greedy continuation of the
prompts (on-policy data); acceptance length is measured on the same kind of text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from producer.answer_lines import AnswerFile, GenerateReport, answer_line, reads_back
from producer.config import DataConfig
from producer.decoding import GREEDY, Decoding, Sampling, row_seed
from producer.dialogue import Dialogue
from producer.mirror import Answers
from producer.provenance import begin_output, provenance_of
from producer.questions import open_dialogues, prompt_ids
from producer.rows import SkipRow, Skips
from producer.sampler import KeyedSampler
from producer.samples import SampleMaker
from producer.target import Target, on_device

IntArray = NDArray[np.int32]


def greedy_answers(
    target: Target,
    prompts: Sequence[Sequence[int] | IntArray],
    *,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    batch_rows: int = 32,
    progress: Callable[[int, int], None] | None = None,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] = (),
) -> list[list[int]]:
    """The target's answer to every prompt, in the order of `prompts`; greedy (temperature 0), or drawn with `sampling`
    and one of `seeds` for each prompt.

    An answer ends with the first id of `stop_ids`, which it includes, or after `max_new_tokens` ids without one.
    Batches hold `batch_rows` prompts of similar length, longest first, so that a batch that does not fit in memory
    fails at the start. Rows are padded on the left with a mask, which is exact enough for generation and never used
    for features. `progress(done, all)` is called after each batch.
    """
    order = sorted(range(len(prompts)), key=lambda row: (-len(prompts[row]), row))
    answers: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch_rows):
        rows = order[start : start + batch_rows]
        longest = len(prompts[rows[0]])
        ids = np.full((len(rows), longest), min(stop_ids, default=0), dtype=np.int64)
        mask = np.zeros((len(rows), longest), dtype=np.int64)
        for line, row in enumerate(rows):
            ids[line, longest - len(prompts[row]) :] = prompts[row]
            mask[line, longest - len(prompts[row]) :] = 1
        own = [seeds[row] for row in rows] if sampling.temperature else []
        found = answer_batch(target, ids, mask, stop_ids, max_new_tokens, sampling, own)
        for row, answer in zip(rows, found, strict=True):
            answers[row] = _through_stop(answer, stop_ids)
        if progress is not None:
            progress(start + len(rows), len(order))
    return answers


def answer_batch(
    target: Target,
    ids: NDArray[np.int64],
    mask: NDArray[np.int64],
    stop_ids: frozenset[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] = (),
) -> list[list[int]]:
    """What the target says behind each row of ids `[B, S]`, padded on the left; rows that have ended are padded on.
    `seeds`: one a row, unless greedy.

    Sampling and penalty settings that ship with the model are not applied.
    """
    told = Answers(len(ids), ids.tobytes(), mask.tobytes(), tuple(stop_ids), max_new_tokens, sampling, tuple(seeds))
    target.mirror.tell(told)
    model = target.model
    shipped = model.generation_config
    # `generate` fills what a call leaves open from the model's own settings, so those are set aside as a whole.
    settings: Any = transformers.GenerationConfig
    model.generation_config = settings(eos_token_id=sorted(stop_ids) or None, pad_token_id=min(stop_ids, default=0))
    try:
        with torch.inference_mode():
            output = model.generate(
                input_ids=on_device(ids, target.device),
                attention_mask=on_device(mask, target.device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                logits_processor=[KeyedSampler(sampling, seeds, max_new_tokens)] if sampling.temperature else [],
            )
    finally:
        model.generation_config = shipped
    answers: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return answers


def _through_stop(ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    end = next((place for place, token in enumerate(ids) if token in stop_ids), len(ids) - 1)
    return ids[: end + 1]


def generate_answers(
    data: DataConfig,
    target: Target,
    maker: SampleMaker,
    out: Path,
    *,
    stop_ids: frozenset[int],
    decoding: Decoding,
    weights: str,
    batch_rows: int = 32,
    say: Callable[[str], None] | None = None,
) -> GenerateReport:
    """Answers every row of `data.train` and appends one JSON line per usable row to `out`, in input order.

    A line holds `messages` (and `tools`, where the row has some), `finish_reason` ("stop", or "length" for an answer
    that `max_new_tokens` cut), `source` (the row's own, or its file:line) and `sampling`. With tokens kept it also has
    `input_ids`, `loss_mask` (only this answer is supervised, and its end token only when the target produced it) and
    `tokenizer`; `prepare` takes such a line as it is. A row that was given as tokens has no messages, so its line
    always has them. How the answers were made is in `OUT.provenance.json`, once (`producer.provenance`). `weights`
    names the target's.

    The last assistant turn of a row is replaced by the new answer, or each one. Interrupted work goes on behind the
    last complete line: which rows are skipped depends on the data alone, so line n always answers the n-th usable row.
    Raises RequestError when `out` was made with other settings.
    """
    made_by = {
        "model": target.facts["model"],
        "revision": target.facts["revision"],
        "weights": weights,
        "dtype": str(target.dtype).removeprefix("torch."),
        "transformers": transformers.__version__,
    }
    resumed = begin_output(out, provenance_of(data, maker, decoding, made_by))
    skips = Skips(data.strict)
    counts = {"rows": 0, "answered": 0, "unfinished": 0, "inexact": 0, "shortened": 0}
    waiting = open_dialogues(data, maker, decoding, skips, resumed, counts)
    with AnswerFile(out, resumed, say) as lines:
        # A chunk is written as a whole: large enough to sort by length, small enough to lose little.
        while chunk := list(itertools.islice(waiting, 8 * batch_rows)):
            answered = _answer(chunk, target, maker, decoding, stop_ids, batch_rows, counts)
            for (dialogue, _), (prompt, answer) in zip(chunk, answered, strict=True):
                keeps = decoding.with_tokens or dialogue.item.conversation is None
                tokens = (prompt.tolist(), answer) if keeps else None
                reason = "stop" if answer[-1] in stop_ids else "length"
                line = answer_line(dialogue, reason, decoding, tokens, maker.tokenizer_id)
                lines.write(line)
                counts["answered"] += 1
                counts["unfinished"] += reason == "length"
                counts["inexact"] += not keeps and not reads_back(line, dialogue.item, [*prompt, *answer], maker)
            lines.sync()
    return GenerateReport(resumed=resumed, skipped=skips.counts, **counts)


def _answer(
    chunk: Sequence[tuple[Dialogue, IntArray]],
    target: Target,
    maker: SampleMaker,
    decoding: Decoding,
    stop_ids: frozenset[int],
    batch_rows: int,
    counts: dict[str, int],
) -> list[tuple[IntArray, list[int]]]:
    """Takes all dialogues of a chunk to their ends, turn by turn; the last prompt of each and its answer."""
    last: list[tuple[IntArray, list[int]]] = [(prompt, []) for _, prompt in chunk]
    going = list(range(len(chunk)))
    while going:
        answers = greedy_answers(
            target,
            [last[place][0] for place in going],
            max_new_tokens=decoding.max_new_tokens,
            stop_ids=stop_ids,
            batch_rows=batch_rows,
            sampling=decoding.sampling,
            seeds=[row_seed(decoding.sampling, chunk[place][0].number, chunk[place][0].answers) for place in going],
        )
        still = []
        for place, answer in zip(going, answers, strict=True):
            dialogue, prompt = chunk[place][0], last[place][0]
            last[place] = (prompt, answer)
            _take(dialogue, answer, maker, stop_ids)
            if not dialogue.open:
                continue
            try:
                last[place] = (prompt_ids(maker, dialogue, decoding), [])
                still.append(place)
            except SkipRow:
                dialogue.end()
                counts["shortened"] += 1
        going = still
    return last


def _take(dialogue: Dialogue, answer: list[int], maker: SampleMaker, stop_ids: frozenset[int]) -> None:
    cut = answer[-1] not in stop_ids
    if dialogue.item.conversation is None:
        dialogue.open = False
        return
    text = maker.tokenizer.decode(answer if cut else answer[:-1], skip_special_tokens=False)
    if cut:
        text = text.rstrip("\ufffd")  # a character of which the limit left only some bytes
    template, _ = maker.template(dialogue.item.source.thinking)
    dialogue.take(template.answer_message(dialogue.question, text, cut), cut)
