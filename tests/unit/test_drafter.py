"""The drafter against a naive, inference-style reference, and what may and may not influence a draft block."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from consumer.attention import Layout
from consumer.blocks import DraftBlocks, blocks_at, document_positions
from consumer.drafter import Context, Drafter, initialise, load
from consumer.loss import draft_loss
from consumer.shape import DrafterShape
from consumer.zlab import tensor_shapes
from protocol.errors import RequestError

LENGTHS = (23, 9, 16)
OFFSETS = np.cumsum([0, *LENGTHS])
DOCUMENT = np.array([0, 0, 0, 0, 1, 2])
ANCHOR = np.array([0, 9, 11, 20, 4, 12])  # 9 and 11 overlap; 20 and 12 hang over the end


def make_shape(is_causal: bool | None = None) -> DrafterShape:
    return DrafterShape(
        hidden_size=32,
        target_layer_ids=(1, 4, 6),
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        block_size=5,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        vocab_size=50,
        mask_token_id=49,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
        sliding_window=7,
        is_causal=is_causal,
        num_target_layers=10,
        max_position_embeddings=128,
        eos_token_ids=(0,),
        pad_token_id=0,
        bos_token_id=None,
        input_embedding_scale=1.5,
    )


def make_drafter(is_causal: bool | None = None, dtype: torch.dtype = torch.float32) -> Drafter:
    drafter = Drafter(make_shape(is_causal), dtype)
    initialise(drafter, 3)
    with torch.no_grad():  # larger than at the start, so that every path matters
        for parameter in drafter.parameters():
            parameter.mul_(4.0 if parameter.dim() == 2 else 1.3)
    return drafter


def draw(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


FEATURES = draw(int(OFFSETS[-1]), 96, seed=1)
EMBEDDING = draw(50, 32, seed=2)
TOKENS = np.random.default_rng(0).integers(1, 49, OFFSETS[-1])


def make_blocks(tokens: np.ndarray = TOKENS) -> DraftBlocks:
    return blocks_at(DOCUMENT, ANCHOR, tokens, np.ones_like(tokens), OFFSETS, block_size=5, mask_token_id=49)


def run(drafter: Drafter, features: Tensor = FEATURES, tokens: np.ndarray = TOKENS) -> Tensor:
    blocks = make_blocks(tokens)
    context = drafter.context(features, torch.from_numpy(document_positions(OFFSETS)))
    embedded = drafter.embed(EMBEDDING, torch.from_numpy(blocks.input_ids))
    output: Tensor = drafter(embedded, torch.from_numpy(blocks.positions), context, Layout(OFFSETS, DOCUMENT, ANCHOR))
    return output


def naive_block(drafter: Drafter, features: Tensor, ids: Tensor) -> Tensor:
    """One block as a server drafts it: `features` [a, taps * hidden] are all that exists. Returns [B, hidden]."""
    weights, shape = dict(drafter.named_parameters()), drafter.shape
    anchor, slots = len(features), len(ids)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + shape.rms_norm_eps).sqrt() * weights[name]

    def turn(x: Tensor, positions: Tensor) -> Tensor:
        half = shape.head_dim // 2
        angle = positions[:, None] / shape.rope_theta ** (torch.arange(half) / half)
        pair = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([pair.real, pair.imag], -1)

    context = norm(features @ weights["fc.weight"].T, "hidden_norm.weight")
    x = EMBEDDING[ids] * shape.input_embedding_scale
    at = torch.arange(anchor + slots)
    for layer in range(shape.num_layers):
        name = f"layers.{layer}."
        y = norm(x, name + "input_layernorm.weight")
        rows = torch.cat([context, y])

        def heads(x: Tensor, part: str, name: str = name) -> Tensor:
            return (x @ weights[f"{name}self_attn.{part}_proj.weight"].T).view(len(x), -1, shape.head_dim)

        q = turn(norm(heads(y, "q"), name + "self_attn.q_norm.weight"), at[anchor:])
        k = turn(norm(heads(rows, "k"), name + "self_attn.k_norm.weight"), at).repeat_interleave(2, 1)
        v = heads(rows, "v").repeat_interleave(2, 1)
        distance = at[anchor:, None] - at
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if shape.layer_types[layer] == "sliding_attention":
            hidden = distance.abs() >= 7
        if (shape.layer_types[layer] == "sliding_attention") if shape.is_causal is None else shape.is_causal:
            hidden = hidden | (distance < 0)
        scores = torch.einsum("qhd,khd->hqk", q, k) / shape.head_dim**0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        x = x + mixed.flatten(1) @ weights[name + "self_attn.o_proj.weight"].T
        y = norm(x, name + "post_attention_layernorm.weight")
        gate, up, down = (weights[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
        x = x + (F.silu(y @ gate) * (y @ up)) @ down
    return norm(x, "norm.weight")


@pytest.mark.parametrize("is_causal", [None, False, True])
def test_batched_blocks_equal_blocks_drafted_one_by_one(is_causal: bool | None) -> None:
    drafter, blocks = make_drafter(is_causal), make_blocks()
    batched = run(drafter)
    for row, (document, anchor) in enumerate(zip(DOCUMENT, ANCHOR, strict=True)):
        seen = FEATURES[OFFSETS[document] : OFFSETS[document] + anchor]
        alone = naive_block(drafter, seen, torch.from_numpy(blocks.input_ids[row]))
        torch.testing.assert_close(batched[row], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_causal", [None, False, True])
def test_a_shortened_block_equals_a_shorter_one(is_causal: bool | None) -> None:
    drafter, blocks, length = make_drafter(is_causal), make_blocks(), np.array([5, 2, 4, 1, 3, 2])
    context = drafter.context(FEATURES, torch.from_numpy(document_positions(OFFSETS)))
    embedded = drafter.embed(EMBEDDING, torch.from_numpy(blocks.input_ids))
    layout = Layout(OFFSETS, DOCUMENT, ANCHOR, length)
    batched = drafter(embedded, torch.from_numpy(blocks.positions), context, layout)
    for row, (document, anchor, used) in enumerate(zip(DOCUMENT, ANCHOR, length, strict=True)):
        seen = FEATURES[OFFSETS[document] : OFFSETS[document] + anchor]
        alone = naive_block(drafter, seen, torch.from_numpy(blocks.input_ids[row, :used]))
        torch.testing.assert_close(batched[row, :used], alone, rtol=1e-4, atol=1e-5)


def test_the_state_dict_is_exactly_z_labs() -> None:
    drafter = make_drafter()
    found = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    assert found == tensor_shapes(drafter.shape)
    assert {"fc.weight", "layers.2.self_attn.q_norm.weight", "layers.0.mlp.down_proj.weight"} <= found.keys()
    assert len(found) == 3 + 11 * 3


def changed_blocks(features: Tensor = FEATURES, tokens: np.ndarray = TOKENS) -> list[int]:
    drafter = make_drafter()
    difference = (run(drafter, features, tokens) - run(drafter)).abs().amax(dim=(1, 2))
    return [row for row, value in enumerate(difference.tolist()) if value > 0]


def poke_feature(document: int, position: int) -> Tensor:
    features = FEATURES.clone()
    features[OFFSETS[document] + position] += 1.0
    return features


def test_a_block_sees_features_strictly_before_its_anchor_in_its_own_document() -> None:
    assert changed_blocks(poke_feature(0, 8)) == [1, 2, 3]
    assert changed_blocks(poke_feature(0, 9)) == [2, 3]  # block 1's own anchor feature changes nothing in it
    assert changed_blocks(poke_feature(0, 20)) == []
    assert changed_blocks(poke_feature(1, 0)) == [4]
    assert changed_blocks(poke_feature(1, 4)) == []
    assert changed_blocks(poke_feature(2, 11)) == [5]


def test_a_block_sees_its_own_anchor_token_and_no_other_token() -> None:
    for row, (document, anchor) in enumerate(zip(DOCUMENT, ANCHOR, strict=True)):
        tokens = TOKENS.copy()
        tokens[OFFSETS[document] + anchor] = tokens[OFFSETS[document] + anchor] % 48 + 1
        assert changed_blocks(tokens=tokens) == [row]
    tokens = TOKENS.copy()
    tokens[OFFSETS[0] + 10] = tokens[OFFSETS[0] + 10] % 48 + 1
    assert changed_blocks(tokens=tokens) == []


def test_context_grown_piece_by_piece_equals_context_at_once() -> None:
    """What a server caches over several accept rounds, well beyond the sliding window."""
    drafter, positions = make_drafter(), torch.arange(23)
    whole = drafter.context(FEATURES[:23], positions)
    pieces = [drafter.context(FEATURES[a:b], positions[a:b]) for a, b in ((0, 7), (7, 8), (8, 12), (12, 20), (20, 23))]
    grown: Context = [
        (torch.cat([piece[layer][0] for piece in pieces]), torch.cat([piece[layer][1] for piece in pieces]))
        for layer in range(3)
    ]
    for (k, v), (grown_k, grown_v) in zip(whole, grown, strict=True):
        torch.testing.assert_close(grown_k, k)
        torch.testing.assert_close(grown_v, v)


def test_bf16_products_over_fp32_masters() -> None:
    wide, narrow = make_drafter(), make_drafter(dtype=torch.bfloat16)
    output, exact = run(narrow).detach(), run(wide).detach()
    assert output.dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in narrow.parameters())
    assert float((output.float() - exact).norm() / exact.norm()) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_thread_is_deterministic_to_the_bit(dtype: torch.dtype) -> None:
    def gradients() -> list[Tensor]:
        drafter, blocks = make_drafter(dtype=dtype), make_blocks()
        labels, supervised = torch.from_numpy(blocks.labels), torch.from_numpy(blocks.supervised)
        draft_loss(run(drafter), EMBEDDING.to(dtype), labels, supervised).loss.backward()  # type: ignore[no-untyped-call]
        return [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]

    first, second = gradients(), gradients()
    assert len(first) == 36
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_blocks_give_every_weight_a_zero_gradient() -> None:
    drafter, none = make_drafter(), np.empty(0, np.int64)
    blocks = blocks_at(none, none, TOKENS, np.ones_like(TOKENS), OFFSETS, block_size=5, mask_token_id=49)
    context = drafter.context(FEATURES, torch.from_numpy(document_positions(OFFSETS)))
    embedded = drafter.embed(EMBEDDING, torch.from_numpy(blocks.input_ids))
    hidden = drafter(embedded, torch.from_numpy(blocks.positions), context, Layout(OFFSETS, none, none))
    labels, supervised = torch.from_numpy(blocks.labels), torch.from_numpy(blocks.supervised)
    parts = draft_loss(hidden, EMBEDDING, labels, supervised)
    parts.loss.backward()  # type: ignore[no-untyped-call]
    assert float(parts.loss.detach()) == float(parts.denominator) == 0.0
    assert all(weight.grad is not None and not weight.grad.any() for weight in drafter.parameters())


def test_initialisation_depends_on_the_seed_alone() -> None:
    first, second, other = (Drafter(make_shape()) for _ in range(3))
    initialise(first, 1)
    torch.manual_seed(99)
    initialise(second, 1)
    initialise(other, 2)
    assert torch.equal(first.fc.weight, second.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert float(first.fc.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first.norm.weight.detach(), torch.ones(32))


def test_load_is_strict() -> None:
    weights = dict(make_drafter().state_dict())
    drafter = Drafter(make_shape())
    load(drafter, weights)
    assert all(torch.equal(value, weights[name]) for name, value in drafter.state_dict().items())
    with pytest.raises(RequestError, match=r"missing norm\.weight; unexpected model\.norm\.weight"):
        load(drafter, {("model." * (name == "norm.weight") + name): value for name, value in weights.items()})
    with pytest.raises(RequestError, match=r"fc\.weight is \(32, 95\)"):
        load(drafter, {**weights, "fc.weight": weights["fc.weight"][:, 1:]})
