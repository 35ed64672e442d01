"""Made samples: the rule holds for each, they are all different, and each depends on seed, split and number alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import InputError
from motet.data.corpus.tokenizer import load_tokenizer
from motet.data.samples.dataset import SyntheticClassificationData, check_synthetic_source, open_synthetic_source
from motet.data.settings import DataSettings

BYTES = load_tokenizer("bytes")


def made(seed: int = 0, width: int = 31, **settings: Any) -> SyntheticClassificationData:
    given = DataSettings(objective="classify", tokenizer="bytes", **settings)
    return open_synthetic_source("synthetic:majority", given, BYTES, seed=seed, width=width)


@given(st.integers(0, 2**60), st.integers(3, 80))
def test_the_class_is_the_kind_that_appears_more_often(seed: int, width: int) -> None:
    rows = made(seed, width).rows("train", np.arange(20))
    for tokens, label in zip(rows.tokens, rows.label, strict=True):
        text = BYTES.decode(tokens.tolist())
        assert len(text) == width and text.isalpha()
        capitals = sum(letter.isupper() for letter in text)
        assert label == (capitals > width - capitals) and capitals * 2 != width


def test_a_sample_depends_on_seed_split_and_number_alone() -> None:
    everything = made().rows("train", np.arange(100))
    some = made(samples=50).rows("train", np.array([70, 3]))
    assert some.tokens.tolist() == everything.tokens[[70, 3]].tolist()
    assert some.label.tolist() == everything.label[[70, 3]].tolist()
    others = [made(1).rows("train", np.arange(100)), made().rows("validation", np.arange(100))]
    assert all((everything.tokens != other.tokens).any(axis=1).all() for other in others)
    assert len(np.unique(everything.tokens, axis=0)) == 100


def test_classes_and_letters_are_even() -> None:
    rows = made().rows("train", np.arange(10_000))
    assert abs(rows.label.mean() - 0.5) < 0.025  # five standard deviations
    letters = np.bincount(rows.tokens.ravel())
    assert np.count_nonzero(letters) == 52 and letters[letters > 0].min() > 0.9 * letters.max()


def test_no_single_place_gives_the_class_away() -> None:
    rows = made().rows("train", np.arange(10_000))
    capital = rows.tokens < ord("a")
    agrees = (capital == rows.label[:, None].astype(bool)).mean(axis=0)
    assert agrees.max() < 0.68 and agrees.min() > 0.58


def test_counts() -> None:
    assert made().samples_per_split == {"train": 10_000, "validation": 100, "test": 100}
    assert made(samples=30, test_fraction=0.0).samples_per_split == {"train": 30, "validation": 1, "test": 0}


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("synthetic:minority", {"objective": "classify"}, r"there is no rule 'minority'; known: majority"),
        ("synthetic:majority", {}, r"makes samples with a class, but data\.objective = 'causal'"),
        (
            "synthetic:majority",
            {"objective": "classify", "sequence_length": 3},
            "is too short for 'synthetic:majority'",
        ),
    ],
)
def test_refused(source: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_synthetic_source(source, DataSettings(**settings))
