"""The optimiser step: micro-steps accumulate unnormalised gradients, one reduction, one update.

Nothing here waits for a GPU: what a step came to is read when it is asked for, and whether it counts is decided there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from consumer.arrange import arrange
from consumer.config import TrainConfig
from consumer.drafter import Drafter, Visible
from consumer.feed import DeviceBlock
from consumer.loss import default_gamma, draft_loss
from consumer.outcome import Pending
from consumer.reduce import sum_over_ranks
from consumer.schedule import STEADY, Pace, learning_rate
from consumer.upload import upload

if TYPE_CHECKING:  # it brings the compiler along
    from consumer.flex import FlexMasks

ADAM_BETAS = (0.9, 0.95)


class Trainer:
    """Holds the drafter, its optimiser and the frozen ends of the target (`embedding`, `head` `[V, hidden]`). `masks`,
    on a GPU: attention of all draft blocks in one kernel."""

    def __init__(
        self,
        drafter: Drafter,
        embedding: Tensor,
        head: Tensor,
        config: TrainConfig,
        total_steps: int,
        masks: FlexMasks | None = None,
    ) -> None:
        self.drafter = drafter
        self.optimiser = _adamw(drafter, config)
        self._embedding, self._head = embedding, head.to(drafter.compute_dtype)
        self._config, self._total_steps, self._masks = config, total_steps, masks
        self._gamma = default_gamma(drafter.shape.block_size) if config.gamma == "auto" else config.gamma
        self._parameters = list(drafter.parameters())
        self._totals = self._zero_totals()

    def micro_step(self, block: DeviceBlock) -> None:
        """Adds the gradients of one block; they are not divided by anything yet."""
        drafter, shape, config = self.drafter, self.drafter.shape, self._config
        device = block.features.device
        drafts, layout, rows, places = arrange(
            block.token_ids,
            block.loss_mask,
            block.offsets,
            block.samples,
            anchors=config.anchors,
            seed=config.seed,
            epoch=block.epoch,
            block_size=shape.block_size,
            mask_token_id=shape.mask_token_id,
        )
        counts = torch.tensor([0, 0, len(drafts.anchor), len(block.samples), len(block.token_ids)], dtype=torch.float64)
        self._totals[:5] += upload(counts, device)
        if not len(drafts.anchor):
            return
        visible: Visible = layout
        if self._masks is not None:
            self._masks.fill(layout)
            visible = self._masks
        context = drafter.context(block.features.index_select(0, upload(rows, device)), upload(places, device))
        embedded = drafter.embed(self._embedding, upload(drafts.input_ids, device))
        hidden = drafter(embedded, upload(drafts.positions, device), context, visible)
        labels, supervised = torch.from_numpy(drafts.labels), torch.from_numpy(drafts.supervised)
        parts = draft_loss(hidden, self._head, labels, supervised, kind=config.loss, gamma=self._gamma)
        parts.loss.backward()  # type: ignore[no-untyped-call]
        self._totals[:2] += torch.stack((parts.loss.detach().double(), parts.denominator.double()))
        self._totals[5:] += torch.cat((parts.correct, parts.count))

    def finish_step(self, step: int, pace: Pace = STEADY) -> Pending:
        """Reduces over ranks, clips and updates. A step whose loss or gradient is not finite changes no weight, on
        every rank alike; so does one without any supervised slot."""
        gradients = [_gradient(parameter) for parameter in self._parameters]
        sum_over_ranks(gradients, self._totals)
        rate = learning_rate(step, self._total_steps, self._config, pace)
        norm, sound = self._update(gradients, rate)
        pending = Pending(self._totals, norm, sound, rate)
        self._totals = self._zero_totals()
        return pending

    def warm_up(self, block: DeviceBlock) -> None:
        """Does with `block` all that a step does, but for the reduction, and changes nothing: compiled and allocated is
        what the largest block needs."""
        self.micro_step(block)
        self._totals.zero_()
        self._update([_gradient(parameter) for parameter in self._parameters], 0.0)

    def _update(self, gradients: list[Tensor], rate: float) -> tuple[Tensor, Tensor]:
        """The norm of the mean gradient before it is clipped, and whether weights were changed."""
        loss, denominator = self._totals[0], self._totals[1]
        norm = torch.nn.utils.get_total_norm(gradients) / denominator.clamp(min=1e-30)
        sound = (denominator > 0) & loss.isfinite() & norm.isfinite()
        # AdamW divides each gradient by one number and leaves all as it is when told to, as it does for scaled losses.
        scale = denominator * (norm / self._config.grad_clip).clamp(min=1.0)
        self.optimiser.grad_scale = torch.where(sound, scale, 1.0).float()  # type: ignore[attr-defined]
        self.optimiser.found_inf = (~sound).float()  # type: ignore[attr-defined]
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return norm, sound

    def _zero_totals(self) -> Tensor:
        return torch.zeros(5 + 2 * self.drafter.shape.block_size, dtype=torch.float64, device=self._embedding.device)


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    """The parameter's gradient; zeros where no block had a draft, as all ranks reduce the same tensors."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _adamw(drafter: Drafter, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW on the fp32 masters. Norm weights are scales, not directions: they are not decayed."""
    matrices = [parameter for parameter in drafter.parameters() if parameter.ndim > 1]
    scales = [parameter for parameter in drafter.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": scales, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=ADAM_BETAS, fused=True)
