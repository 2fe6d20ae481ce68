"""A training step on a GPU is the one of a CPU: compiled, with attention in one kernel, blocks fetched by DMA."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from consumer.config import TrainConfig
from consumer.drafter import Drafter, initialise
from consumer.feed import DeviceBlock
from consumer.gpu_step import masks_for
from consumer.loss import _to_residual
from consumer.prefetch import DevicePrefetch, pinned_ring
from consumer.shape import DrafterShape
from consumer.trainer import Trainer
from consumer.warm_up import largest_block
from protocol.arena import Arena, create_arena
from protocol.block import checksum
from protocol.plan import PlanParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
BLOCK, VOCABULARY, TOKENS, DRAFT_TOKENS = 6, 1000, 500, 600
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def make_shape(layer_types: tuple[str, ...], window: int | None) -> DrafterShape:
    return DrafterShape(
        hidden_size=64,
        target_layer_ids=(0, 1),
        num_layers=len(layer_types),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        block_size=BLOCK,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        vocab_size=VOCABULARY,
        mask_token_id=3,
        layer_types=layer_types,
        sliding_window=window,
        is_causal=None,
        num_target_layers=4,
        max_position_embeddings=4096,
        eos_token_ids=(2,),
        pad_token_id=None,
        bos_token_id=None,
        input_embedding_scale=1.0,
    )


def make_block(lengths: tuple[int, ...], prompt: int, device: torch.device) -> DeviceBlock:
    draw = np.random.default_rng(sum(lengths))
    total = sum(lengths)
    masks = [np.arange(length) >= min(prompt, length - 1) for length in lengths]
    return DeviceBlock(
        step=0,
        micro_step=0,
        micro_steps=1,
        epoch=0,
        samples=np.arange(len(lengths), dtype=np.int64),
        token_ids=draw.integers(4, VOCABULARY, total).astype(np.int32),
        loss_mask=np.concatenate(masks).astype(np.uint8),
        offsets=np.cumsum([0, *lengths]).astype(np.int32),
        features=torch.from_numpy(draw.standard_normal((total, 128))).float().to(device),
    )


def steps(shape: DrafterShape, config: TrainConfig, dtype: torch.dtype, device: torch.device) -> tuple[list, list]:
    """Losses and norms of a few steps, one of several micro-steps, and the weights after them."""
    generator = torch.Generator().manual_seed(1)
    ends = [torch.randn(VOCABULARY, 64, generator=generator).to(device, dtype) for _ in range(2)]
    drafter = Drafter(shape, dtype).to(device)
    initialise(drafter, 0)
    trainer = Trainer(drafter, ends[0], ends[1], config, 10, masks_for(drafter, TOKENS, DRAFT_TOKENS))
    found = []
    blocks = [[((300, 2, 90), 20)], [((41,), 3), ((9, 8), 30), ((500,), 0)], [((1, 2), 0)], [((333, 50), 300)]]
    for step, micro_steps in enumerate(blocks):
        for lengths, prompt in micro_steps:
            trainer.micro_step(make_block(lengths, prompt, device))
        result = trainer.finish_step(step).result()
        found.append((result.loss, result.grad_norm, result.anchors, result.skipped))
    return found, [parameter.detach().cpu() for parameter in drafter.parameters()]


@pytest.mark.parametrize("loss", ["ce", "dpace"])
@pytest.mark.parametrize("window", [None, 40])
def test_steps_equal_those_of_the_cpu(loss, window):
    kinds = ("full_attention", "full_attention") if window is None else ("sliding_attention", "full_attention")
    config = TrainConfig(anchors=30, lr=1e-3, loss=loss, precision="fp32")
    (on_cpu, weights), (on_gpu, found) = (
        steps(make_shape(kinds, window), config, torch.float32, device) for device in (CPU, GPU)
    )
    for expected, got in zip(on_cpu, on_gpu, strict=True):
        assert got[2:] == expected[2:]
        np.testing.assert_allclose(got[:2], expected[:2], rtol=1e-4)
    for expected, got in zip(weights, found, strict=True):
        assert float((expected - got).norm() / expected.norm()) <= 1e-4


def test_steps_in_bfloat16_are_near_those_in_float32():
    shape = make_shape(("full_attention", "sliding_attention"), 40)
    config = TrainConfig(anchors=30, lr=1e-3)
    exact, rounded = (steps(shape, config, dtype, GPU)[0] for dtype in (torch.float32, torch.bfloat16))
    np.testing.assert_allclose([loss for loss, *_ in rounded], [loss for loss, *_ in exact], rtol=2e-2)


def test_nothing_is_compiled_after_the_largest_block():
    """Shared case N6: 60 blocks of as many lengths, and the optimiser holds the drafter's tensors and no others."""
    shape = make_shape(("full_attention", "sliding_attention"), 40)
    drafter = Drafter(shape, torch.bfloat16).to(GPU)
    initialise(drafter, 0)
    ends = [torch.randn(VOCABULARY, 64, device=GPU).bfloat16() for _ in range(2)]
    trainer = Trainer(drafter, *ends, TrainConfig(anchors=30), 10, masks_for(drafter, TOKENS, DRAFT_TOKENS))
    plan = PlanParams(
        seed=0, epochs=1, batch_tokens=TOKENS, anchors=30, block_size=BLOCK, microbatch_tokens=TOKENS,
        microbatch_draft_tokens=DRAFT_TOKENS, consumers=1,
    )  # fmt: skip
    before = [parameter.detach().clone() for parameter in drafter.parameters()]
    trainer.warm_up(largest_block(plan, 250, 128, torch.float32, GPU))
    assert all(torch.equal(a, b) for a, b in zip(before, drafter.parameters(), strict=True))
    assert set(trainer.optimiser.state) == set(drafter.parameters())
    for length in (2, 3, 70):  # one row, and few
        trainer.micro_step(make_block((length,), 0, GPU))
    torch._dynamo.utils.counters.clear()
    for length in range(5, 305, 5):
        trainer.micro_step(make_block((length, 40), 10, GPU))
        trainer.finish_step(0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_logits_become_loss_and_gradient_as_on_a_cpu():
    from consumer.residual import to_residual

    logits = torch.randn(40, 9001, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = logits.argmax(dim=1)
    logits[1, 8000] = logits[1].max()  # a tie: the first counts
    labels[5:] = torch.arange(5, 40)
    on_gpu, correct_gpu = logits.cuda(), torch.empty(40, dtype=torch.bool, device=GPU)
    ce_gpu = to_residual(on_gpu, labels.cuda(), correct_gpu)
    correct = torch.empty(40, dtype=torch.bool)
    ce = _to_residual(logits, labels, correct, torch.empty(7, 9001))
    torch.testing.assert_close(ce_gpu.cpu(), ce, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(on_gpu.cpu(), logits, rtol=1e-2, atol=1e-6)
    assert torch.equal(correct_gpu.cpu(), correct)
    poisoned = torch.zeros(2, 50, device=GPU)
    poisoned[1, 30] = float("nan")
    assert to_residual(poisoned, torch.zeros(2, dtype=torch.int64, device=GPU), correct_gpu[:2]).isnan().tolist() == [
        False,
        True,
    ]


@pytest.mark.parametrize(("tokens", "width", "dtype"), [(100, 64, "bfloat16"), (33, 6, "bfloat16"), (0, 8, "float32")])
def test_blocks_arrive_by_dma_and_add_up(tokens, width, dtype):
    carrier = np.uint16 if dtype == "bfloat16" else np.float32
    features = np.random.default_rng(0).integers(0, 2**15, (tokens, width)).astype(carrier)
    fd = create_arena(2, 1 << 16, 1 << 30)
    arena = Arena(fd, 2, 1 << 16)
    os.close(fd)
    arena.slot(1)[: features.nbytes] = features.tobytes()
    in_slot = np.frombuffer(arena.slot(1), carrier, features.size).reshape(features.shape)
    prefetch = DevicePrefetch(GPU)
    with pinned_ring(arena, GPU):
        with prefetch.here():
            found, total = prefetch.bring(in_slot, getattr(torch, dtype))
        prefetch.hand_over(found)
        assert total == checksum(features)
        assert found.cpu().view(torch.uint8).numpy().tobytes() == features.tobytes()
