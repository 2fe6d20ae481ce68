"""The walk against a simulated online loop, and the drafter's walk against drafting prompt by prompt."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from consumer import acceptance
from consumer.acceptance import EvalRows, load_eval_rows, measure
from consumer.attention import Layout
from consumer.drafter import Drafter, initialise
from consumer.shape import DrafterShape
from consumer.walk import Answers, Int, bootstrap_interval, per_prompt_means, walk
from protocol.errors import RequestError, RunError

END = 0


def online(greedy: list[int], prompt: int, draft_at: dict[int, list[int]], block: int, limit: int) -> list[int]:
    """What dflash 0.1.0's loop commits: `greedy` is the target's endless continuation (prompt included)."""
    max_length, start, lengths = prompt + limit, prompt, []
    stopped = greedy[start] == END
    while start + 1 < max_length and not stopped:
        size = min(block, max_length - start)
        drafts = draft_at[start][: size - 1]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == greedy[start + 1 + accepted]:
            accepted += 1
        produced = min(accepted + 1, max_length - start - 1)
        for offset, token in enumerate(greedy[start + 1 : start + produced + 1]):
            if token == END:
                produced, stopped = offset + 1, True
                break
        start += produced
        lengths.append(produced)
    return lengths


@given(st.data(), st.integers(2, 6), st.integers(2, 12), st.integers(1, 3))
def test_the_walk_commits_what_the_online_loop_commits(
    data: st.DataObject, block: int, limit: int, prompts: int
) -> None:
    token = st.integers(0, 3)  # few tokens: many accepted drafts, and END (0) turns up early, late or never
    rows, lengths, drafts, expected = [], [], [], []
    for _ in range(prompts):
        prompt = data.draw(st.integers(1, 3))
        greedy = [1] * prompt + data.draw(st.lists(token, min_size=limit + block, max_size=limit + block))
        answer = greedy[prompt : prompt + limit]
        answer = answer[: answer.index(END) + 1] if END in answer else answer
        at = {
            position: data.draw(st.lists(token, min_size=block - 1, max_size=block - 1))
            for position in range(prompt, prompt + len(answer))
        }
        rows.append(greedy[:prompt] + answer)
        lengths.append(prompt)
        drafts.append(at)
        expected.append(tuple(online(greedy, prompt, at, block, limit)))
    offsets = np.cumsum([0, *map(len, rows)])
    answers = Answers(np.concatenate(rows), offsets, np.array(lengths))

    def propose(prompts: Int, anchors: Int, sizes: Int) -> Int:
        # A bidirectional drafter sees how long its block is, so the last one must be short here too.
        left = np.array(lengths)[prompts] + limit - anchors
        assert sizes.tolist() == np.minimum(block, left).tolist()
        return np.array([drafts[p][a] for p, a in zip(prompts.tolist(), anchors.tolist(), strict=True)])

    if not any(expected):
        with pytest.raises(RunError, match="two tokens"):
            walk(answers, propose, block_size=block, max_new_tokens=limit)
        return
    result = walk(answers, propose, block_size=block, max_new_tokens=limit)
    assert result.lengths == tuple(expected)
    assert result.tokens == sum(map(sum, expected))
    assert 1.0 <= result.mean <= block


def test_the_numbers_of_a_small_walk() -> None:
    """Prompt A: drafts always right; prompt B: always wrong. Block 3, seven and four answer tokens."""
    answers = Answers(np.array([9, 1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4]), np.array([0, 8, 13]), np.array([1, 1]))

    def propose(prompts: Int, anchors: Int, _sizes: Int) -> Int:
        right = anchors[:, None] + np.arange(1, 3)
        return np.where(prompts[:, None] == 0, right, -1)

    result = walk(answers, propose, block_size=3, max_new_tokens=100)
    assert result.lengths == ((3, 3), (1, 1, 1))
    assert (result.mean, result.token_weighted, result.prompts, result.tokens) == (2.0, 9 / 5, 2, 9)
    assert result.per_position == (2 / 5, 2 / 5)
    assert result.interval[0] <= 2.0 <= result.interval[1]
    assert per_prompt_means(result).tolist() == [3.0, 1.0]
    shorter = walk(answers, propose, block_size=3, max_new_tokens=4)
    assert shorter.lengths == ((3,), (1, 1, 1))


def test_interval_is_seeded_and_covers() -> None:
    values = np.random.default_rng(0).normal(3.0, 1.0, 128)
    low, high = bootstrap_interval(values, seed=1)
    assert (low, high) == bootstrap_interval(values, seed=1)
    half = 1.96 * values.std(ddof=1) / 128**0.5
    assert low == pytest.approx(values.mean() - half, abs=0.03)
    assert high == pytest.approx(values.mean() + half, abs=0.03)
    assert bootstrap_interval(np.array([2.5]), seed=0) == (2.5, 2.5)


def make_drafter() -> Drafter:
    shape = DrafterShape(
        hidden_size=16,
        target_layer_ids=(1, 3),
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=24,
        block_size=4,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        vocab_size=6,
        mask_token_id=5,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=5,
        is_causal=None,
        num_target_layers=6,
        max_position_embeddings=64,
        eos_token_ids=(0,),
        pad_token_id=None,
        bos_token_id=None,
        input_embedding_scale=1.0,
    )
    drafter = Drafter(shape)
    initialise(drafter, 0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(12.0 if parameter.dim() == 2 else 1.0)
    return drafter


def make_rows() -> EvalRows:
    """Answers over few tokens, so that a random drafter is right now and then; most end at a limit of 26 tokens."""
    generator = np.random.default_rng(1)
    prompt_lengths = np.array([4, 8, 3, 11, 6, 2, 9, 5, 7, 1, 4, 12], np.int32)
    offsets = np.cumsum([0, *(prompt_lengths + 26 - np.array([0, 25, 3] + [0] * 9))])
    tokens = generator.integers(1, 4, offsets[-1]).astype(np.int32)
    features = torch.randn(int(offsets[-1]), 32, generator=torch.Generator().manual_seed(0))
    return EvalRows(Answers(tokens, offsets, prompt_lengths), features, (1, 3), 26)


EMBEDDING = torch.randn(6, 16, generator=torch.Generator().manual_seed(7))
HEAD = torch.randn(6, 16, generator=torch.Generator().manual_seed(8)) * torch.tensor([0, 1, 1, 1, 0, 0])[:, None]


def drafted_alone(rows: EvalRows, prompt: int, limit: int) -> list[int]:
    """One prompt, no batching: context from scratch each round, the last block really cut short."""
    drafter, answers = make_drafter(), rows.answers
    first, last = answers.offsets[prompt : prompt + 2]
    tokens = answers.token_ids[first:last].tolist()
    start, lengths = int(answers.prompt_lengths[prompt]), []
    stop = start + limit
    while start + 1 < len(tokens):
        size = min(4, stop - start)
        context = drafter.context(rows.features[first : first + start], torch.arange(start))
        embedded = drafter.embed(EMBEDDING, torch.tensor([[tokens[start]] + [5] * (size - 1)]))
        layout = Layout(np.array([0, start]), np.array([0]), np.array([start]))
        hidden = drafter(embedded, torch.arange(start, start + size)[None], context, layout)
        drafts = (hidden[0, 1:] @ HEAD.T).argmax(-1).tolist()
        run = 0
        while run < len(drafts) and start + 1 + run < len(tokens) and drafts[run] == tokens[start + 1 + run]:
            run += 1
        lengths.append(min(run + 1, len(tokens) - start - 1))
        start += lengths[-1]
    return lengths


@pytest.mark.parametrize("group_tokens", [1, 60, 1 << 16])
def test_batched_walk_equals_drafting_alone(group_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "GROUP_TOKENS", group_tokens)
    rows = make_rows()
    result = measure(make_drafter(), EMBEDDING, HEAD, rows)
    assert [list(part) for part in result.lengths] == [drafted_alone(rows, prompt, 26) for prompt in range(12)]
    assert max(max(part, default=0) for part in result.lengths) > 1
    assert result.lengths[1] == ()


def test_other_taps_are_refused() -> None:
    rows = make_rows()
    with pytest.raises(RequestError, match=r"\[1, 2\].*\[1, 3\]"):
        measure(make_drafter(), EMBEDDING, HEAD, EvalRows(rows.answers, rows.features, (1, 2), 26))


def test_a_limit_beyond_the_answers_is_refused() -> None:
    with pytest.raises(RequestError, match=r"eval\.max_new_tokens is 27 .* 26"):
        measure(make_drafter(), EMBEDDING, HEAD, make_rows(), max_new_tokens=27)


def test_the_eval_shard_is_read_as_written(tmp_path: Path) -> None:
    rows, path = make_rows(), tmp_path / "eval.safetensors"
    tensors = {
        "token_ids": torch.from_numpy(rows.answers.token_ids),
        "offsets": torch.from_numpy(rows.answers.offsets),
        "prompt_lengths": torch.from_numpy(rows.answers.prompt_lengths),
        "features": rows.features.bfloat16(),
    }
    save_file(tensors, path, metadata={"taps": json.dumps([1, 3]), "max_new_tokens": "26"})
    read = load_eval_rows(path)
    assert (read.taps, read.max_new_tokens) == ((1, 3), 26)
    assert torch.equal(read.features, rows.features.bfloat16())
    assert read.answers.token_ids.tolist() == rows.answers.token_ids.tolist()
    del tensors["offsets"]
    save_file(tensors, path, metadata={"taps": "[1]", "max_new_tokens": "26"})
    with pytest.raises(RequestError, match=r"eval\.safetensors"):
        load_eval_rows(path)
