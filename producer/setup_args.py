"""What the set-up process is told; the launcher writes it, so there is no torch here."""

from __future__ import annotations

import msgspec

from producer.config import DataConfig, TargetConfig


class SetupArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ARGS.json holds. `device` is where the target runs for evaluation answers ("cpu", "cuda:0").

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
    device: str = "cpu"
    init_layers: int = 0
