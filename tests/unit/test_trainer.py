"""The optimiser step: any cut into micro-steps is the same step, and nothing unsound reaches the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from consumer import trainer as trainer_module
from consumer.config import TrainConfig
from consumer.feed import DeviceBlock
from consumer.trainer import Trainer

LENGTHS = (9, 14, 3, 11)
EMBEDDING = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
HEAD = torch.randn(40, 16, generator=torch.Generator().manual_seed(2))
CONFIG = TrainConfig(anchors=4, lr=1e-2, warmup=0.0, precision="fp32", grad_clip=1e9)


def block(samples: Sequence[int], prompt: int = 2, mask: int = 1) -> DeviceBlock:
    """The samples with these ids; each has its own tokens and features whatever block it is in."""
    lengths = [LENGTHS[sample] for sample in samples]
    draws = [np.random.default_rng(sample) for sample in samples]
    tokens = [draw.integers(1, 39, length) for draw, length in zip(draws, lengths, strict=True)]
    features = [draw.standard_normal((length, 32)) for draw, length in zip(draws, lengths, strict=True)]
    masks = [np.arange(length) >= prompt for length in lengths]
    return DeviceBlock(
        step=0,
        micro_step=0,
        micro_steps=1,
        epoch=0,
        samples=np.array(samples, np.int64),
        token_ids=np.concatenate([np.empty(0), *tokens]).astype(np.int32),
        loss_mask=np.concatenate([np.empty(0), *masks]).astype(np.uint8) * np.uint8(mask),
        offsets=np.cumsum([0, *lengths]).astype(np.int32),
        features=torch.from_numpy(np.concatenate([np.empty((0, 32)), *features])).float(),
    )


@pytest.fixture
def make_trainer(make_drafter: Callable[..., Any]) -> Callable[..., Trainer]:
    def make(config: TrainConfig = CONFIG, total_steps: int = 10, dtype: str = "float32") -> Trainer:
        return Trainer(make_drafter(3, dtype), EMBEDDING, HEAD, config, total_steps)

    return make


def gradients(trainer: Trainer) -> list[Tensor]:
    return [parameter.grad for parameter in trainer.drafter.parameters() if parameter.grad is not None]


def weights(trainer: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.drafter.parameters()]


def assert_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("parts", [[(0, 1), (2, 3)], [(0,), (1,), (2,), (3,)], [(1,), (0, 2, 3)], [(0, 1, 2, 3), ()]])
def test_the_cut_into_micro_steps_does_not_matter(
    make_trainer: Callable[..., Trainer], parts: list[tuple[int, ...]]
) -> None:
    whole, cut = make_trainer(), make_trainer()
    whole.micro_step(block((0, 1, 2, 3)))
    for part in parts:
        cut.micro_step(block(part))
    assert len(gradients(whole)) == len(list(whole.drafter.parameters()))
    for one, other in zip(gradients(whole), gradients(cut), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    first, second = whole.finish_step(0).result(), cut.finish_step(0).result()
    assert second.loss == pytest.approx(first.loss, rel=1e-5)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    assert (second.anchors, second.samples, second.tokens) == (first.anchors, first.samples, first.tokens)
    assert (first.samples, first.tokens, first.skipped) == (4, sum(LENGTHS), False)
    assert first.anchors == 4 + 4 + 0 + 4  # the sample of three tokens has one supervised one
    assert second.accuracy == pytest.approx(first.accuracy)
    for one, other in zip(weights(whole), weights(cut), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5)


def test_a_block_that_counts_twice_changes_neither_loss_nor_gradient(make_trainer: Callable[..., Trainer]) -> None:
    once, twice = make_trainer(), make_trainer()
    once.micro_step(block((0, 1)))
    for _ in range(2):
        twice.micro_step(block((0, 1)))
    first, second = once.finish_step(0).result(), twice.finish_step(0).result()
    assert second.loss == pytest.approx(first.loss, rel=1e-5)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)


def test_a_step_trains_every_parameter_and_starts_the_next_from_nothing(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer()
    before = weights(trainer)
    trainer.micro_step(block((0, 1)))
    first = trainer.finish_step(0).result()
    assert all(not torch.equal(old, new) for old, new in zip(before, weights(trainer), strict=True))
    assert gradients(trainer) == []
    trainer.micro_step(block((0, 1)))
    second = trainer.finish_step(1).result()
    assert (second.samples, second.tokens) == (first.samples, first.tokens)
    assert second.loss < first.loss
    assert second.lr < first.lr == CONFIG.lr


def test_the_optimiser_holds_the_drafter_s_tensors_only(make_trainer: Callable[..., Trainer]) -> None:
    """N6: the target's embedding and head are neither trained nor given moments."""
    trainer = make_trainer()
    trainer.micro_step(block((0, 1)))
    trainer.finish_step(0)
    held = [tensor for group in trainer.optimiser.param_groups for tensor in group["params"]]
    assert {tensor.data_ptr() for tensor in held} == {tensor.data_ptr() for tensor in trainer.drafter.parameters()}
    assert not {tensor.data_ptr() for tensor in held} & {EMBEDDING.data_ptr(), HEAD.data_ptr()}
    assert not EMBEDDING.requires_grad
    assert not HEAD.requires_grad


def test_the_loss_of_a_block_falls_when_it_is_learned(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(total_steps=40)
    losses = []
    for step in range(40):
        trainer.micro_step(block((0, 1, 3)))
        losses.append(trainer.finish_step(step).result().loss)
    assert losses[-1] < 0.5 * losses[0]


def test_gradients_are_clipped_after_they_are_divided(make_trainer: Callable[..., Trainer]) -> None:
    """AdamW's first moment is (1 - beta1) x gradient, so it tells what was applied."""
    trainer = make_trainer(TrainConfig(anchors=4, lr=1e-2, warmup=0.0, grad_clip=1e-3))
    trainer.micro_step(block((0, 1)))
    assert trainer.finish_step(0).result().grad_norm > 1e-3
    moments = [trainer.optimiser.state[parameter]["exp_avg"] for parameter in trainer.drafter.parameters()]
    norm = torch.stack([moment.square().sum() for moment in moments]).sum().sqrt() / 0.1
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_changes_no_weight(make_trainer: Callable[..., Trainer], poison: float) -> None:
    """N2: nor any moment, and the next step goes on."""
    trainer = make_trainer()
    trainer.micro_step(block((0, 1)))
    trainer.finish_step(0).result()
    before = weights(trainer)
    state = {key: value.clone() for key, value in trainer.optimiser.state[trainer.drafter.fc.weight].items()}
    trainer.micro_step(block((0, 1)))
    gradients(trainer)[0].view(-1)[3] = poison
    result = trainer.finish_step(1).result()
    assert result.skipped
    assert result.row()["skipped"] is True
    assert_same(before, weights(trainer))
    assert all(torch.equal(state[key], trainer.optimiser.state[trainer.drafter.fc.weight][key]) for key in state)
    trainer.micro_step(block((0, 1)))
    after = trainer.finish_step(2).result()
    assert not after.skipped
    assert all(torch.isfinite(weight).all() for weight in weights(trainer))


def test_a_loss_that_is_not_finite_changes_no_weight(make_trainer: Callable[..., Trainer]) -> None:
    """N2."""
    trainer = make_trainer()
    before = weights(trainer)
    poisoned = block((0, 1))
    poisoned.features[2, 5] = torch.nan
    trainer.micro_step(poisoned)
    assert trainer.finish_step(0).result().skipped
    assert_same(before, weights(trainer))


@pytest.mark.parametrize("empty", [block((0, 1), mask=0), block((2,)), block(()), block((0, 1), prompt=99)])
def test_a_step_without_anchors_is_completed_and_changes_nothing(
    make_trainer: Callable[..., Trainer], empty: DeviceBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N3."""
    trainer = make_trainer()
    before = weights(trainer)
    trainer.micro_step(empty)
    reduced: list[Tensor] = []
    monkeypatch.setattr(trainer_module, "sum_over_ranks", lambda gradients, totals: reduced.extend(gradients))
    result = trainer.finish_step(0).result()
    assert (result.loss, result.grad_norm, result.anchors, result.accuracy) == (0.0, 0.0, 0, [0.0] * 3)
    assert (result.samples, result.tokens) == (len(empty.samples), len(empty.token_ids))
    # All ranks reduce the same list of gradients, so none may be missing here.
    assert len(reduced) == len(before)
    assert not any(gradient.any() for gradient in reduced)
    assert_same(before, weights(trainer))
    assert all(not state["step"] and not state["exp_avg"].any() for state in trainer.optimiser.state.values())


def test_one_usable_sample_among_unusable_ones_is_all_that_counts(make_trainer: Callable[..., Trainer]) -> None:
    """N3: the sample of three tokens has one supervised one, so no anchor; its company loses nothing by it."""
    alone, among = make_trainer(), make_trainer()
    alone.micro_step(block((0,)))
    among.micro_step(block((2, 0)))
    first, second = alone.finish_step(0).result(), among.finish_step(0).result()
    assert (first.anchors, second.anchors) == (4, 4)
    assert second.loss == pytest.approx(first.loss, rel=1e-5)
    for one, other in zip(weights(alone), weights(among), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5)


def test_anchors_change_with_the_epoch_and_not_with_the_block(make_trainer: Callable[..., Trainer]) -> None:
    found = []
    for epoch, samples in ((0, (1,)), (0, (1,)), (1, (1,))):
        trainer = make_trainer()
        one = block(samples)
        trainer.micro_step(DeviceBlock(**(one.__dict__ | {"epoch": epoch})))
        found.append(trainer.finish_step(0).result().loss)
    assert found[0] == found[1] != found[2]


def test_masters_are_fp32_whatever_is_computed_in(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(dtype="bfloat16")
    trainer.micro_step(block((0, 1)))
    assert {gradient.dtype for gradient in gradients(trainer)} == {torch.float32}
    assert not trainer.finish_step(0).result().skipped
    assert {weight.dtype for weight in weights(trainer)} == {torch.float32}
    for state in trainer.optimiser.state.values():
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_norm_weights_are_not_decayed(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(TrainConfig(weight_decay=0.5))
    for group in trainer.optimiser.param_groups:
        assert {parameter.ndim > 1 for parameter in group["params"]} == {group["weight_decay"] == 0.5}
