"""The cursor of a checkpoint: where training stands in the plan, and which samples are quarantined."""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.errors import RequestError
from protocol.plan import Plan


class Cursor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step boundary. `epoch` is that of `next_step`; after the last epoch's last step it is the number of epochs.

    `quarantined` maps sample ids, as JSON keys, to reasons. Everything from `next_step` on is planned without them.
    `microbatch_tokens` and `microbatch_draft_tokens` are the plan's bounds of a block; 0: not recorded.
    `trained_s` counts towards train.max_hours; from `cooldown_step` on the rate falls, if that was ordered.
    """

    epoch: int
    next_step: int
    plan_hash: str
    step_hash: str
    quarantined: dict[str, str] = {}
    samples_trained: int = 0
    tokens_trained: int = 0
    microbatch_tokens: int = 0
    microbatch_draft_tokens: int = 0
    trained_s: float = 0.0
    cooldown_step: int | None = None

    @property
    def quarantined_samples(self) -> dict[int, str]:
        """Sample id -> reason, as the ledger takes it."""
        return {int(sample): reason for sample, reason in self.quarantined.items()}


class Fit(msgspec.Struct, frozen=True):
    """How a cursor fits a plan: "exact"; "repartitioned" (same sample sets, other blocks: only rounding changes, count
    it as numerics_changed); or "refused", with a `reason` for the user."""

    verdict: Literal["exact", "repartitioned", "refused"]
    reason: str = ""


def cursor_at(
    plan: Plan,
    next_step: int,
    quarantined: dict[int, str],
    samples_trained: int,
    tokens_trained: int,
    trained_s: float = 0.0,
    cooldown_step: int | None = None,
) -> Cursor:
    """The cursor of a checkpoint taken before `next_step`, which may be the end of the plan."""
    return Cursor(
        epoch=plan.epoch_at(next_step),
        next_step=next_step,
        plan_hash=plan.hash,
        step_hash=plan.step_hash,
        quarantined={str(sample): quarantined[sample] for sample in sorted(quarantined)},
        samples_trained=samples_trained,
        tokens_trained=tokens_trained,
        microbatch_tokens=plan.params.microbatch_tokens,
        microbatch_draft_tokens=plan.params.microbatch_draft_tokens,
        trained_s=trained_s,
        cooldown_step=cooldown_step,
    )


def encode_cursor(cursor: Cursor) -> bytes:
    """JSON with one field a line, for cursor.json."""
    return msgspec.json.format(msgspec.json.encode(cursor), indent=2) + b"\n"


def decode_cursor(data: bytes, source: str) -> Cursor:
    """The cursor in `data`. Raises RequestError naming `source` when it is not one."""
    try:
        cursor = msgspec.json.decode(data, type=Cursor)
        if any(sample < 0 for sample in cursor.quarantined_samples) or min(cursor.epoch, cursor.next_step) < 0:
            raise ValueError("a sample, epoch or step is negative")
    except ValueError as error:  # msgspec's errors are ValueErrors too
        raise RequestError(f"{source} is not a cursor ({error}): resume from another checkpoint") from error
    return cursor


def fit(cursor: Cursor, plan: Plan) -> Fit:
    """Whether training can go on from `cursor` under `plan`."""
    if cursor.step_hash != plan.step_hash:
        what = "the dataset, train.seed or train.batch_tokens differs from the checkpoint's"
        return Fit("refused", f"{what}, so its steps are others: restore them, or start another run with --fork")
    if cursor.next_step > plan.total_steps:
        ends = f"the checkpoint is at step {cursor.next_step} and the plan ends at step {plan.total_steps}"
        return Fit("refused", f"{ends}: raise train.epochs or train.max_steps")
    unknown = [sample for sample in cursor.quarantined_samples if sample >= plan.total_samples]
    if cursor.epoch != plan.epoch_at(cursor.next_step) or unknown:
        return Fit("refused", "the cursor contradicts the plan that it names: resume from another checkpoint")
    if cursor.plan_hash != plan.hash:
        return Fit("repartitioned", "other consumers, anchors or micro-batch bounds: the same steps in other blocks")
    return Fit("exact")


def check_fit(checkpoint: str, cursor: Cursor, plan: Plan) -> str:
    """What changes when `checkpoint`, which stands at `cursor`, goes on with `plan`; "" when nothing does. Raises
    RequestError when it cannot go on with it."""
    found = fit(cursor, plan)
    if found.verdict == "refused":
        raise RequestError(f"{checkpoint}: {found.reason}")
    return found.reason
