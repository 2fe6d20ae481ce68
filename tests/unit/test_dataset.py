from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.dataset import Sample, TokenDataset, eligible_anchors, write_dataset
from protocol.errors import RequestError


def sample(ids: list[int], mask: list[int]) -> Sample:
    return np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.uint8)


SAMPLES = [sample([5, 6, 7], [0, 1, 1]), sample([9], [1]), sample([1, 2, 3, 4], [1, 1, 0, 1])]


def test_round_trip_and_counts(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "d", iter(SAMPLES), {"fingerprint": "f", "settings": {"a": 1}})
    assert len(dataset) == 3
    assert dataset.fingerprint == "f"
    assert dataset.lengths.dtype == dataset.eligible.dtype == np.int64
    assert dataset.lengths.tolist() == [3, 1, 4]
    assert dataset.eligible.tolist() == [1, 0, 1]
    for place, (ids, mask) in enumerate(SAMPLES):
        assert dataset.tokens(place).dtype == np.int32
        assert dataset.mask(place).dtype == np.uint8
        assert dataset.tokens(place).tolist() == ids.tolist()
        assert dataset.mask(place).tolist() == mask.tolist()
    assert dataset.occurring_ids().tolist() == [1, 2, 3, 4, 5, 6, 7, 9]
    counts = {key: dataset.meta[key] for key in ("samples", "tokens", "supervised_tokens", "eligible_anchors")}
    assert counts == {"samples": 3, "tokens": 8, "supervised_tokens": 6, "eligible_anchors": 2}


def test_meta_may_be_filled_while_samples_are_drawn(tmp_path: Path) -> None:
    meta = {"fingerprint": "f"}

    def draw() -> object:
        yield SAMPLES[0]
        meta["late"] = "yes"

    assert write_dataset(tmp_path / "d", draw(), meta).meta["late"] == "yes"  # type: ignore[arg-type]


def test_failed_write_leaves_the_old_dataset_and_no_litter(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", SAMPLES, {"fingerprint": "old"})

    def broken() -> object:
        yield SAMPLES[0]
        raise RequestError("row 2 is bad")

    with pytest.raises(RequestError, match="row 2"):
        write_dataset(tmp_path / "d", broken(), {"fingerprint": "new"})  # type: ignore[arg-type]
    assert TokenDataset.open(tmp_path / "d").fingerprint == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_rewriting_keeps_what_an_open_reader_maps(tmp_path: Path) -> None:
    reader = write_dataset(tmp_path / "d", SAMPLES, {"fingerprint": "old"})
    write_dataset(tmp_path / "d", [sample([0, 0], [1, 1])], {"fingerprint": "new"})
    assert reader.tokens(0).tolist() == [5, 6, 7]
    assert TokenDataset.open(tmp_path / "d").tokens(0).tolist() == [0, 0]


@pytest.mark.parametrize("damage", ["tokens.bin", "mask.bin", "offsets.npy", "anchors.npy", "meta.json"])
def test_cut_file_is_refused(tmp_path: Path, damage: str) -> None:
    write_dataset(tmp_path / "d", SAMPLES, {"fingerprint": "f"})
    path = tmp_path / "d" / damage
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RequestError, match="prepare"):
        TokenDataset.open(tmp_path / "d")


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="draftwire prepare"):
        TokenDataset.open(tmp_path / "nothing")
    (tmp_path / "meta.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(RequestError, match="not a token dataset"):
        TokenDataset.open(tmp_path)


@given(st.lists(st.integers(0, 1), max_size=40))
def test_eligible_anchors_need_themselves_and_their_successor(flags: list[int]) -> None:
    expected = sum(flags[a] and flags[a + 1] for a in range(len(flags) - 1))
    assert eligible_anchors(np.asarray(flags, dtype=np.uint8)) == expected
