"""`draft_attention` against one big softmax under the definition (`visible`), and the definition against examples."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from consumer import attention
from consumer.attention import Layout, Rows, draft_attention, visible

SLOTS, HEADS, KV_HEADS, DIM = 4, 6, 2, 8
KINDS = [(False, None), (True, 5), (False, 5), (True, None), (True, 2)]


def layout(lengths: bool = False) -> Layout:
    """Three documents; overlapping anchors, an anchor at 0, and a document without blocks."""
    return Layout(
        offsets=np.array([0, 9, 12, 32]),
        document=np.array([0, 0, 0, 2, 2, 2]),
        anchor=np.array([0, 5, 6, 3, 11, 19]),
        length=np.array([4, 2, 4, 3, 4, 1]) if lengths else None,
    )


def tensors(blocks: int, rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(blocks, SLOTS, HEADS, DIM), *[(blocks, SLOTS, KV_HEADS, DIM)] * 2, *[(rows, KV_HEADS, DIM)] * 2]
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


def index(where: Layout) -> tuple[Rows, Rows]:
    """Rows of all draft slots, and of all keys (context rows, then draft slots)."""
    blocks = len(where.anchor)
    anchor = torch.from_numpy(where.anchor).repeat_interleave(SLOTS)
    length = torch.full((blocks,), SLOTS) if where.length is None else torch.from_numpy(where.length)
    query = Rows(
        torch.from_numpy(where.document).repeat_interleave(SLOTS),
        anchor + torch.arange(SLOTS).repeat(blocks),
        torch.arange(blocks).repeat_interleave(SLOTS),
        anchor,
        length.repeat_interleave(SLOTS),
    )
    sizes = torch.from_numpy(np.diff(where.offsets))
    documents = torch.arange(len(sizes)).repeat_interleave(sizes)
    positions = torch.cat([torch.arange(int(size)) for size in sizes])
    unused = torch.zeros_like(positions)
    context = Rows(documents, positions, unused - 1, unused, unused)
    return query, Rows(*(torch.cat([a, b]) for a, b in zip(context, query, strict=True)))


def definition(parts: list[Tensor], where: Layout, causal: bool, window: int | None) -> Tensor:
    q, k, v, context_k, context_v = parts
    query, key = index(where)
    mask = visible(Rows(*(x[:, None] for x in query)), Rows(*(x[None] for x in key)), causal=causal, window=window)
    repeat = HEADS // KV_HEADS
    keys = torch.cat([context_k, k.flatten(0, 1)]).repeat_interleave(repeat, dim=1)
    values = torch.cat([context_v, v.flatten(0, 1)]).repeat_interleave(repeat, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.flatten(0, 1), keys) * DIM**-0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).view_as(q)


@pytest.fixture(params=["document_by_document", "batched"])
def way(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """Both ways to the same result: the CPU's and the GPU's."""
    return getattr(attention, request.param)  # type: ignore[no-any-return]


def attend(parts: list[Tensor], where: Layout, causal: bool, window: int | None) -> Tensor:
    q, k, v, context_k, context_v = parts
    return draft_attention(q, k, v, context_k, context_v, where, causal=causal, window=window)


@pytest.mark.parametrize(("chunk", "batch"), [(1, 1), (1, 1 << 27), (1 << 24, 1), (1 << 24, 1 << 27)])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize(("causal", "window"), KINDS)
def test_equals_the_definition_with_gradients(
    causal: bool,
    window: int | None,
    lengths: bool,
    chunk: int,
    batch: int,
    way: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "SCORES_PER_CHUNK", chunk)
    monkeypatch.setattr(attention, "SCORES_PER_BATCH", batch)
    where, parts = layout(lengths), tensors(6, 32)
    expected = definition(parts, where, causal, window)
    actual = way(*parts, where, causal=causal, window=window)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * weight).sum(), parts)
    got = torch.autograd.grad((actual * weight).sum(), parts)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def sees(query: int, key: int, *, block: int, causal: bool = False, window: int | None = None, length: int = 4) -> bool:
    """Slot at position `query` of block 0 (anchor 10): does it see position `key` of `block` (-1: context)?"""

    def row(*values: int) -> Rows:
        return Rows(*(torch.tensor(value) for value in values))

    return bool(visible(row(0, query, 0, 10, length), row(0, key, block, 10, 4), causal=causal, window=window))


def test_the_definition_by_example() -> None:
    assert sees(10, 9, block=-1)
    assert not sees(10, 10, block=-1)  # the anchor's own feature does not exist when serving
    assert not sees(13, 11, block=-1)
    assert sees(11, 13, block=0)
    assert not sees(11, 13, block=0, causal=True)
    assert not sees(11, 13, block=1)
    assert sees(12, 8, block=-1, window=5)  # 4 tokens away: the window counts the query itself
    assert not sees(12, 7, block=-1, window=5)
    assert not sees(10, 12, block=0, window=2)
    assert not sees(10, 12, block=0, length=2)
    assert sees(12, 12, block=0, length=2)


def test_zero_blocks_give_zero_gradients() -> None:
    parts = tensors(0, 12)
    where = Layout(np.array([0, 12]), np.empty(0, np.int64), np.empty(0, np.int64))
    attend(parts, where, False, None).sum().backward()  # type: ignore[no-untyped-call]
    assert all(part.grad is not None and not part.grad.any() for part in parts)


def test_two_calls_agree_to_the_bit() -> None:
    parts = [part.detach().bfloat16() for part in tensors(6, 32)]
    first, second = (attend(parts, layout(), True, 5) for _ in range(2))
    assert torch.equal(first, second)
    assert first.dtype == torch.bfloat16
