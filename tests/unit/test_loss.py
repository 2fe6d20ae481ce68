"""The fused loss against plain autograd over full logits, in both kinds, chunked and not."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from consumer import loss as loss_module
from consumer.loss import LossKind, LossParts, decay_weights, default_gamma, dpace_weights, draft_loss

BLOCKS, SLOTS, HIDDEN, VOCAB, GAMMA = 7, 6, 12, 31, 4.0


def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, head, labels, supervised: a block without any supervision, one with a hole, tails, labels of -1."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    labels = torch.randint(VOCAB, (BLOCKS, SLOTS), generator=generator, dtype=torch.int32)
    supervised = torch.ones(BLOCKS, SLOTS, dtype=torch.bool)
    supervised[:, 0] = False
    supervised[2] = False
    supervised[3, 2:4] = False
    supervised[4:6, 2:] = False  # two blocks in a row with the same single slot, then one with later slots only
    labels[4:6, 2:] = -1
    supervised[6, :3] = False
    # Make some drafts right, so that accuracy has something to count.
    hidden[0, 1:4] = head[labels[0, 1:4].long()] * 3
    return hidden, head, labels, supervised


def naive(hidden: Tensor, head: Tensor, labels: Tensor, supervised: Tensor, kind: LossKind) -> tuple[Tensor, Tensor]:
    """(loss, weights [A, B]) by loops over blocks and slots, straight from the formulas."""
    ce = F.cross_entropy((hidden @ head.T).flatten(0, 1), labels.clamp(min=0).flatten().long(), reduction="none")
    ce = ce.view(labels.shape)
    weights = torch.zeros(labels.shape)
    for a in range(len(labels)):
        slots = [k for k in range(1, SLOTS) if supervised[a, k]]
        for k in slots:
            if kind == "ce":
                weights[a, k] = math.exp(-(k - 1) / GAMMA)
            else:
                s = {i: 0.5 * math.exp(-float(ce[a, i].detach())) + 0.5 for i in slots}
                weights[a, k] = sum(math.prod(s[i] for i in slots if i <= m) for m in slots if m >= k)
    return (weights * ce).sum(), weights


def run(hidden: Tensor, head: Tensor, labels: Tensor, supervised: Tensor, kind: LossKind = "ce") -> LossParts:
    return draft_loss(hidden, head, labels, supervised, kind=kind, gamma=GAMMA)


@pytest.mark.parametrize("tile", [VOCAB, 1 << 21])
@pytest.mark.parametrize("rows", [1, 8, 448])
@pytest.mark.parametrize("kind", ["ce", "dpace"])
def test_equals_autograd_over_full_logits(
    kind: LossKind, rows: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss_module.CHUNK_ROWS, "cpu", rows)
    monkeypatch.setattr(loss_module, "TILE_ELEMENTS", tile)
    hidden, head, labels, supervised = case()
    hidden.requires_grad_()
    expected, weights = naive(hidden, head, labels, supervised, kind)
    parts = run(hidden, head, labels, supervised, kind)
    torch.testing.assert_close(parts.loss, expected)
    wanted = weights.sum() if kind == "ce" else supervised.sum().float()
    torch.testing.assert_close(parts.denominator, wanted)
    (gradient,) = torch.autograd.grad(parts.loss * 0.5, hidden)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected * 0.5, hidden)[0], rtol=1e-4, atol=1e-6)
    assert not gradient[~supervised].any()
    right = ((hidden @ head.T).argmax(-1) == labels) & supervised
    assert right.sum() >= 2
    assert parts.correct.tolist() == right.sum(0).tolist()
    assert parts.count.tolist() == supervised.sum(0).tolist()


@pytest.mark.parametrize("kind", ["ce", "dpace"])
def test_parts_add_up_over_any_cut(kind: LossKind) -> None:
    hidden, head, labels, supervised = case()
    whole = run(hidden, head, labels, supervised, kind)
    pieces = [run(hidden[cut], head, labels[cut], supervised[cut], kind) for cut in (slice(0, 3), slice(3, 7))]
    torch.testing.assert_close(sum(piece.loss for piece in pieces), whole.loss)
    torch.testing.assert_close(sum(piece.denominator for piece in pieces), whole.denominator)
    assert sum(piece.correct for piece in pieces).tolist() == whole.correct.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["ce", "dpace"])
@pytest.mark.parametrize("blocks", [0, 2])
def test_nothing_supervised_is_a_zero_and_not_a_nan(kind: LossKind, blocks: int) -> None:
    hidden, head, labels, supervised = (part[:blocks] if part.shape[0] == BLOCKS else part for part in case())
    hidden = hidden.clone().requires_grad_()
    parts = run(hidden, head, labels, torch.zeros_like(supervised), kind)
    parts.loss.backward()  # type: ignore[no-untyped-call]
    assert float(parts.loss.detach()) == float(parts.denominator) == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert parts.count.tolist() == [0] * SLOTS


def test_bf16_products_keep_an_fp32_softmax() -> None:
    hidden, head, labels, supervised = case()
    narrow = hidden.bfloat16().requires_grad_()
    parts = run(narrow, head.bfloat16(), labels, supervised)
    assert parts.loss.dtype == torch.float32
    exact = narrow.detach().float().requires_grad_()
    expected, _ = naive(exact, head.bfloat16().float(), labels, supervised, "ce")
    assert float(parts.loss.detach()) == pytest.approx(float(expected.detach()), rel=5e-3)
    (gradient,) = torch.autograd.grad(parts.loss, narrow)
    (wanted,) = torch.autograd.grad(expected, exact)
    assert float((gradient.float() - wanted).norm() / wanted.norm()) < 1e-2


def test_an_improbable_label_has_a_finite_loss() -> None:
    hidden = torch.tensor([[[0.0], [200.0]]], requires_grad=True)
    head = torch.tensor([[1.0], [-1.0]])
    parts = run_tiny(hidden, head, label=1)
    assert float(parts.loss.detach()) == pytest.approx(400.0)


def run_tiny(hidden: Tensor, head: Tensor, label: int) -> LossParts:
    return draft_loss(hidden, head, torch.tensor([[0, label]]), torch.tensor([[False, True]]), gamma=1.0)


def test_of_tied_logits_the_first_is_the_draft() -> None:
    """As greedy decoding takes it: the label is correct only when no earlier token ties with it."""
    hidden, head = torch.ones(1, 2, 1), torch.tensor([[0.0], [1.0], [1.0]])
    assert run_tiny(hidden, head, label=1).correct.tolist() == [0, 1]
    assert run_tiny(hidden, head, label=2).correct.tolist() == [0, 0]


def test_gamma_is_published_where_it_is_and_between() -> None:
    assert [default_gamma(size) for size in (8, 10, 16)] == pytest.approx([4, 5, 7])
    gammas = [default_gamma(size) for size in range(2, 40)]
    assert gammas == sorted(gammas)
    assert gammas[0] == 1.0
    weights = decay_weights(16, default_gamma(16))
    assert weights[[0, 1, 2, 8, 15]].tolist() == pytest.approx([0, 1, 0.867, 0.368, 0.135], abs=1e-3)


def test_dpace_weights_by_hand() -> None:
    """alpha 0.5; q = 1, 0 and a hole between: s = 1, (1), 0.5."""
    ce = torch.tensor([[9.0, 0.0, 9.0, torch.inf]])
    supervised = torch.tensor([[False, True, False, True]])
    assert dpace_weights(ce, supervised).tolist() == [[0.0, 1.5, 0.0, 0.5]]
