"""`draftwire init`: a first configuration for a target and a machine, checked as `plan` would before it is written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from consumer.config import DrafterConfig, EvalConfig, TrainConfig
from consumer.shape import resolve_shape
from launch.config import Config
from launch.corpus import given
from launch.fitting import Fitted, fitted, measured_target
from launch.hours import forward_flop, hours
from launch.init_text import config_text
from launch.machine import Gpu
from launch.placement import GpusConfig
from launch.site import UNBOUNDED_BYTES, Site, site_of
from producer.config import EMBEDDED, DataConfig, SourceConfig, TargetConfig
from producer.locate import locate_target, read_config, read_target_facts
from protocol.errors import RequestError

Say = Callable[[str], None]
# The published drafters for targets from 4B to 35B all have these heads, whatever the target's are.
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LARGE_HIDDEN = 2048
SMALL_HIDDEN = 1024
# For the split: chat with answers of some length, of which most are supervised.
TYPICAL_TOKENS = 800


def write_config(
    model: str,
    out: Path | None,
    train: Sequence[str],
    held_out: Sequence[str],
    gpu: str | None,
    gpus: int | None,
    say: Say,
) -> tuple[Path, Fitted]:
    """Writes the configuration and returns where it is and what it comes to. Raises RequestError for a target or a
    machine that cannot work, and for a file that is there already."""
    out = out or Path(f"{_plain(model)}.toml")
    if out.exists():
        raise RequestError(f"{out} is there already; name another file with --out")
    site = _site(gpu, gpus)
    target = TargetConfig(model=str(Path(model).expanduser().resolve()) if Path(model).expanduser().is_dir() else model)
    folder = locate_target(target, say, with_weights=False)
    facts = read_target_facts(folder)
    config = first_config(target, facts, _sources(train or ["train.jsonl"], out), _sources(held_out, out))
    measured = measured_target(config, folder, facts)
    splits = _splits(len(site.gpus))
    config = min(
        (msgspec.structs.replace(config, gpus=GpusConfig(split=split)) for split in splits),
        key=lambda candidate: _cost(candidate, folder, facts, site),
    )
    plan = fitted(config, measured, site)
    text = config_text(config, plan, facts)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with out.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise RequestError(f"{out} is there already; name another file with --out") from None
    return out, plan


def first_config(
    target: TargetConfig, facts: dict[str, Any], train: list[SourceConfig], held_out: list[SourceConfig]
) -> Config:
    """DFlash's published recipe for this target; smaller for small targets. The split is left open. Raises
    RequestError for a target that is too shallow."""
    small = facts["hidden_size"] < SMALL_HIDDEN
    # Heads of another width than the usual one are the target's own affair.
    drafter = DrafterConfig(layers=4 if small else 5, block_size=8 if small else 16)
    if facts["hidden_size"] >= LARGE_HIDDEN and facts["head_dim"] != HEAD_DIM:
        drafter = msgspec.structs.replace(drafter, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    taps = resolve_shape(drafter, facts, range(facts["vocab_size"])).target_layer_ids
    return Config(
        target=target,
        data=DataConfig(train=train, eval=held_out, max_length=min(3072, facts["max_position_embeddings"])),
        drafter=msgspec.structs.replace(drafter, taps=taps),
        train=TrainConfig(epochs=6),
        eval=EvalConfig(every=1000),
    )


def _site(gpu: str | None, gpus: int | None) -> Site:
    if gpu is not None:
        return site_of(gpu, gpus, None, GpusConfig())
    here = site_of(None, None, None, GpusConfig())
    if gpus is None or (here.gpus and gpus == len(here.gpus)):
        return here
    if gpus < 0 or gpus > 64 or (here.gpus and gpus > len(here.gpus)):
        seen = f"{len(here.gpus)} are visible; " if here.gpus else ""
        raise RequestError(f"--gpus {gpus}: {seen}name cards of another machine with --gpu (h200, h100-80, ...)")
    unknown = (Gpu("GPU of unknown memory", UNBOUNDED_BYTES, UNBOUNDED_BYTES),) * gpus
    return msgspec.structs.replace(here, gpus=here.gpus[:gpus] or unknown, here=bool(here.gpus) or not gpus)


def _splits(gpus: int) -> list[str]:
    if gpus < 2:
        return ["shared" if gpus else "1:1"]
    return [f"{producers}:{gpus - producers}" for producers in range(1, gpus)]


def _cost(config: Config, folder: Path, facts: dict[str, Any], site: Site) -> tuple[float, int]:
    """Hours of the slower side on typical chat, for what is known of cards and target; else, the most even split."""
    shape = resolve_shape(config.drafter, facts, range(facts["vocab_size"]))
    counts = [int(count) for count in config.gpus.split.split(":")] if ":" in config.gpus.split else [1, 1]
    found = None
    if site.gpus:
        forward = forward_flop(facts, read_config(folder), max(shape.target_layer_ids), TYPICAL_TOKENS / 2)
        sides = (site.gpus[:1] * counts[0], site.gpus[:1] * counts[1])
        corpus = given(1000, min(TYPICAL_TOKENS, config.data.limit or TYPICAL_TOKENS))
        found = hours(corpus, 1, forward, shape, config.train.anchors, *sides, False)
    return (found.total if found else 0.0), abs(2 * counts[0] - sum(counts) + sum(counts) % 2)


def _sources(paths: Sequence[str], out: Path) -> list[SourceConfig]:
    """Paths as the command was given them, rewritten to be relative to the config file's folder."""
    folder = out.resolve().parent
    return [SourceConfig(path=path if not Path(path).exists() else _relative(Path(path), folder)) for path in paths]


def _relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path.resolve(), folder)


def _plain(model: str) -> str:
    name = model if model == EMBEDDED else Path(model).name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.").lower() or "run"
