"""Our walk against two online loops on the same tiny target: the DFlash authors' package, and one written here.

A drafter is fitted a little to the target's own greedy answers (so that accepted lengths vary), exported, and loaded
by both. All loops are lossless, so their text must be plain greedy text too.
"""

import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from consumer.acceptance import EvalRows, measure
from consumer.attention import Layout
from consumer.blocks import blocks_at, choose_anchors, document_positions
from consumer.config import DrafterConfig
from consumer.drafter import Drafter, initialise, load
from consumer.export import export, load_export
from consumer.loss import draft_loss
from consumer.shape import DrafterShape, resolve_shape
from consumer.walk import Answers

VOCAB, NEW_TOKENS, BLOCK = 48, 37, 6
PROMPTS = [[3, 9, 4], [7, 7, 1, 5, 30, 2, 8, 11], [12], [40, 2, 19, 33, 6], [21, 22], [5, 1, 5, 1, 5]]
KINDS = {"full": {}, "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}}


@dataclass(frozen=True)
class Case:
    target: nn.Module
    shape: DrafterShape
    stop: int
    rows: EvalRows
    folder: Path


def make_target(family: str) -> nn.Module:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        # Far above the usual 0.02: a random target then says something other than one token for ever.
        "initializer_range": 0.4,
    }
    torch.manual_seed(11)
    kinds = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
        "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
    }
    model, config = kinds[family]
    built: nn.Module = model(config(**sizes)).eval()
    return built


@torch.inference_mode()
def greedy(target: nn.Module, prompt: list[int], stop: int | None) -> list[int]:
    """Plain greedy decoding, the whole sequence again for every token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + NEW_TOKENS and (len(tokens) == len(prompt) or tokens[-1] != stop):
        tokens.append(int(target(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens


@torch.inference_mode()
def features(target: nn.Module, tokens: list[int], taps: tuple[int, ...]) -> Tensor:
    states = target(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[tap + 1][0] for tap in taps], dim=-1).clone()


def fit(drafter: Drafter, rows: EvalRows, target: nn.Module) -> None:
    """Sixty steps on the eval rows themselves, answers supervised."""
    answers = rows.answers
    mask = np.ones(len(answers.token_ids), np.uint8)
    for first, length in zip(answers.offsets, answers.prompt_lengths, strict=False):
        mask[first : first + length] = 0
    embedding = target.get_input_embeddings().weight.detach()  # type: ignore[operator]
    head = target.get_output_embeddings().weight.detach()  # type: ignore[operator]
    positions = torch.from_numpy(document_positions(answers.offsets))
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=4e-3)
    samples = np.arange(len(answers.prompt_lengths))
    for epoch in range(60):
        where = choose_anchors(mask, answers.offsets, samples, anchors=8, seed=0, epoch=epoch)
        blocks = blocks_at(
            *where,
            answers.token_ids,
            mask,
            answers.offsets,
            block_size=BLOCK,
            mask_token_id=drafter.shape.mask_token_id,
        )
        embedded = drafter.embed(embedding, torch.from_numpy(blocks.input_ids))
        context = drafter.context(rows.features, positions)
        hidden = drafter(embedded, torch.from_numpy(blocks.positions), context, Layout(answers.offsets, *where))
        parts = draft_loss(hidden, head, torch.from_numpy(blocks.labels), torch.from_numpy(blocks.supervised))
        optimiser.zero_grad()
        (parts.loss / parts.denominator).backward()  # type: ignore[no-untyped-call]
        optimiser.step()


@pytest.fixture(
    scope="module", params=[("qwen3", "full"), ("qwen3", "sliding"), ("llama", "full"), ("llama", "sliding")]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, kind = request.param
    target = make_target(family)
    stop = greedy(target, PROMPTS[0], None)[len(PROMPTS[0]) + 20]
    config = {
        "hidden_size": 32,
        "num_layers": 6,
        "vocab_size": VOCAB,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e3,
        "max_position_embeddings": 256,
        "eos_token_id": stop,
    }
    wanted = DrafterConfig(layers=2, block_size=BLOCK, **KINDS[kind])  # type: ignore[arg-type]
    shape = resolve_shape(wanted, config, [token for token in range(VOCAB) if token != stop])
    texts = [greedy(target, prompt, stop) for prompt in PROMPTS]
    rows = EvalRows(
        Answers(
            np.concatenate(texts).astype(np.int32),
            np.cumsum([0, *map(len, texts)]),
            np.array([len(p) for p in PROMPTS]),
        ),
        torch.cat([features(target, text, shape.target_layer_ids) for text in texts]),
        shape.target_layer_ids,
        NEW_TOKENS,
    )
    drafter = Drafter(shape)
    initialise(drafter, 0)
    fit(drafter, rows, target)
    folder = tmp_path_factory.mktemp("oracle") / "export"
    export(dict(drafter.state_dict()), shape, folder, {"target": family})
    return Case(target, shape, stop, rows, folder)


def our_drafter(case: Case) -> Drafter:
    weights, shape, _ = load_export(case.folder)
    drafter = Drafter(shape)
    load(drafter, weights)
    return drafter


def walked(case: Case, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    embedding = case.target.get_input_embeddings().weight.detach()  # type: ignore[operator]
    head = case.target.get_output_embeddings().weight.detach()  # type: ignore[operator]
    result = measure(our_drafter(case), embedding, head, case.rows, max_new_tokens=new_tokens)
    return [list(part) for part in result.lengths]


def test_the_authors_package_accepts_the_same_lengths(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = pytest.importorskip("dflash.model")
    monkeypatch.setattr(
        oracle, "_cuda_time", time.perf_counter
    )  # it synchronises a CUDA device when asked for statistics
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was written for another transformers release
        draft, report = oracle.DFlashDraftModel.from_pretrained(
            case.folder, dtype=torch.float32, output_loading_info=True
        )
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        for new_tokens in (NEW_TOKENS, 9):
            lengths = []
            for prompt in PROMPTS:
                out = oracle.dflash_generate(
                    draft.eval(), case.target, torch.tensor([prompt]), new_tokens, [case.stop], return_stats=True
                )
                lengths.append(out.acceptance_lengths)
                assert out.output_ids[0].tolist() == greedy(case.target, prompt, case.stop)[: len(prompt) + new_tokens]
            assert walked(case, new_tokens) == lengths


def test_the_authors_package_computes_the_same_hidden_states(case: Case) -> None:
    oracle = pytest.importorskip("dflash.model")
    draft = oracle.DFlashDraftModel.from_pretrained(case.folder, dtype=torch.float32).eval()
    drafter, states = our_drafter(case), case.rows.features[:25]
    embedded = torch.randn(1, BLOCK, 32, generator=torch.Generator().manual_seed(0))
    layout = Layout(np.array([0, 25]), np.array([0]), np.array([25]))
    with torch.inference_mode():
        ours = drafter(embedded, torch.arange(25, 25 + BLOCK)[None], drafter.context(states, torch.arange(25)), layout)
        theirs = draft(
            position_ids=torch.arange(25 + BLOCK)[None], noise_embedding=embedded, target_hidden=states[None]
        )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def draft_verify_commit(case: Case, drafter: Drafter, prompt: list[int]) -> tuple[list[int], list[int]]:
    """(text, accepted lengths): no cache anywhere, features from the text as it stands, one block at a time."""
    target, taps, mask = case.target, case.shape.target_layer_ids, case.shape.mask_token_id
    text = [*prompt, int(target(torch.tensor([prompt]), use_cache=False).logits[0, -1].argmax())]
    limit, lengths = len(prompt) + NEW_TOKENS, []
    while len(text) < limit and text[-1] != case.stop:
        anchor = len(text) - 1
        size = min(BLOCK, limit - anchor)
        context = drafter.context(features(target, text[:anchor], taps), torch.arange(anchor))
        ids = torch.tensor([[text[-1]] + [mask] * (size - 1)])
        embedded = drafter.embed(target.get_input_embeddings().weight, ids)  # type: ignore[operator]
        layout = Layout(np.array([0, anchor]), np.array([0]), np.array([anchor]))
        hidden = drafter(embedded, torch.arange(anchor, anchor + size)[None], context, layout)
        drafts = target.get_output_embeddings()(hidden[0, 1:]).argmax(-1).tolist()  # type: ignore[operator]
        verified = target(torch.tensor([text + drafts]), use_cache=False).logits[0, anchor:].argmax(-1).tolist()
        before = len(text)
        for draft, truth in zip([*drafts, None], verified, strict=True):
            text.append(truth)
            if draft != truth or truth == case.stop or len(text) == limit:
                break
        lengths.append(len(text) - before)
    return text, lengths


def test_an_independent_loop_accepts_the_same_lengths(case: Case) -> None:
    drafter = our_drafter(case)
    outcomes = [draft_verify_commit(case, drafter, prompt) for prompt in PROMPTS]
    assert [text for text, _ in outcomes] == [greedy(case.target, prompt, case.stop) for prompt in PROMPTS]
    lengths = walked(case)
    assert lengths == [part for _, part in outcomes]
    # The comparison means something: blocks of many lengths, one early end, one end by the limit, beyond the window.
    assert len({length for part in lengths for length in part}) >= 3
    ends = [len(text) - len(prompt) for (text, _), prompt in zip(outcomes, PROMPTS, strict=True)]
    assert min(ends) < NEW_TOKENS == max(ends)
