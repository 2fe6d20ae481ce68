"""The made-up largest block is as large as a run's blocks may get, and no larger."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from consumer.blocks import choose_anchors
from consumer.warm_up import largest_block
from protocol.plan import PlanParams


@given(st.integers(2, 300), st.integers(1, 5), st.integers(1, 40), st.integers(2, 16), st.integers(1, 20))
def test_it_reaches_the_bounds(longest: int, samples: int, anchors: int, block_size: int, blocks: int) -> None:
    plan = PlanParams(
        seed=0,
        epochs=1,
        batch_tokens=10_000,
        anchors=anchors,
        block_size=block_size,
        microbatch_tokens=longest * samples + 1,
        microbatch_draft_tokens=block_size * max(blocks, anchors),
        consumers=1,
    )
    block = largest_block(plan, longest, 8, torch.bfloat16, torch.device("cpu"))
    document, _ = choose_anchors(block.loss_mask, block.offsets, block.samples, anchors=plan.anchors, seed=0, epoch=0)
    assert block.features.shape == (longest * samples, 8)
    assert len(document) * block_size <= plan.microbatch_draft_tokens
    # Either bound is reached: that of the block, or that of each sample.
    reached = np.bincount(document, minlength=samples)
    most = min(anchors, longest - 1)
    assert len(document) * block_size == plan.microbatch_draft_tokens or (reached == most).all()
