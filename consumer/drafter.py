"""The DFlash drafter (reference section 1): z-lab's tensors and names, split so that context is computed once.

`context` turns target features into each layer's keys and values; `forward` runs draft blocks against them.
Training calls both on one StateBlock; evaluation keeps the context and calls `forward` round after round.
Parameters may be fp32 masters: every product runs in `compute_dtype`, norms and rotation in fp32.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from consumer.shape import DrafterShape
from consumer.zlab import check_tensors

INIT_STD = 0.02


class Rotation(NamedTuple):
    """cos and sin of the rotary angles, fp32 [..., 1, head_dim] (one axis for the heads)."""

    cos: Tensor
    sin: Tensor


class Visible(Protocol):
    """Who sees what: `consumer.attention.Layout`, or its like on a GPU (`consumer.flex`)."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, *, causal: bool, window: int | None
    ) -> Tensor: ...


Context = list[tuple[Tensor, Tensor]]  # per layer: k (normed, rotated), v; each [T, kv_heads, head_dim]


class Linear(nn.Module):
    """A bias-free linear map whose weight [out, in] is cast to the input's dtype at use."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Plain RMS norm over the last axis (weight * x_hat, weight 1 at first), in fp32, back to the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Queries from draft slots; keys and values from context and draft slots, through the same projections."""

    def __init__(self, shape: DrafterShape, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim, hidden = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.hidden_size
        self.q_proj = Linear(hidden, heads * dim)
        self.k_proj = Linear(hidden, kv_heads * dim)
        self.v_proj = Linear(hidden, kv_heads * dim)
        self.o_proj = Linear(heads * dim, hidden)
        self.q_norm = RMSNorm(dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(dim, shape.rms_norm_eps)
        self.q_split, self.kv_split = (heads, dim), (kv_heads, dim)
        self.causal, self.window = shape.causal(layer), shape.window(layer)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """k and v [..., kv_heads, head_dim] of rows x [..., hidden]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, self.kv_split))
        return rotate(k, rotation), self.v_proj(x).unflatten(-1, self.kv_split)

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """q [..., heads, head_dim] of rows x [..., hidden]."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, self.q_split)), rotation)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One pre-norm decoder layer. The context passes through neither norm and is never updated."""

    def __init__(self, shape: DrafterShape, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, rotation: Rotation, context: tuple[Tensor, Tensor], visible: Visible) -> Tensor:
        attention = self.self_attn
        mixed = visible.attend(*self.enter(x, rotation), *context, causal=attention.causal, window=attention.window)
        return self.leave(x, mixed)

    def enter(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of the draft slots: all before attention."""
        normed = self.input_layernorm(x)
        return self.self_attn.queries(normed, rotation), *self.self_attn.keys_values(normed, rotation)

    def leave(self, x: Tensor, mixed: Tensor) -> Tensor:
        """All after attention, whose output [..., heads, head_dim] is `mixed`."""
        x = x + self.self_attn.o_proj(mixed.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Drafter(nn.Module):
    """The draft model without embedding and head, which are the target's own and frozen.

    Parameters are created in fp32, uninitialised but for the norms: call `initialise` or `load`.
    """

    def __init__(self, shape: DrafterShape, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        self.compute_dtype = compute_dtype
        self.fc = Linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        # float64 on the host: the same angles whatever the device, and exact at long positions.
        steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        frequencies = (1.0 / shape.rope_theta**steps).float()
        self.inverse_frequencies: Tensor
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def context(self, features: Tensor, positions: Tensor) -> Context:
        """Keys and values of every layer for context rows.

        features [T, taps * hidden], tap order of the shape, any float dtype; positions [T], counted from the
        start of each row's document. One fused state feeds all layers (reference section 0, fact 5).
        """
        fused = self.fuse(features)
        rotation = self._rotation(positions)
        return [layer.self_attn.keys_values(fused, rotation) for layer in self.stack()]

    def fuse(self, features: Tensor) -> Tensor:
        """[T, hidden] of features [T, taps * hidden]."""
        return self.hidden_norm(self.fc(features.to(self.compute_dtype)))  # type: ignore[no-any-return]

    def forward(self, block_embeddings: Tensor, block_positions: Tensor, context: Context, visible: Visible) -> Tensor:
        """Hidden states after the final norm, [A, B, hidden] in compute_dtype; logits are the target's head of it.

        block_embeddings [A, B, hidden] (see `embed`); block_positions [A, B]: anchor .. anchor + B - 1.
        """
        x = block_embeddings.to(self.compute_dtype)
        rotation = self._rotation(block_positions)
        for layer, keys_values in zip(self.stack(), context, strict=True):
            x = layer(x, rotation, keys_values, visible)
        return self.norm(x)  # type: ignore[no-any-return]

    def embed(self, embedding: Tensor, ids: Tensor) -> Tensor:
        """Rows of the target's embedding [V, hidden] for ids [A, B], scaled as the target scales its input."""
        rows = F.embedding(ids, embedding).to(self.compute_dtype)
        return rows if self.shape.input_embedding_scale == 1.0 else rows * self.shape.input_embedding_scale

    def stack(self) -> list[Layer]:
        """The layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _rotation(self, positions: Tensor) -> Rotation:
        angles = positions.float()[..., None] * self.inverse_frequencies
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        return Rotation(angles.cos(), angles.sin())


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotary embedding over the whole head (rotate-half), computed in fp32, in x's dtype. x [..., heads, dim]."""
    wide = x.float()
    low, high = wide.chunk(2, dim=-1)
    return (wide * rotation.cos + torch.cat([-high, low], dim=-1) * rotation.sin).to(x.dtype)


def initialise(drafter: Drafter, seed: int) -> None:
    """Norm weights 1, all else normal with deviation 0.02, as Qwen3 initialises; the same on every rank and device."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, INIT_STD, generator=generator))


def load(drafter: Drafter, weights: Mapping[str, Tensor]) -> None:
    """Copy weights in, strictly: RequestError names every missing, unexpected or misshapen tensor."""
    check_tensors("drafter weights", {name: value.shape for name, value in weights.items()}, drafter.shape)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(weights[name])
