"""Draft blocks of one StateBlock: which anchors, what goes in, what must come out. Pure numpy.

Slot 0 holds the real anchor token and has no loss; slots 1 .. B-1 hold the mask token and slot k is trained for the
token at the *same* position, anchor + k (reference section 0, fact 4): no shift by one.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.keyed import choose

Int = NDArray[np.int64]


@dataclass(frozen=True)
class DraftBlocks:
    """A draft blocks of B slots, ordered by document, then anchor.

    document int64 [A], anchor int64 [A] (position in the document), input_ids int32 [A, B], positions int32 [A, B],
    labels int32 [A, B] (-1 past the document's end), supervised bool [A, B]: slots that have a loss.
    """

    document: Int
    anchor: Int
    input_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    labels: NDArray[np.int32]
    supervised: NDArray[np.bool_]


def eligible_anchors(loss_mask: NDArray[np.generic]) -> Int:
    """Positions p of one document with loss_mask[p] and loss_mask[p + 1], ascending, int64."""
    on = loss_mask != 0
    return np.flatnonzero(on[:-1] & on[1:])


def choose_anchors(
    loss_mask: NDArray[np.generic],
    offsets: NDArray[np.integer],
    samples: NDArray[np.integer],
    *,
    anchors: int,
    seed: int,
    epoch: int,
    quarantined: Collection[int] = (),
) -> tuple[Int, Int]:
    """(document [A], anchor [A]): at most `anchors` per sample, drawn by (seed, epoch, sample id) alone.

    loss_mask [T]; offsets [n + 1]; samples [n] dataset ids. A quarantined sample gets none. So the draw does not
    depend on which samples travel together.
    """
    chosen = []
    for row, sample in enumerate(samples.tolist()):
        candidates = eligible_anchors(loss_mask[offsets[row] : offsets[row + 1]])
        if sample in quarantined:
            candidates = candidates[:0]
        chosen.append(candidates[choose(len(candidates), anchors, seed, epoch, sample)])
    document = np.repeat(np.arange(len(chosen), dtype=np.int64), [len(part) for part in chosen])
    return document, np.concatenate([np.empty(0, np.int64), *chosen])


def blocks_at(
    document: Int,
    anchor: Int,
    token_ids: NDArray[np.integer],
    loss_mask: NDArray[np.generic],
    offsets: NDArray[np.integer],
    *,
    block_size: int,
    mask_token_id: int,
) -> DraftBlocks:
    """The blocks at given anchors. A block may hang over its document's end: those slots have no loss."""
    positions = anchor[:, None] + np.arange(block_size)
    starts, stops = offsets[:-1].astype(np.int64)[document], offsets[1:].astype(np.int64)[document]
    rows = starts[:, None] + positions
    inside = rows < stops[:, None]
    safe = np.where(inside, rows, starts[:, None])
    labels = np.where(inside, token_ids[safe], -1).astype(np.int32)
    supervised = inside & (loss_mask[safe] != 0)
    supervised[:, :1] = False
    input_ids = np.full(positions.shape, mask_token_id, np.int32)
    input_ids[:, 0] = labels[:, 0]
    return DraftBlocks(document, anchor, input_ids, positions.astype(np.int32), labels, supervised)


def document_positions(offsets: NDArray[np.integer]) -> NDArray[np.int32]:
    """int32 [T]: each packed row's position in its own document."""
    lengths = np.diff(offsets)
    return (np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)).astype(np.int32)
