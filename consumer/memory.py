"""What a rank says when its device has no room left: the same block would not fit the next time either."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from protocol.errors import FinalError
from protocol.plan import PlanParams


@contextmanager
def saying_what_to_lower(plan: PlanParams) -> Iterator[None]:
    """Turns a device's want of memory into a FinalError that names the keys which decide how much is needed."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first_line = str(error).partition("\n")[0].partition(". ")[0]
        raise FinalError(
            f"out of memory with blocks of up to {plan.microbatch_tokens} tokens and {plan.microbatch_draft_tokens} "
            f"draft tokens: lower train.microbatch_tokens (now {plan.microbatch_tokens}), "
            f"train.microbatch_draft_tokens (now {plan.microbatch_draft_tokens}) or train.anchors (now {plan.anchors}) "
            f"and go on with --resume; {first_line}"
        ) from error
