"""The optimiser step: micro-steps accumulate unnormalised gradients, one reduction, one update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consumer.attention import Layout
from consumer.blocks import blocks_at, choose_anchors, document_positions
from consumer.config import TrainConfig
from consumer.drafter import Drafter
from consumer.feed import DeviceBlock
from consumer.loss import default_gamma, draft_loss
from consumer.reduce import sum_over_ranks
from consumer.schedule import learning_rate

ADAM_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class StepResult:
    """One optimiser step over all ranks. `accuracy` is per draft slot from 1 on; `skipped` when it was not finite."""

    loss: float
    accuracy: list[float]
    lr: float
    grad_norm: float
    anchors: int
    samples: int
    tokens: int
    skipped: bool

    def row(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Trainer:
    """Holds the drafter, its optimiser and the frozen ends of the target (`embedding`, `head` `[V, hidden]`)."""

    def __init__(
        self, drafter: Drafter, embedding: Tensor, head: Tensor, config: TrainConfig, total_steps: int
    ) -> None:
        self.drafter = drafter
        self.optimiser = _adamw(drafter, config)
        self._embedding, self._head = embedding, head.to(drafter.compute_dtype)
        self._config, self._total_steps = config, total_steps
        self._gamma = default_gamma(drafter.shape.block_size) if config.gamma == "auto" else config.gamma
        self._parameters = list(drafter.parameters())
        self._totals = self._zero_totals()

    def micro_step(self, block: DeviceBlock) -> None:
        """Adds the gradients of one block; they are not divided by anything yet."""
        drafter, shape, config = self.drafter, self.drafter.shape, self._config
        document, anchor = choose_anchors(
            block.loss_mask, block.offsets, block.samples, anchors=config.anchors, seed=config.seed, epoch=block.epoch
        )
        drafts = blocks_at(
            document,
            anchor,
            block.token_ids,
            block.loss_mask,
            block.offsets,
            block_size=shape.block_size,
            mask_token_id=shape.mask_token_id,
        )
        device = block.features.device
        layout = Layout(block.offsets.astype("int64"), drafts.document, drafts.anchor)
        positions = torch.from_numpy(document_positions(layout.offsets)).to(device)
        context = drafter.context(block.features, positions)
        embedded = drafter.embed(self._embedding, torch.from_numpy(drafts.input_ids).to(device))
        hidden = drafter(embedded, torch.from_numpy(drafts.positions).to(device), context, layout)
        parts = draft_loss(
            hidden,
            self._head,
            torch.from_numpy(drafts.labels).to(device),
            torch.from_numpy(drafts.supervised).to(device),
            kind=config.loss,
            gamma=self._gamma,
        )
        parts.loss.backward()  # type: ignore[no-untyped-call]
        counts = torch.tensor([len(anchor), len(block.samples), len(block.token_ids)], dtype=torch.float64)
        scalars = torch.stack((parts.loss.detach().double(), parts.denominator.double()))
        slots = torch.cat((parts.correct.double(), parts.count.double()))
        self._totals += torch.cat((scalars, counts.to(device), slots))

    def finish_step(self, step: int) -> StepResult:
        """Reduces over ranks, clips and updates. A step whose loss or gradient is not finite changes no weight, on
        every rank alike; so does one without any supervised slot."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        sum_over_ranks(gradients, self._totals)
        totals = self._totals.tolist()
        loss_sum, denominator, anchors, samples, tokens = totals[:5]
        for gradient in gradients:
            gradient.div_(max(denominator, 1e-30))
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.grad_clip))
        loss = loss_sum / denominator if denominator else 0.0
        sound = denominator > 0 and all(map(_is_finite, (loss, norm)))
        rate = learning_rate(step, self._total_steps, self._config)
        if sound:
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self._totals = self._zero_totals()
        slots = self.drafter.shape.block_size
        correct, count = totals[5 : 5 + slots], totals[5 + slots :]
        accuracy = [good / all_ if all_ else 0.0 for good, all_ in zip(correct[1:], count[1:], strict=True)]
        return StepResult(loss, accuracy, rate, norm, int(anchors), int(samples), int(tokens), not sound)

    def _zero_totals(self) -> Tensor:
        return torch.zeros(5 + 2 * self.drafter.shape.block_size, dtype=torch.float64, device=self._embedding.device)


def _adamw(drafter: Drafter, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW on the fp32 masters. Norm weights are scales, not directions: they are not decayed."""
    matrices = [parameter for parameter in drafter.parameters() if parameter.ndim > 1]
    scales = [parameter for parameter in drafter.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": scales, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=ADAM_BETAS, fused=True)


def _is_finite(value: float) -> bool:
    return value - value == 0.0
