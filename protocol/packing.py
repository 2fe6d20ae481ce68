"""Cut one step into blocks of about equal cost, each inside two bounds. Pure integer arithmetic.

Cost model: `tokens + 12 x draft_tokens`. At the Qwen3-8B drafter shape a context token costs about 126 M
multiply-adds (fusing five taps, then keys and values of five layers) and a draft token about 1.55 G (five
layers and the head): a ratio of 12, which moves little with the target because both grow with hidden squared.
"""

from __future__ import annotations

import heapq

from msgspec import Struct

DRAFT_TOKEN_COST = 12


class Item(Struct, frozen=True):
    """One sample as packing sees it: its id, its tokens and the draft tokens that its anchors make."""

    sample: int
    tokens: int
    draft_tokens: int

    @property
    def cost(self) -> int:
        """Estimated cost of training on it, in units of one context token."""
        return self.tokens + DRAFT_TOKEN_COST * self.draft_tokens


class BlockSpec(Struct, frozen=True):
    """Block `index` of a step, for consumer `rank` as its `micro_step`; an empty one has weight zero.

    `samples` are dataset sample ids, longest first, then by id: the order in which they lie in the block.
    """

    step: int
    index: int
    rank: int
    micro_step: int
    samples: tuple[int, ...]
    tokens: int
    draft_tokens: int


def cut(step: int, items: list[Item], consumers: int, max_tokens: int, max_draft_tokens: int) -> list[BlockSpec]:
    """The k x `consumers` blocks of a step, in index order, with the smallest k whose partition fits both bounds.

    Every item must fit both bounds alone, so that one sample a block is a partition that always fits.
    """
    tokens = sum(item.tokens for item in items)
    draft_tokens = sum(item.draft_tokens for item in items)
    rounds = max(1, -(-tokens // (max_tokens * consumers)), -(-draft_tokens // (max_draft_tokens * consumers)))
    ordered = sorted(items, key=lambda item: (-item.cost, item.sample))
    while (bins := _partition(ordered, rounds * consumers, max_tokens, max_draft_tokens)) is None:
        rounds += 1
    bins.sort(key=lambda held: -sum(item.cost for item in held))
    return [_spec(step, index, consumers, bins[_snake(index, consumers)]) for index in range(rounds * consumers)]


def _partition(ordered: list[Item], count: int, max_tokens: int, max_draft_tokens: int) -> list[list[Item]] | None:
    """Longest processing time first into `count` bins: each item to the cheapest bin that it fits, ties by number.

    Returns None when an item fits no bin.
    """
    bins: list[list[Item]] = [[] for _ in range(count)]
    room = [(max_tokens, max_draft_tokens)] * count
    heap = [(0, number) for number in range(count)]
    for item in ordered:
        too_full: list[tuple[int, int]] = []
        while heap:
            cost, number = heapq.heappop(heap)
            tokens_left, draft_tokens_left = room[number]
            if item.tokens <= tokens_left and item.draft_tokens <= draft_tokens_left:
                break
            too_full.append((cost, number))
        else:
            return None
        bins[number].append(item)
        room[number] = (tokens_left - item.tokens, draft_tokens_left - item.draft_tokens)
        heapq.heappush(heap, (cost + item.cost, number))
        for entry in too_full:
            heapq.heappush(heap, entry)
    return bins


def _snake(index: int, consumers: int) -> int:
    """Which bin, counted from the dearest, becomes block `index`: left to right, then right to left.

    Blocks of one micro-step are then alike, and so are the sums over a rank's micro-steps.
    """
    micro_step, rank = divmod(index, consumers)
    return micro_step * consumers + (rank if micro_step % 2 == 0 else consumers - 1 - rank)


def _spec(step: int, index: int, consumers: int, held: list[Item]) -> BlockSpec:
    held = sorted(held, key=lambda item: (-item.tokens, item.sample))
    return BlockSpec(
        step=step,
        index=index,
        rank=index % consumers,
        micro_step=index // consumers,
        samples=tuple(item.sample for item in held),
        tokens=sum(item.tokens for item in held),
        draft_tokens=sum(item.draft_tokens for item in held),
    )
