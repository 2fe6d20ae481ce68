"""What the set-up process is told; the launcher writes it, so there is no torch here."""

from __future__ import annotations

import msgspec

from producer.config import DataConfig, TargetConfig
from protocol.plan import PlanParams


class Resumed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint folder that a run goes on from, and the plan that it is to go on with."""

    checkpoint: str
    plan: PlanParams


class PrepareArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `producer.prepare_alone` is told: the data, and the target whose tokens it becomes."""

    target_dir: str
    target: TargetConfig
    data: DataConfig
    dataset_dir: str


class SetupArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ARGS.json holds. `devices` is where the target runs for evaluation answers ("cpu", "cuda:0"), as many as
    target.tensor_parallel says.

    `resumed`: set when there is a checkpoint, whose steps the dataset must still have.
    `cache_dir`: a cache in which what needs the target is kept as well; `cached_only`: it must come from there.
    `init_layers`: how many of the target's last layers a drafter starts from (0: none, it starts at random).
    """

    target_dir: str
    target: TargetConfig
    data: DataConfig
    run_dir: str
    dataset_dir: str
    taps: tuple[int, ...]
    eval_prompts: int
    eval_max_new_tokens: int
    devices: tuple[str, ...] = ("cpu",)
    resumed: Resumed | None = None
    init_layers: int = 0
    cache_dir: str | None = None
    cached_only: bool = False
