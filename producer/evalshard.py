"""Writes `eval.safetensors`: held-out prompts, the target's own greedy answers and their features.

With it acceptance length is measured by consumers alone. A row is prompt + answer; its features come from one
right-padded prefill, never from decoding.

Tensors: `token_ids` int32 `[T]`, `offsets` int64 `[n + 1]`, `prompt_lengths` int32 `[n]`, `features`
`[T, taps x H]`. Metadata: `taps`, `prompt_ids` and `thinking` (JSON lists), `fingerprint`, `max_new_tokens`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from producer.config import DataConfig
from producer.dedup import Deduplicated, deduplicate, exchanges
from producer.forward import features_of
from producer.generate import greedy_answers
from producer.prepare import source_settings
from producer.rows import SkipRow, Skips
from producer.samples import Item, SampleMaker
from producer.taps import Taps
from producer.target import Target
from producer.target_io import save_atomically
from protocol.errors import RequestError
from protocol.keyed import choose

# The choice of prompts is the same in every run, whatever its seed, so that runs can be compared prompt by prompt.
_CHOICE_KEY = 42
# Raised whenever the same inputs would make another shard than before.
FORMAT = 1
_BATCH_ROWS = 8

Prompts = list[NDArray[np.int32]]


class HeldOut(NamedTuple):
    """Prompts, token ids int32 `[P]` each, and how each was asked: with thinking "on" or "off", or "" where the
    template knows no such switch."""

    prompts: Prompts
    thinking: list[str]


def held_out_prompts(
    data: DataConfig, maker: SampleMaker, prompts: int, say: Callable[[str], None] | None = None
) -> HeldOut:
    """Up to `prompts` prompts of `data.eval`, none of which training has seen.

    Raises RequestError when sources are configured but no prompt is left.
    """
    skips = Skips(data.strict)
    items: list[Item] = []
    ids: Prompts = []
    for item in maker.items(data.eval):
        try:
            if isinstance(item, tuple):
                raise item[1]
            ids.append(maker.prompt(item))
            items.append(item)
        except SkipRow as skip:
            skips.add((item[0] if isinstance(item, tuple) else item.row).place, skip)
    training = (
        exchange for item in maker.items(data.train) if not isinstance(item, tuple) for exchange in exchanges(item)
    )
    checked = deduplicate([exchanges(item)[-1] for item in items], training)
    if say is not None:
        say(describe(len(items), checked, skips))
    if not checked.kept:
        raise RequestError(f"data.eval: no held-out prompt is left: {describe(len(items), checked, skips)}")
    chosen = [checked.kept[place] for place in choose(len(checked.kept), prompts, _CHOICE_KEY)]
    return HeldOut([ids[place] for place in chosen], [maker.thinking(items[place]) for place in chosen])


def describe(read: int, checked: Deduplicated, skips: Skips) -> str:
    """One line that says what became of the held-out rows."""
    skipped = "".join(f", {count} skipped: {reason}" for reason, count in skips.counts.items())
    return (
        f"held-out prompts: {len(checked.kept)} of {read} are new ({checked.repeated} repeated, "
        f"{checked.prompt_in_training} prompts and {checked.answer_in_training} answers occur in training{skipped})"
    )


def shard_fingerprint(
    data: DataConfig, dataset: str, target: str, taps: Sequence[int], prompts: int, max_new_tokens: int
) -> str:
    """Names the content of a shard without reading a row: `dataset` and `target` are fingerprints.

    The training data counts because held-out prompts are chosen against it.
    """
    sources = [source_settings(source) for source in data.eval]
    parts = [FORMAT, sources, dataset, target, list(taps), prompts, max_new_tokens]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def write_eval_shard(
    path: Path,
    target: Target,
    tap_ids: Sequence[int],
    held_out: HeldOut,
    *,
    stop_ids: frozenset[int],
    max_new_tokens: int,
    fingerprint: str,
    say: Callable[[str], None] | None = None,
) -> int:
    """Answers the prompts, prefills prompt + answer in batches of eight rows and writes the shard in one rename.

    An answer ends with its end token, or after `max_new_tokens`. Answers of a single token leave nothing to draft and
    are left out. Returns the number of rows. Raises RequestError when no row is left.
    """

    def progress(done: int, total: int) -> None:
        if say is not None:
            say(f"evaluation answers: {done} of {total}")

    prompts = held_out.prompts
    if say is not None:
        say(f"the target answers {len(prompts)} held-out prompts, each with {max_new_tokens} tokens at most")
    answers = greedy_answers(target, prompts, max_new_tokens=max_new_tokens, stop_ids=stop_ids, progress=progress)
    usable = [place for place, answer in enumerate(answers) if len(answer) > 1]
    pairs = [(prompts[place], answers[place]) for place in usable]
    if not pairs:
        raise RequestError("data.eval: the target answers every held-out prompt with a single token; use other prompts")
    rows = [np.concatenate((prompt, np.asarray(answer, dtype=np.int32))) for prompt, answer in pairs]
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    width = len(tap_ids) * int(target.facts["hidden_size"])
    features = torch.empty((int(offsets[-1]), width), dtype=target.dtype)
    words = features.view(torch.uint16) if target.dtype == torch.bfloat16 else features
    if say is not None:
        say(f"computing the features of {len(rows)} prompts with their answers")
    with Taps(target.layers, tap_ids) as taps:
        for start in range(0, len(rows), _BATCH_ROWS):
            batch = rows[start : start + _BATCH_ROWS]
            features_of(target, taps, batch, words[offsets[start] : offsets[start + len(batch)]].numpy())
    tensors = {
        "token_ids": torch.from_numpy(np.concatenate(rows).astype(np.int32)),
        "offsets": torch.from_numpy(offsets),
        "prompt_lengths": torch.tensor([len(prompt) for prompt, _ in pairs], dtype=torch.int32),
        "features": features,
    }
    names = [hashlib.sha256(prompt.tobytes()).hexdigest()[:16] for prompt, _ in pairs]
    metadata = {
        "taps": json.dumps(list(tap_ids)),
        "prompt_ids": json.dumps(names),
        "thinking": json.dumps([held_out.thinking[place] for place in usable]),
        "fingerprint": fingerprint,
        "max_new_tokens": str(max_new_tokens),
    }
    save_atomically(path, tensors, metadata)
    return len(pairs)
