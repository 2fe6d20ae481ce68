"""Progress as one plain line: both sides' rates, the ring, who waits, how it is going, how long still."""

from __future__ import annotations

from typing import Any

from protocol.units import show_seconds


def progress_line(state: dict[str, Any]) -> str:
    """`state` is a coordinator snapshot (launch/tally.py)."""
    ring = state["ring"]
    filled = ring["ready"] + ring["delivered"]
    parts = [f"step {state['step']}/{state['steps']}"]
    if state["loss"] is not None:
        parts.append(f"loss {state['loss']:.3f}")
        parts.append("accuracy " + " ".join(f"{share:.2f}" for share in state["accuracy"][:4]))
    if state["acceptance"] is not None:
        parts.append(f"acceptance {state['acceptance']:.2f}")
    parts += [
        _side(state, "producer", "produced"),
        _side(state, "consumer", "trained"),
        f"ring {filled} ready + {ring['leased']} filling of {state['ring_slots']}",
        f"waits: producer {state['producer_wait_share']:.0%} consumer {state['consumer_wait_share']:.0%}",
    ]
    if state["cache"] is not None:
        parts.append(f"cache {show_cache(state['cache'])}")
    for what in ("restarts", "quarantined", "skipped", "checkpoints_failed"):
        if state[what]:
            parts.append(f"{what.replace('_', ' ')} {state[what]}")
    if state["waiting"] is not None:
        parts.append(f"waiting for {state['waiting']}")
    parts.append(f"left {show_seconds(state['eta_s'])}" if state["eta_s"] is not None else "left: not known yet")
    return " | ".join(parts)


def show_cache(cache: dict[str, Any]) -> str:
    """What a spilling run has of its cache; `cache` is that of a snapshot."""
    parts = [f"{cache['held']:,} of {cache['samples']:,} samples held", f"{cache['replayed_tokens']:,} tokens read"]
    parts.append(f"{cache['kept']:,} samples kept" + (", nothing more is" if cache["full"] else ""))
    parts += [f"{cache[what]:,} {what.replace('_', ' ')}" for what in ("passed_over", "damaged") if cache[what]]
    return ", ".join(parts)


def _side(state: dict[str, Any], side: str, done: str) -> str:
    mfu = state[f"{side}_mfu"]
    rate = f"{state[f'{side}_tokens_per_s']:.0f} tok/s" + (f" (MFU {mfu:.0%})" if mfu is not None else "")
    return f"{done} {state[f'blocks_{done}']} blocks, {rate}"
