"""Which samples of a block run together in one padded pass. Pure: a function of lengths and of the target's shape.

Padding is wasted arithmetic, and every pass costs the launches of its kernels. On a GPU a pass over few tokens takes as
long as its launches do, so there padding is free up to some tokens; a large target reaches that point with a few
hundred, a small one only with tens of thousands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# A sample joins a batch only if it is at least this long relative to the batch's longest. Padding is then a few percent
# of the work; finer batches would cost more in calls than they save.
SHORTEST_SHARE = 0.85
# What a GPU computes while one decoder layer is launched: about a millisecond, measured with SmolLM2-135M on an H200,
# at half of what small products reach there.
LAUNCH_FLOP = 2e11


def launch_bound_tokens(facts: Mapping[str, Any]) -> int:
    """Tokens whose arithmetic in a decoder layer hides behind its launches; `facts` as `read_target_facts` has them."""
    hidden, dim = facts["hidden_size"], facts["head_dim"]
    attention = hidden * dim * 2 * (facts["num_attention_heads"] + facts["num_key_value_heads"])
    return int(LAUNCH_FLOP / (2 * (attention + 3 * hidden * facts["intermediate_size"])))


def batches(lengths: Sequence[int], free_tokens: int = 0) -> list[list[int]]:
    """Places of samples, grouped into batches of similar length, longest first.

    A batch of at most `free_tokens` tokens, padding counted, takes any length.
    """
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (lengths[place] >= SHORTEST_SHARE * longest or (len(groups[-1]) + 1) * longest <= free_tokens):
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups
