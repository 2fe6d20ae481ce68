"""The teacher-forced walk: which drafts a greedy target would have accepted, read off its finished answers. Pure.

A greedy answer does not depend on the drafter, so walking over it gives exactly the accepted lengths of the online
draft-verify-commit loop (reference section 5.5), end handling included: the last block is shortened to the tokens
that the length limit leaves, and what is committed is clipped at the end token or the limit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.errors import RunError
from protocol.keyed import words

Int = NDArray[np.int64]
# (prompts [n], anchors [n] as positions in their rows, sizes [n] of the blocks) -> drafts int [n, B - 1]; drafts at
# and past `size - 1` are ignored.
Propose = Callable[[Int, Int, Int], NDArray[np.integer]]

RESAMPLES = 10_000
DEFINITION = (
    "mean over prompts of the mean number of tokens committed per target verification (accepted drafts + 1, the last "
    "block clipped at the end token or the length limit), greedy, teacher-forced on the target's own answers; "
    "interval: 95 % percentile bootstrap over prompts"
)


@dataclass(frozen=True)
class Answers:
    """n rows of prompt + greedy answer (end token included where there is one), concatenated.

    token_ids int [T]; offsets int64 [n + 1]; prompt_lengths int [n].
    """

    token_ids: NDArray[np.integer]
    offsets: Int
    prompt_lengths: NDArray[np.integer]


class Acceptance(msgspec.Struct, frozen=True):
    """Acceptance of one drafter on some prompts.

    lengths: tokens committed per verification, per prompt, in order. mean: the headline, see `definition`; interval:
    around it. token_weighted: all tokens over all verifications. per_position[k - 1]: share of drafts whose first k
    tokens were all accepted. prompts: those drafted for at least once; tokens: committed in those verifications.
    """

    lengths: tuple[tuple[int, ...], ...]
    mean: float
    interval: tuple[float, float]
    token_weighted: float
    per_position: tuple[float, ...]
    prompts: int
    tokens: int
    definition: str = DEFINITION


def walk(answers: Answers, propose: Propose, *, block_size: int, max_new_tokens: int, seed: int = 0) -> Acceptance:
    """Walk every row, one draft per round for each unfinished prompt.

    max_new_tokens: the limit the answers were made under; longer answers are walked up to it, as an online loop would.
    """
    starts = answers.offsets[:-1]
    prompt_lengths = answers.prompt_lengths.astype(np.int64)
    limits = prompt_lengths + max_new_tokens
    ends = np.minimum(np.diff(answers.offsets), limits)
    anchor = prompt_lengths.copy()
    lengths: list[list[int]] = [[] for _ in starts]
    runs: list[int] = []
    slots = np.arange(1, block_size)
    while (active := np.flatnonzero(anchor + 1 < ends)).size:
        at, end = anchor[active], ends[active]
        sizes = np.minimum(block_size, limits[active] - at)
        drafts = propose(active, at, sizes)
        known = (slots < sizes[:, None]) & (at[:, None] + slots < end[:, None])
        rows = np.where(known, starts[active, None] + at[:, None] + slots, 0)
        run = np.cumprod(known & (drafts == answers.token_ids[rows]), axis=1).sum(axis=1)
        committed = np.minimum(run + 1, end - at - 1)
        anchor[active] += committed
        runs += run.tolist()
        for prompt, length in zip(active.tolist(), committed.tolist(), strict=True):
            lengths[prompt].append(length)
    return _summary(lengths, runs, block_size, seed)


def per_prompt_means(acceptance: Acceptance) -> NDArray[np.float64]:
    """float64 [n]: mean committed tokens per verification of each prompt; NaN where nothing was drafted."""
    return np.array([sum(part) / len(part) if part else np.nan for part in acceptance.lengths])


def bootstrap_interval(values: NDArray[np.float64], seed: int, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `values` [n]; the same for the same seed on every machine."""
    picks = (words(RESAMPLES * len(values), seed) % np.uint64(len(values))).reshape(RESAMPLES, -1)
    means = values[picks.astype(np.int64)].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _summary(lengths: list[list[int]], runs: list[int], block_size: int, seed: int) -> Acceptance:
    drafted = [part for part in lengths if part]
    if not drafted:
        raise RunError("evaluation: no prompt has an answer of two tokens or more, so nothing can be drafted")
    means = np.array([sum(part) / len(part) for part in drafted])
    tokens = sum(map(sum, drafted))
    reached = np.array(runs)[:, None] >= np.arange(1, block_size)
    return Acceptance(
        lengths=tuple(map(tuple, lengths)),
        mean=float(means.mean()),
        interval=bootstrap_interval(means, seed),
        token_weighted=tokens / len(runs),
        per_position=tuple(reached.mean(axis=0).tolist()),
        prompts=len(drafted),
        tokens=tokens,
    )


def acceptance_row(found: Acceptance) -> dict[str, Any]:
    """The keys that `draftwire eval --json` and metrics.jsonl share."""
    return {
        "acceptance_mean": found.mean,
        "acceptance_token_weighted": found.token_weighted,
        "acceptance_per_position": list(found.per_position),
        "interval": list(found.interval),
        "prompts": found.prompts,
        "tokens": found.tokens,
    }
