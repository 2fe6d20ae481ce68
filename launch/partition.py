"""Into how large blocks a step is cut: the bounds that the configuration gives, or the largest that memory holds. Pure.

"auto" chooses from a short list that follows from the configuration alone, so that memory decides which entry it is and
nothing else: the same memory, or a little more or less of it, gives the same partition and with it the same bits. What
a checkpoint was trained with goes before what would be chosen anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from consumer.config import TrainConfig
from protocol.errors import RequestError

# Blocks of this many tokens keep a device busy; larger ones would only cost memory.
MOST_TOKENS = 4096
DRAFT_TOKENS_PER_TOKEN = 2
# Steps of the list: at least so many tokens, and at most so many entries.
STEP_TOKENS = 256
MOST_STEPS = 64


class Partition(msgspec.Struct, frozen=True):
    """The bounds of one block: its tokens and its draft tokens."""

    tokens: int
    draft_tokens: int

    def __str__(self) -> str:
        return f"train.microbatch_tokens = {self.tokens} and train.microbatch_draft_tokens = {self.draft_tokens}"


def partitions(train: TrainConfig, longest: int, block_size: int) -> list[Partition]:
    """All that this configuration allows, largest first; one where it gives both numbers.

    The smallest holds one sample of `longest` tokens with all its draft blocks, and no less. Raises RequestError for
    a bound below one longest sample.
    """
    asked, asked_draft = train.microbatch_tokens, train.microbatch_draft_tokens
    if asked != "auto" and asked < longest:
        raise RequestError(
            f"train.microbatch_tokens = {asked} is less than data.max_length = {longest}: a sample is "
            "never split, so raise the first or lower the second"
        )
    most = max(longest, min(train.batch_tokens, MOST_TOKENS)) if asked == "auto" else asked
    # An anchor needs a token behind it.
    one_sample = max(min(train.anchors, longest - 1), 1) * block_size
    default_draft = max(train.anchors * block_size, DRAFT_TOKENS_PER_TOKEN * most)
    found = [Partition(most, default_draft if asked_draft == "auto" else asked_draft)]
    step = max(STEP_TOKENS, -(-most // MOST_STEPS))
    for level in (most, *range((most - 1) // step * step, 0, -step), 0):
        # The tokens end at one longest sample; draft tokens go on to those of one.
        tokens = max(level, longest) if asked == "auto" else asked
        draft = max(DRAFT_TOKENS_PER_TOKEN * level, one_sample) if asked_draft == "auto" else asked_draft
        if (smaller := Partition(tokens, draft)) != found[-1]:
            found.append(smaller)
    return found


def kept(train: TrainConfig, recorded: Partition, smallest: Partition) -> Partition | None:
    """What a checkpoint was trained with, where the configuration leaves that open; None when it gives another number,
    or when samples or anchors are others, so that less than `smallest` was enough then."""
    asked = ((train.microbatch_tokens, recorded.tokens), (train.microbatch_draft_tokens, recorded.draft_tokens))
    if any(now not in ("auto", then) for now, then in asked):
        return None
    return recorded if recorded.tokens >= smallest.tokens and recorded.draft_tokens >= smallest.draft_tokens else None


def choose(
    allowed: Sequence[Partition], earlier: Partition | None, shortage: Callable[[Partition], str]
) -> tuple[Partition, str]:
    """The partition to train with, and a line for the user, "" when there is nothing to say.

    `allowed` is what `partitions` found, `earlier` what `kept` found of a checkpoint. `shortage` says what a partition
    lacks, "" when it fits. Where nothing fits it is the smallest: what is needed is an upper bound. Raises RequestError
    when `earlier` does not fit and another one might.
    """
    largest, smallest = allowed[0], allowed[-1]
    if len(allowed) == 1:
        return largest, ""
    fitting = next((each for each in allowed if not shortage(each)), None)
    if earlier is not None and (fitting or smallest) != earlier:
        if lacking := shortage(earlier):
            raise RequestError(
                f"train.microbatch_tokens: the checkpoint was trained with {earlier}, but {lacking}: free memory, or "
                f"set {fitting or smallest}: the same steps in other blocks, which changes rounding"
            )
        return earlier, f'"auto" stays what the checkpoint was trained with: {earlier}'
    if fitting is None:
        return (
            smallest,
            f"memory may run short, though blocks are as small as they can be ({smallest}): {shortage(smallest)}",
        )
    if fitting == largest:
        return largest, ""
    return fitting, f'"auto" means {fitting}, since with larger blocks {shortage(largest)}'
