"""The text of a first configuration: every key that is worth a thought, and why it has its value. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from launch.config import Config
from launch.fitting import Fitted
from launch.placement import Placement
from producer.config import SourceConfig
from protocol.units import show_bytes


def config_text(config: Config, plan: Fitted, facts: Mapping[str, Any]) -> str:
    """TOML that reads back as `config`."""
    found = plan.found
    sections = [
        ["# Every key: docs/configuration.md. What it will cost: draftwire plan THIS_FILE"],
        ["[run]", 'dir = "runs" # run folders, token datasets, checkpoints'],
        _target(config, plan, facts),
        _data(config),
        _drafter(config, facts),
        _train(config, plan),
        [
            "[ring]",
            f"# {found.ring.slots} slots of {show_bytes(found.ring.slot_bytes)}, {show_bytes(found.ring.total_bytes)} "
            "in all: four for each process, at most half of the free memory.",
            f"bytes = {_toml(config.ring.bytes)}",
        ],
        [
            "[gpus]",
            *_placed(found.placement, plan),
            f"split = {_toml(config.gpus.split)}",
        ],
        [
            "[eval]",
            f"every = {config.eval.every} # steps; 0: only before and after training",
            f"prompts = {config.eval.prompts}",
            f"max_new_tokens = {config.eval.max_new_tokens}",
        ],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _target(config: Config, plan: Fitted, facts: Mapping[str, Any]) -> list[str]:
    found = plan.found
    size = show_bytes(found.producer_need.held)
    return [
        "[target]",
        f"# {facts['num_layers']} layers of {facts['hidden_size']}, {facts['vocab_size']} tokens; {size} of weights in "
        f"{found.dtype}.",
        f"model = {_toml(config.target.model)}",
        f"dtype = {_toml(config.target.dtype)} # as stored: features must be those that a server computes",
    ]


def _data(config: Config) -> list[str]:
    lines = [
        "[data]",
        "# Best are the target's own answers: draftwire generate THIS_FILE answers.jsonl",
        f"train = {_paths(config.data.train)}",
    ]
    if config.data.eval:
        lines += ["# Held-out prompts, which the target answers itself.", f"eval = {_paths(config.data.eval)}"]
    else:
        lines += [
            "# Without held-out prompts acceptance length is not measured.",
            '# eval = [{ path = "held_out.jsonl" }]',
        ]
    longest = config.data.max_length
    return [*lines, f"max_length = {longest} # tokens; a longer sample keeps its beginning"]


def _drafter(config: Config, facts: Mapping[str, Any]) -> list[str]:
    drafter = config.drafter
    layers = facts["num_layers"]
    taps = list(drafter.taps) if isinstance(drafter.taps, tuple) else []
    lines = [
        "[drafter]",
        f'# What taps = "auto" is for {layers} layers: from the second to the third-last one, evenly.',
        f"taps = {taps}",
        f"layers = {drafter.layers}",
        f"block_size = {drafter.block_size} # the anchor and {drafter.block_size - 1} drafted tokens",
    ]
    its = f"{facts['num_attention_heads']} of {facts['head_dim']}, {facts['num_key_value_heads']} for keys and values"
    if drafter.heads is None:
        return [*lines, f"# Heads and MLP are the target's: {its}, {facts['intermediate_size']}."]
    return [
        *lines,
        f"# The heads of the published drafters; the target's own are {its}. The MLP is the target's.",
        *(f"{name} = {getattr(drafter, name)}" for name in ("heads", "kv_heads", "head_dim")),
    ]


def _train(config: Config, plan: Fitted) -> list[str]:
    train, partition = config.train, plan.found.partition
    return [
        "[train]",
        "# DFlash's published recipe: six epochs, AdamW with this rate, cosine.",
        f"epochs = {train.epochs}",
        f"lr = {train.lr}",
        f"batch_tokens = {train.batch_tokens} # of one optimiser step",
        f"anchors = {train.anchors} # draft blocks of one sample in one epoch, at most",
        f'# "auto" is {partition.tokens} tokens and {partition.draft_tokens} draft tokens on this machine.',
        f"microbatch_tokens = {_toml(train.microbatch_tokens)}",
        f"microbatch_draft_tokens = {_toml(train.microbatch_draft_tokens)}",
        f"checkpoint_every = {train.checkpoint_every} # steps; a crash costs what was trained since",
    ]


def _placed(placement: Placement, plan: Fitted) -> list[str]:
    found = plan.found
    producer, consumer = show_bytes(found.producer_need.total), show_bytes(found.consumer_need.total)
    names = sorted({gpu.name for gpu in plan.site.gpus})
    where = f"{len(plan.site.gpus)} x {', '.join(names)}" if names else "no GPU: both roles on the CPU"
    lines = [f"# {where}. A producer needs {producer} of memory at most, a consumer {consumer}."]
    if len({*placement.producers, *placement.consumers}) > 2:
        lines.append(
            "# PRODUCERS:CONSUMERS, reckoned from the cards' peaks. Whoever waits in the live view has too many."
        )
    return lines + [f"# {note}" for note in plan.notes]


def _paths(sources: list[SourceConfig]) -> str:
    return "[" + ", ".join(f"{{ path = {_toml(source.path)} }}" for source in sources) + "]"


def _toml(value: str | int) -> str:
    return json.dumps(value, ensure_ascii=False)
