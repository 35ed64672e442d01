"""Made classification samples, `made:RULE`: as many as wanted, whose class follows from a rule that can be learned.

Sample i of a split depends on (seed, split, i) only, so held-out samples are as new as training samples, and a model
that does well on them has learned the rule.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from motet.core.errors import InputError
from motet.core.seeds import derive_seed
from motet.data.draws import Words, keys, uniforms
from motet.data.packing import Ints, Rows
from motet.data.settings import DataSettings
from motet.data.tokens import Tokenizer

SAMPLES = 10_000
SMALL, CAPITAL = "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CLASSES = 2


def majority(row_keys: Words, width: int) -> tuple[Ints, Ints]:
    """Letters in any order; the class is 1 when there are more capital letters than small ones, else 0.

    51 to 75 % of the letters are of the larger kind.
    """
    label, margin = (uniforms(row_keys, 2, 0) * [2, -(-width // 4)]).astype(np.int64).T
    larger = np.minimum(width // 2 + 1 + margin, width)
    rank = uniforms(row_keys, width, 1).argsort(axis=1).argsort(axis=1)
    capital = (rank < larger[:, None]) == (label == 1)[:, None]
    letter = (uniforms(row_keys, width, 2) * len(SMALL)).astype(np.int64)
    return letter + np.where(capital, len(SMALL), 0), label


RULES: dict[str, Callable[[Words, int], tuple[Ints, Ints]]] = {"majority": majority}


@dataclass(frozen=True)
class Made:
    """The samples of a rule, spelled in the tokens of a tokenizer."""

    rule: str
    seed: int
    width: int
    letters: Ints
    """[52] the tokens of a-z and A-Z."""
    first: int | None
    """A token that every sample starts with, where the tokenizer puts one."""
    counts: dict[str, int]

    @property
    def fingerprint(self) -> str:
        return f"made:{self.rule}"

    def count(self, split: str) -> int:
        return self.counts[split]

    def rows(self, split: str, samples: Ints) -> Rows:
        """These samples; all are as long as a window."""
        row_keys = keys(derive_seed(self.seed, "made", self.rule, split), samples)
        begin = 0 if self.first is None else 1
        letters, label = RULES[self.rule](row_keys, self.width - begin)
        tokens = np.full((len(samples), self.width), self.first or 0, dtype=np.int64)
        tokens[:, begin:] = self.letters[letters]
        return Rows(
            tokens=tokens,
            size=np.full(len(samples), self.width),
            segment=np.zeros_like(tokens),
            eligible=np.ones(tokens.shape, np.bool_),
            label=label,
        )


def check_made(source: str, settings: DataSettings) -> str:
    """The rule of `made:RULE`, or a sentence about what does not fit it."""
    rule = source.removeprefix("made:")
    if rule not in RULES:
        raise InputError(f"data source {source!r}: there is no rule {rule!r}; known: {', '.join(RULES)}")
    if settings.objective != "classify":
        raise InputError(
            f"data source {source!r} makes samples with a class, but data.objective = {settings.objective!r}; "
            'set data.objective = "classify"'
        )
    if settings.sequence_length < 4:
        raise InputError(
            f"data.sequence_length = {settings.sequence_length} is too short for {source!r}; use at least 4"
        )
    return rule


def open_made(source: str, settings: DataSettings, tokenizer: Tokenizer, seed: int, width: int) -> Made:
    """The samples of `made:RULE` in windows of `width` tokens."""
    made = settings.samples or SAMPLES
    fractions = {"validation": settings.validation_fraction, "test": settings.test_fraction}
    held_out = {name: max(1, round(made * fraction)) if fraction else 0 for name, fraction in fractions.items()}
    return Made(
        rule=check_made(source, settings),
        seed=seed,
        width=width,
        letters=np.array([tokenizer.encode(letter)[-1] for letter in SMALL + CAPITAL]),
        first=tokenizer.begin_ids[0] if tokenizer.begin_ids else None,
        counts={"train": made, **held_out},
    )
