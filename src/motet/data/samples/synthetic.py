"""Synthetic classification samples, `synthetic:RULE`, whose class follows from a rule that can be learned.

Sample i of a split depends only on (seed, split, i): a model that does well on held-out samples has learned the rule.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from motet.core.errors import check_input
from motet.core.seeds import derive_seed
from motet.data.corpus.tokenizer import Tokenizer
from motet.data.samples.packing import IntArray, TokenWindows
from motet.data.samples.shuffle_and_mix import UInt64Array, derive_keys, uniform_floats
from motet.data.settings import DataSettings

DEFAULT_SAMPLES = 10_000
LOWERCASE, UPPERCASE = "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NUM_CLASSES = 2


def majority(row_keys: UInt64Array, num_letters: int) -> tuple[IntArray, IntArray]:
    """Letters in any order; the class is 1 if there are more capital letters than small ones, else 0.
    51 to 75 % of the letters are of the larger kind."""
    label, margin = (uniform_floats(row_keys, 2, 0) * [2, -(-num_letters // 4)]).astype(np.int64).T
    majority_count = np.minimum(num_letters // 2 + 1 + margin, num_letters)
    letter_order = uniform_floats(row_keys, num_letters, 1).argsort(axis=1).argsort(axis=1)
    is_capital = (letter_order < majority_count[:, None]) == (label == 1)[:, None]
    letter = (uniform_floats(row_keys, num_letters, 2) * len(LOWERCASE)).astype(np.int64)
    return letter + np.where(is_capital, len(LOWERCASE), 0), label


RULES: dict[str, Callable[[UInt64Array, int], tuple[IntArray, IntArray]]] = {"majority": majority}


@dataclass(frozen=True)
class SyntheticClassificationData:
    """The samples of a rule, spelled in the tokens of a tokenizer."""

    rule: str
    seed: int
    width: int
    letter_ids: IntArray  # [52] the tokens of a-z and A-Z
    begin_id: int | None  # First token of every sample, if the tokenizer has one
    samples_per_split: dict[str, int]

    @property
    def fingerprint(self) -> str:
        return f"made:{self.rule}"

    def count(self, split: str) -> int:
        return self.samples_per_split[split]

    def rows(self, split: str, samples: IntArray) -> TokenWindows:
        """Windows of these samples, which are all full."""
        row_keys = derive_keys(derive_seed(self.seed, "made", self.rule, split), samples)
        begin = 0 if self.begin_id is None else 1
        letters, label = RULES[self.rule](row_keys, self.width - begin)
        tokens = np.full((len(samples), self.width), self.begin_id or 0, dtype=np.int64)
        tokens[:, begin:] = self.letter_ids[letters]
        size, eligible = np.full(len(samples), self.width), np.ones(tokens.shape, np.bool_)
        return TokenWindows(tokens, size, np.zeros_like(tokens), eligible, label)


def check_synthetic_source(source: str, settings: DataSettings) -> str:
    """The rule of `synthetic:RULE`; raises if it is unknown or the settings do not fit it."""
    rule, length = source.removeprefix("synthetic:"), settings.sequence_length
    check_input(rule in RULES, f"data source {source!r}: there is no rule {rule!r}; known: {', '.join(RULES)}")
    remedy = f'but data.objective = {settings.objective!r}; set data.objective = "classify"'
    check_input(settings.objective == "classify", f"data source {source!r} makes samples with a class, {remedy}")
    check_input(length >= 4, f"data.sequence_length = {length} is too short for {source!r}; use at least 4")
    return rule


def open_synthetic_source(
    source: str, settings: DataSettings, tokenizer: Tokenizer, *, seed: int, width: int
) -> SyntheticClassificationData:
    """The samples of `synthetic:RULE` in windows of `width` tokens."""
    count, rule = settings.samples or DEFAULT_SAMPLES, check_synthetic_source(source, settings)
    fractions = {"train": 1.0, "validation": settings.validation_fraction, "test": settings.test_fraction}
    counts = {split: max(1, round(count * fraction)) if fraction else 0 for split, fraction in fractions.items()}
    letter_ids = np.array([tokenizer.encode(letter)[-1] for letter in LOWERCASE + UPPERCASE])
    begin_id = tokenizer.begin_ids[0] if tokenizer.begin_ids else None
    return SyntheticClassificationData(rule, seed, width, letter_ids, begin_id, samples_per_split=counts)
