"""Documents of the training, validation and test splits, by a hash of each, so that adding more moves none.
An empty split of plain text gets the end of the longest training document; an empty split of records (prompt and
answer, or text and class) the record with the smallest hash. It stays empty if too little would be left to train on."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet.data.settings import DataSettings

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class SplitTokenRanges:
    """Token ranges of a split: complete documents, except for one that may be cut."""

    start: NDArray[np.int64]  # Begin of each in the stream of all tokens
    length: NDArray[np.int64]
    skip: NDArray[np.int64]  # Tokens at its start that are never targets
    label: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)

    def take(self, chosen: NDArray[Any]) -> "SplitTokenRanges":
        """The segments of a mask or of indices."""
        return SplitTokenRanges(self.start[chosen], self.length[chosen], self.skip[chosen], self.label[chosen])


def split_documents(
    documents: NDArray[Any], settings: DataSettings, *, has_records: bool, window: int
) -> dict[str, SplitTokenRanges]:
    """The segments of each split of a table of documents; `window` is the size of a sample of plain text."""
    length, skip, label = (documents[name].astype(np.int64) for name in ("length", "skip", "label"))
    all_segments = SplitTokenRanges(np.cumsum(length) - length, length, skip, label)
    fractions = {"validation": settings.validation_fraction, "test": settings.test_fraction}
    split_ids = assign_splits(documents["hash"], **fractions)
    if not (split_ids == 0).any():
        split_ids[:] = 0  # too few documents to split by hash
    for split_id in [SPLITS.index(name) for name, fraction in fractions.items() if fraction and has_records]:
        train = np.flatnonzero(split_ids == 0)
        if not (split_ids == split_id).any() and len(train) > 2:
            split_ids[train[np.argmin(documents["hash"][train])]] = split_id
    splits = {name: all_segments.take(split_ids == split_id) for split_id, name in enumerate(SPLITS)}
    for name, fraction in fractions.items():
        if not has_records and fraction and not len(splits[name]):
            size = max(window, round(fraction * int(length.sum())))
            splits["train"], splits[name] = _cut_tail(splits["train"], size, keep=window)
    return splits


def assign_splits(hashes: NDArray[np.uint64], validation: float, test: float) -> NDArray[np.int8]:
    """[documents] the index of each document's split in SPLITS, by its hash as a number in 0..1."""
    hash_fraction = hashes.astype(np.float64) * 2.0**-64
    return np.where(hash_fraction < test, 2, np.where(hash_fraction < test + validation, 1, 0)).astype(np.int8)


def _cut_tail(train: SplitTokenRanges, size: int, keep: int) -> tuple[SplitTokenRanges, SplitTokenRanges]:
    """Cut `size` tokens off the end of the longest segment, if at least `keep` stay."""
    longest = int(np.argmax(train.length))
    remaining = int(train.length[longest]) - size
    if remaining < keep:
        return train, train.take(np.empty(0, np.int64))
    zero, label = np.zeros(1, np.int64), train.label[[longest]]
    tail = SplitTokenRanges(train.start[[longest]] + remaining, np.array([size]), skip=zero, label=label)
    return replace(train, length=np.where(np.arange(len(train)) == longest, remaining, train.length)), tail
