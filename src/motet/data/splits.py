"""Training, validation and test: which documents belong to which, by a hash of each, so that adding more moves none.

A split that no document falls into still gets something, by a stated rule: of plain text the end of the longest
training document; of records (prompt and answer, or text and class) the one with the smallest hash. It stays empty
when that would leave too little to train on.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet.data.settings import DataSettings

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Segments:
    """Stretches of a corpus that make up a split: whole documents, but for one that was cut."""

    start: NDArray[np.int64]
    """Where each begins in the stream of all tokens."""
    length: NDArray[np.int64]
    skip: NDArray[np.int64]
    """Tokens at its start that are no targets."""
    label: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)

    def take(self, chosen: NDArray[Any]) -> "Segments":
        """The segments of a mask or of numbers."""
        return Segments(self.start[chosen], self.length[chosen], self.skip[chosen], self.label[chosen])


def split_documents(documents: NDArray[Any], settings: DataSettings, records: bool, window: int) -> dict[str, Segments]:
    """The segments of each split of a table of documents; `window` is what a sample of plain text needs."""
    length = documents["length"].astype(np.int64)
    everything = Segments(
        start=np.cumsum(length) - length,
        length=length,
        skip=documents["skip"].astype(np.int64),
        label=documents["label"].astype(np.int64),
    )
    belongs = assign(documents["hash"], settings.validation_fraction, settings.test_fraction)
    wanted = {"validation": settings.validation_fraction, "test": settings.test_fraction}
    if not (belongs == 0).any():
        belongs[:] = 0  # too few documents to be split by number
    if records:
        _move_records(belongs, documents["hash"], [name for name, fraction in wanted.items() if fraction])
    splits = {name: everything.take(belongs == number) for number, name in enumerate(SPLITS)}
    if not records:
        for name, fraction in wanted.items():
            if fraction and not len(splits[name]):
                size = max(window, round(fraction * int(length.sum())))
                splits["train"], splits[name] = _cut_tail(splits["train"], size, keep=window)
    return splits


def assign(hashes: NDArray[np.uint64], validation: float, test: float) -> NDArray[np.int8]:
    """[documents] the number of each one's split in SPLITS, by where its hash lies in 0..1: test, then validation."""
    place = hashes.astype(np.float64) * 2.0**-64
    return np.where(place < test, 2, np.where(place < test + validation, 1, 0)).astype(np.int8)


def _move_records(belongs: NDArray[np.int8], hashes: NDArray[np.uint64], wanted: list[str]) -> None:
    """Give each wanted but empty split the training record with the smallest hash, while two are left to train on."""
    for name in wanted:
        number = SPLITS.index(name)
        train = np.flatnonzero(belongs == 0)
        if not (belongs == number).any() and len(train) > 2:
            belongs[train[np.argmin(hashes[train])]] = number


def _cut_tail(train: Segments, size: int, keep: int) -> tuple[Segments, Segments]:
    """Cut `size` tokens off the end of the longest segment, if at least `keep` stay."""
    longest = int(np.argmax(train.length))
    left = int(train.length[longest]) - size
    if left < keep:
        return train, train.take(np.empty(0, np.int64))
    shorter = train.length.copy()
    shorter[longest] = left
    tail = Segments(
        start=train.start[longest : longest + 1] + left,
        length=np.array([size]),
        skip=np.zeros(1, np.int64),
        label=train.label[longest : longest + 1],
    )
    return Segments(train.start, shorter, train.skip, train.label), tail
