"""What a StateBlock is trained on: its draft blocks, and the context that they can see. Pure numpy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from consumer.attention import Layout
from consumer.blocks import DraftBlocks, blocks_at, choose_anchors, document_positions


class Arranged(NamedTuple):
    """`layout` is of the context that is left: `rows` int64 [T'] of the block's T, at `positions` int32 [T'] in their
    documents. Rows from a document's last anchor on, and documents without one, are left out: nobody sees them."""

    drafts: DraftBlocks
    layout: Layout
    rows: NDArray[np.int64]
    positions: NDArray[np.int32]


def arrange(
    token_ids: NDArray[np.int32],
    loss_mask: NDArray[np.uint8],
    offsets: NDArray[np.int32],
    samples: NDArray[np.int64],
    *,
    anchors: int,
    seed: int,
    epoch: int,
    block_size: int,
    mask_token_id: int,
) -> Arranged:
    """token_ids, loss_mask [T]; offsets [n + 1]; samples [n] dataset ids; at most `anchors` draft blocks a sample."""
    document, anchor = choose_anchors(loss_mask, offsets, samples, anchors=anchors, seed=seed, epoch=epoch)
    drafts = blocks_at(
        document, anchor, token_ids, loss_mask, offsets, block_size=block_size, mask_token_id=mask_token_id
    )
    reach = np.zeros(len(samples), np.int64)
    np.maximum.at(reach, document, anchor)
    borders = np.concatenate([[0], np.cumsum(reach)])
    positions = document_positions(borders)
    rows = np.repeat(offsets[:-1].astype(np.int64), reach) + positions
    return Arranged(drafts, Layout(borders, document, anchor), rows, positions)
