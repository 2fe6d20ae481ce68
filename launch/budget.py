"""How many bytes of a GPU each role needs, and what it may take of one that both roles share; and what a checkpoint
needs of the host. Pure.

All figures but the last are bytes of device memory that a process allocates itself; the CUDA context comes on top of
them. e is the width of the features' dtype, c that of the drafter's products, h the hidden size, V the vocabulary, T
and D the largest block's tokens and draft tokens, L the drafter's layers, S the longest sample.

Producer
    held       the target's weights in the dtype that it runs in
    workspace  T h (8 e + 12) + 4 T m e  one layer of a pass, m the target's MLP width: residual, norm, attention, MLP
               + T S (1 + e)             the padding mask, as bools and as the kernel takes it
               + T h e (2 taps + 1)      the features in two buffers on their way out, and one tap's rows
               the first two for T / 0.85 rows, padding counted, or as many as hide behind a GPU's launches

Consumer, P parameters
    held       P (4 + 4 + 8)             master weights, gradients, two moments
               + P c if c < 4            the weights as the products see them
               + V h e, twice if the head is not tied; + V h c for the head if c and e differ
    workspace  3 T taps h (e + 1)        two blocks ahead and one in training, and what verifying looks at
               + T taps h e              the rows of it that some draft block sees
               + CHUNK_ROWS V c          logits of one chunk
               + D h (2 c + 4)           hidden states at the head, and their gradient
               on a GPU, with attention in one kernel:
               + T (3 h c + 6 L kv c)    the fused context, its keys and values
               + D L c (3 h + 3 m + 4 q + 6 kv)   what backward keeps of a draft token
               on a CPU, or with heads too narrow for the kernel:
               + T (h (3 c + 12) + L kv (3 c + 24))
               + D L (h (5 c + 16) + 4 m c + (q + kv) (3 c + 24))
               + 9 D L heads (S + B)     attention scores: softmax and their copy in fp32, and the mask
               + 12 SCORES_PER_BATCH     scores of one batch on their way forward or back; _CHUNK on a CPU
               + 8 TILE_ELEMENTS         softmax of a tile
               where m is the drafter's MLP width, q = heads x head dim and kv = kv heads x head dim

Host, one consumer
    checkpoint P (4 + 8)                 masters and moments, in memory of their own for the whole run
               + P c if c < 4            the weights as they are served, while they are written

The workspace is an upper bound in all but small temporaries: a block seldom has its longest samples and all its draft
tokens at their ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from consumer.bounds import CHUNK_ROWS, DEPTH, LEAST_HEAD_DIM, SCORES_PER_BATCH, SCORES_PER_CHUNK, TILE_ELEMENTS
from consumer.shape import DrafterShape
from consumer.zlab import tensor_shapes
from launch.machine import Gpu
from launch.placement import Placement
from producer.padding import SHORTEST_SHARE, launch_bound_tokens
from protocol.errors import RequestError
from protocol.units import show_bytes

# What a process takes beside its own allocations: CUDA context, kernels and the libraries' work buffers.
CONTEXT_BYTES = 1 << 30
# A GPU is called occupied when more than this share of it, and more than a context, is taken before we start.
OCCUPIED_SHARE = 0.05


class Need(msgspec.Struct, frozen=True):
    """Bytes of one process: `held` for the whole run, `workspace` for its largest block."""

    held: int
    workspace: int

    @property
    def total(self) -> int:
        return self.held + self.workspace


class Block(msgspec.Struct, frozen=True):
    """The largest block: its tokens and draft tokens, and the longest sample."""

    tokens: int
    draft_tokens: int
    longest: int


class Budgets(msgspec.Struct, frozen=True):
    """Bytes that each producer and each consumer may allocate on its device; 0: what is free there."""

    producer: int = 0
    consumer: int = 0


def producer_need(weight_bytes: int, facts: Mapping[str, Any], taps: int, width: int, block: Block) -> Need:
    """The need of one producer; `width` is the bytes of one number in the dtype that the target runs in."""
    hidden, mlp = facts["hidden_size"], facts["intermediate_size"]
    free_tokens = min(launch_bound_tokens(facts), block.tokens // 2 * block.longest)
    rows = max(block.tokens / SHORTEST_SHARE, free_tokens)
    layer = hidden * (8 * width + 12) + 4 * mlp * width + block.longest * (1 + width)
    staging = block.tokens * hidden * width * (2 * taps + 1)
    return Need(weight_bytes, int(rows * layer) + staging)


def consumer_need(
    shape: DrafterShape, tied: bool, width: int, compute_width: int, block: Block, device: str = "cuda"
) -> Need:
    """The need of one consumer on a device of this type; `width` is the bytes of one number of the features,
    `compute_width` in the products."""
    parameters = _parameters(shape)
    c, hidden, vocabulary = compute_width, shape.hidden_size, shape.vocab_size
    ends = vocabulary * hidden * (width * (1 if tied else 2) + (c if c != width else 0))
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    taps, layers, mlp = len(shape.target_layer_ids) * hidden, shape.num_layers, shape.intermediate_size
    per_token = (DEPTH + 1) * taps * (width + 1) + taps * width
    workspace = CHUNK_ROWS[device] * vocabulary * c
    per_draft_token = hidden * (2 * c + 4)
    if device == "cuda" and shape.head_dim >= LEAST_HEAD_DIM:
        per_token += 3 * hidden * c + 6 * layers * kv * c
        per_draft_token += layers * c * (3 * hidden + 3 * mlp + 4 * q + 6 * kv)
    else:
        per_token += hidden * (3 * c + 12) + layers * kv * (3 * c + 24)
        per_draft_token += layers * (hidden * (5 * c + 16) + 4 * mlp * c + (q + kv) * (3 * c + 24))
        per_draft_token += 9 * layers * shape.num_heads * (block.longest + shape.block_size)
        workspace += 12 * (SCORES_PER_BATCH if device == "cuda" else SCORES_PER_CHUNK) + 8 * TILE_ELEMENTS
    workspace += block.tokens * per_token + block.draft_tokens * per_draft_token
    return Need(parameters * (16 + (c if c < 4 else 0)) + ends, workspace)


def checkpoint_bytes(shape: DrafterShape, compute_width: int) -> int:
    """Host memory of the consumer that writes checkpoints; `compute_width` as in `consumer_need`."""
    return _parameters(shape) * (12 + (compute_width if compute_width < 4 else 0))


def divide(placement: Placement, gpus: Sequence[Gpu], producer: Need, consumer: Need) -> Budgets:
    """The budgets on the devices of `placement`; none on CPUs.

    On a device of its own a process may use all that is free. Two on one device get their needs, and divide what is
    left in proportion to them; where such devices differ, the least of each role's shares counts. Raises RequestError
    when a device cannot hold what a process on it holds for the whole run, or, shared, the needs of both.
    """
    budgets: list[Budgets] = []
    for device in dict.fromkeys((*placement.producers, *placement.consumers)):
        if device == "cpu":
            continue
        gpu = gpus[int(device.partition(":")[2])]
        produces, consumes = device in placement.producers and not placement.alone, device in placement.consumers
        if produces and consumes:
            spare = gpu.free_bytes - 2 * CONTEXT_BYTES - producer.total - consumer.total
            if spare < 0:
                raise RequestError(_refusal(device, gpu, {"producer": producer.total, "consumer": consumer.total}))
            extra = spare * producer.total // (producer.total + consumer.total)
            budgets.append(Budgets(producer.total + extra, consumer.total + spare - extra))
        elif (producer if produces else consumer).held > gpu.free_bytes - CONTEXT_BYTES:
            held = {"producer": producer.held} if produces else {"consumer": consumer.held}
            raise RequestError(_refusal(device, gpu, held))
    if not budgets:
        return Budgets()
    return Budgets(min(each.producer for each in budgets), min(each.consumer for each in budgets))


def shortage(
    placement: Placement, gpus: Sequence[Gpu], producer: Need, consumer: Need, host_bytes: int, free_bytes: int
) -> str:
    """What of these needs the machine does not hold in full, "" when it holds all of them.

    `host_bytes` is what the run needs of the host's `free_bytes` beside its processes on CPUs.
    """
    producers = () if placement.alone else placement.producers
    roles = ((producers, producer.total), (placement.consumers, consumer.total))
    for device in dict.fromkeys((*placement.producers, *placement.consumers)):
        needs = [total for devices, total in roles if device in devices]
        if device != "cpu":
            gpu, needed = gpus[int(device.partition(":")[2])], sum(needs) + CONTEXT_BYTES * len(needs)
            if needed > gpu.free_bytes:
                return f"{device} needs up to {show_bytes(needed)}, and {show_bytes(gpu.free_bytes)} of it are free"
    host_bytes += sum(total * devices.count("cpu") for devices, total in roles)
    if host_bytes > free_bytes:
        return f"the run needs up to {show_bytes(host_bytes)} of memory, and {show_bytes(free_bytes)} are free"
    return ""


def occupied(placement: Placement, gpus: Sequence[Gpu]) -> list[str]:
    """One line for each device of `placement` of which somebody else has a part."""
    devices = [device for device in dict.fromkeys((*placement.producers, *placement.consumers)) if device != "cpu"]
    used = {device: _used(gpus[int(device.partition(":")[2])]) for device in devices}
    return [f"{device} is not all ours: {text}" for device, text in used.items() if text]


def _parameters(shape: DrafterShape) -> int:
    return sum(math.prod(size) for size in tensor_shapes(shape).values())


def _used(gpu: Gpu) -> str:
    taken_bytes = gpu.total_bytes - gpu.free_bytes
    if taken_bytes <= max(CONTEXT_BYTES, OCCUPIED_SHARE * gpu.total_bytes):
        return ""
    return f"other processes have {show_bytes(taken_bytes)} of its {show_bytes(gpu.total_bytes)}"


def _refusal(device: str, gpu: Gpu, needs: dict[str, int]) -> str:
    parts = " and ".join(f"{show_bytes(need)} for the {role}" for role, need in needs.items())
    contexts = show_bytes(CONTEXT_BYTES * len(needs))
    advice = "use a smaller target or drafter"
    if len(needs) == 2:
        advice = (
            "lower data.max_length or train.anchors (and train.microbatch_tokens and train.microbatch_draft_tokens, "
            "where they are set), give each role a GPU of its own (gpus.split), or " + advice
        )
    text = f"{parts}, and {contexts} for CUDA itself, do not fit into the {show_bytes(gpu.free_bytes)} that are free"
    if used := _used(gpu):
        advice = "free it, " + advice
        text += f"; {used}"
    return f"gpus: {device} ({gpu.name}): {text}: {advice}"
