"""Labels, supervision and anchors of draft blocks, against tables written by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer.blocks import blocks_at, choose_anchors, document_positions, eligible_anchors


def test_labels_are_the_tokens_at_the_same_position() -> None:
    """N1. Two documents: prompt 10 11, answer 12 13 14 15; prompt 20, answer 21 22. Block of 4, mask token 99."""
    tokens = np.array([10, 11, 12, 13, 14, 15, 20, 21, 22])
    mask = np.array([0, 0, 1, 1, 1, 1, 0, 1, 1])
    offsets = np.array([0, 6, 9])
    document, anchor = choose_anchors(mask, offsets, np.array([7, 8]), anchors=512, seed=0, epoch=0)
    # An anchor needs itself and its successor supervised: the last prompt token (11, 20) is none, nor the last token.
    assert document.tolist() == [0, 0, 0, 1]
    assert anchor.tolist() == [2, 3, 4, 1]
    blocks = blocks_at(document, anchor, tokens, mask, offsets, block_size=4, mask_token_id=99)
    assert blocks.input_ids.tolist() == [[12, 99, 99, 99], [13, 99, 99, 99], [14, 99, 99, 99], [21, 99, 99, 99]]
    assert blocks.positions.tolist() == [[2, 3, 4, 5], [3, 4, 5, 6], [4, 5, 6, 7], [1, 2, 3, 4]]
    assert blocks.labels.tolist() == [[12, 13, 14, 15], [13, 14, 15, -1], [14, 15, -1, -1], [21, 22, -1, -1]]
    assert blocks.supervised.astype(int).tolist() == [[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0]]
    assert [str(part.dtype) for part in (blocks.input_ids, blocks.labels, blocks.supervised)] == [
        "int32",
        "int32",
        "bool",
    ]


def test_unsupervised_tokens_inside_a_block_have_no_loss() -> None:
    tokens, mask = np.arange(6), np.array([1, 1, 0, 0, 1, 1])
    blocks = blocks_at(np.array([0]), np.array([0]), tokens, mask, np.array([0, 6]), block_size=6, mask_token_id=9)
    assert blocks.supervised.astype(int).tolist() == [[0, 1, 0, 0, 1, 1]]
    assert eligible_anchors(mask).tolist() == [0, 4]


def test_every_block_of_a_sample_of_64_tokens() -> None:
    """N1: prompt of 40 tokens, answer of 24, all different, block size 4. No shift by one, and no row past the end."""
    tokens, mask = np.arange(100, 164), (np.arange(64) >= 40).astype(np.uint8)
    offsets = np.array([0, 64])
    document, anchor = choose_anchors(mask, offsets, np.array([0]), anchors=512, seed=0, epoch=0)
    # DESIGN: the last prompt token is none, because it is not supervised itself; nor is the last token of all.
    assert anchor.tolist() == list(range(40, 63))
    blocks = blocks_at(document, anchor, tokens, mask, offsets, block_size=4, mask_token_id=7)
    rows = {int(a): (blocks.input_ids[i], blocks.labels[i], blocks.supervised[i]) for i, a in enumerate(anchor)}
    table = {
        40: ([140, 7, 7, 7], [140, 141, 142, 143], [0, 1, 1, 1]),
        51: ([151, 7, 7, 7], [151, 152, 153, 154], [0, 1, 1, 1]),
        60: ([160, 7, 7, 7], [160, 161, 162, 163], [0, 1, 1, 1]),
        61: ([161, 7, 7, 7], [161, 162, 163, -1], [0, 1, 1, 0]),
        62: ([162, 7, 7, 7], [162, 163, -1, -1], [0, 1, 0, 0]),
    }
    for at, expected in table.items():
        assert tuple(part.astype(int).tolist() for part in rows[at]) == expected


@pytest.mark.parametrize(("answer", "anchors"), [(0, 0), (1, 0), (2, 1), (7, 6), (8, 7), (9, 8)])
def test_short_answers_use_every_usable_token(answer: int, anchors: int) -> None:
    """N3. Block size 8; the answer ends the document. Every supervised token but the first is some block's label."""
    mask = np.array([0] * 3 + [1] * answer)
    offsets = np.array([0, len(mask)])
    document, anchor = choose_anchors(mask, offsets, np.array([0]), anchors=512, seed=0, epoch=0)
    assert len(anchor) == anchors
    blocks = blocks_at(document, anchor, np.arange(len(mask)), mask, offsets, block_size=8, mask_token_id=0)
    reached = set(blocks.labels[blocks.supervised].tolist())
    assert reached == set(range(4, 3 + answer))


def test_every_candidate_is_drawn_equally_often() -> None:
    """N4: 700 candidates, 512 anchors, 2,000 draws."""
    mask, offsets, draws = np.ones(701, np.uint8), np.array([0, 701]), 2000
    seen = np.zeros(701)
    for epoch in range(draws):
        _, anchor = choose_anchors(mask, offsets, np.array([5]), anchors=512, seed=1, epoch=epoch)
        assert len(anchor) == 512
        seen[anchor] += 1
    share = 512 / 700
    sigma = (draws * share * (1 - share)) ** 0.5
    assert seen[700] == 0
    assert np.abs(seen[:700] - draws * share).max() < 5 * sigma


def test_anchors_are_limited_per_document_and_do_not_depend_on_company() -> None:
    """N4: four documents packed; the same seed gives the same anchors."""
    lengths, samples = np.array([40, 30, 3, 50]), np.array([11, 12, 13, 14])
    offsets, mask = np.cumsum([0, *lengths]), np.ones(123, np.uint8)
    document, anchor = choose_anchors(mask, offsets, samples, anchors=10, seed=4, epoch=2)
    assert np.bincount(document).tolist() == [10, 10, 2, 10]
    alone = choose_anchors(mask[:50], np.array([0, 50]), samples[3:], anchors=10, seed=4, epoch=2)[1]
    assert anchor[document == 3].tolist() == alone.tolist()
    again = choose_anchors(mask, offsets, samples, anchors=10, seed=4, epoch=2)
    assert np.array_equal(anchor, again[1])
    other = choose_anchors(mask, offsets, samples, anchors=10, seed=4, epoch=3)
    assert not np.array_equal(anchor, other[1])


def test_quarantined_samples_get_no_anchors_and_an_empty_block_is_legal() -> None:
    mask, offsets, samples = np.ones(20, np.uint8), np.array([0, 10, 20]), np.array([3, 4])
    document, _ = choose_anchors(mask, offsets, samples, anchors=5, seed=0, epoch=0, quarantined={3})
    assert set(document.tolist()) == {1}
    document, anchor = choose_anchors(mask, offsets, samples, anchors=5, seed=0, epoch=0, quarantined={3, 4})
    blocks = blocks_at(document, anchor, np.zeros(20, int), mask, offsets, block_size=4, mask_token_id=1)
    assert blocks.labels.shape == blocks.supervised.shape == (0, 4)
    none = np.empty(0, np.int64)
    document, anchor = choose_anchors(none, np.array([0]), none, anchors=5, seed=0, epoch=0)
    assert len(document) == len(anchor) == 0


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=4), st.integers(2, 6))
def test_every_block_obeys_the_rules(masks: list[list[bool]], block_size: int) -> None:
    offsets = np.cumsum([0, *map(len, masks)])
    mask = np.concatenate([np.array(part, np.uint8) for part in masks])
    tokens = np.arange(len(mask)) + 100
    document, anchor = choose_anchors(mask, offsets, np.arange(len(masks)), anchors=3, seed=0, epoch=0)
    blocks = blocks_at(document, anchor, tokens, mask, offsets, block_size=block_size, mask_token_id=7)
    for row, (d, a) in enumerate(zip(document, anchor, strict=True)):
        assert masks[d][a]
        assert masks[d][a + 1]
        for k in range(block_size):
            inside = a + k < len(masks[d])
            assert blocks.labels[row, k] == (tokens[offsets[d] + a + k] if inside else -1)
            assert blocks.supervised[row, k] == (k > 0 and inside and masks[d][a + k])
            assert blocks.input_ids[row, k] == (7 if k else tokens[offsets[d] + a])


def test_positions_restart_in_every_document() -> None:
    assert document_positions(np.array([0, 3, 3, 5])).tolist() == [0, 1, 2, 0, 1]
