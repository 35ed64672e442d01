"""Splits: stable when documents are added, disjoint, complete, and never silently empty."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.data.corpus.token_store import DOCUMENT_DTYPE
from motet.data.samples.packing import SPLITS, SplitTokenRanges, assign_splits, split_documents
from motet.data.samples.shuffle_and_mix import derive_keys
from motet.data.settings import DataSettings

HASHES = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=60, unique=True)


def table(hashes: list[int], length: int = 10) -> np.ndarray:
    documents = np.zeros(len(hashes), DOCUMENT_DTYPE)
    documents["hash"] = np.array(hashes, np.uint64)
    documents["length"] = length
    documents["label"] = np.arange(len(hashes))
    return documents


def split(
    documents: np.ndarray, validation: float = 0.01, test: float = 0.01, *, records: bool, window: int = 8
) -> dict[str, SplitTokenRanges]:
    settings = DataSettings(validation_fraction=validation, test_fraction=test)
    return split_documents(documents, settings, has_records=records, window=window)


@given(HASHES, st.floats(0, 0.4), st.floats(0, 0.4), st.data())
def test_adding_documents_moves_none(hashes: list[int], validation: float, test: float, data: st.DataObject) -> None:
    fewer = data.draw(st.integers(1, len(hashes)))
    before = assign_splits(np.array(hashes[:fewer], np.uint64), validation, test)
    assert before.tolist() == assign_splits(np.array(hashes, np.uint64), validation, test)[:fewer].tolist()


@given(HASHES, st.floats(0, 0.4), st.floats(0, 0.4), st.booleans(), st.integers(1, 15))
def test_every_token_is_in_exactly_one_split(
    hashes: list[int], validation: float, test: float, records: bool, window: int
) -> None:
    splits = split(table(hashes), validation, test, records=records, window=window)
    spans = [span for name in SPLITS for span in zip(splits[name].start, splits[name].length, strict=True)]
    tokens = [token for start, length in spans for token in range(start, start + length)]
    assert sorted(tokens) == list(range(10 * len(hashes))) and len(splits["train"]) > 0


def test_fractions_are_kept() -> None:
    splits = split(table(derive_keys(0, np.arange(20_000)).tolist()), 0.1, 0.05, records=True)
    # Five standard deviations of a share of 20,000.
    assert abs(len(splits["validation"]) - 2000) < 5 * 42.5 and abs(len(splits["test"]) - 1000) < 5 * 31


def test_a_single_text_gives_its_end() -> None:
    splits = split(table([2**63], length=1000), 0.1, 0.02, records=False, window=33)
    spans = {name: (splits[name].start.tolist(), splits[name].length.tolist()) for name in SPLITS}
    assert spans == {"train": ([0], [867]), "validation": ([900], [100]), "test": ([867], [33])}


@pytest.mark.parametrize("length", [33, 64, 65])
def test_too_short_a_text_is_all_for_training(length: int) -> None:
    splits = split(table([2**63], length), records=False, window=33)
    assert int(splits["train"].length.sum()) == length and len(splits["validation"]) == 0


def test_little_text_is_trained_on_before_it_is_held_out() -> None:
    assert split(table([0], length=1000), records=False, window=10)["train"].start.tolist() == [0]
    high = [2**63 + i for i in range(5)]
    splits = split(table([high[3], high[1], high[4], high[2]]), records=True, window=8)
    assert splits["validation"].label.tolist() == [1] and splits["test"].label.tolist() == [3]
    assert splits["train"].label.tolist() == [0, 2]
    splits = split(table([2**63, 2**63 + 1]), records=True, window=8)
    assert {name: len(splits[name]) for name in SPLITS} == {"train": 2, "validation": 0, "test": 0}


def test_a_split_that_is_not_wanted_stays_empty() -> None:
    for records in (True, False):
        splits = split(table([0, 1, 2**63, 2**64 - 1], 100), 0.0, 0.0, records=records)
        assert {name: len(splits[name]) for name in SPLITS} == {"train": 4, "validation": 0, "test": 0}
