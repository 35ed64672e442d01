"""What a chunk is made of, as a number: how many times each rank's contribution is in it.

A multiset of ranks is one integer with a field of 16 bits per rank, so that a sum of chunks is a sum of integers. A set
would not do: it takes a contribution that was added twice for a right one.
"""

from collections.abc import Iterable, Sequence

from motet.collectives.score import Contributors, Step, Transfer

_BITS = 16
MOST = (1 << (_BITS - 1)) - 1
"""How often one contribution can be in a chunk."""

Held = list[dict[int, int]]
"""For each rank the chunks that it holds, and what each is made of."""


class FaultError(ValueError):
    """What is wrong with a Program: a sentence."""


class AbsentError(FaultError):
    """A chunk is read or added to that is not there."""

    def __init__(self, transfer: Transfer, rank: int, chunk: int) -> None:
        verb = "has nothing to send" if rank == transfer.src else "has nothing to add to"
        super().__init__(f"{transfer}: rank {rank} {verb}, since chunk {chunk} has not arrived there")


def start(initial: Sequence[Iterable[int]]) -> Held:
    """Each rank holds what it contributes."""
    return [{chunk: one(rank) for chunk in chunks} for rank, chunks in enumerate(initial)]


def one(rank: int) -> int:
    return 1 << (_BITS * rank)


def count(contributors: Iterable[int]) -> int:
    return sum(map(one, contributors))


def contributors(total: int) -> Contributors:
    """The ranks in order, each as often as it is there."""
    found: list[int] = []
    rank = 0
    while total:
        found += [rank] * (total & (1 << _BITS) - 1)
        total >>= _BITS
        rank += 1
    return tuple(found)


def play(held: Held, step: Step) -> None:
    """One step: everything is read first, then what has arrived is applied in order."""
    arriving: list[tuple[Transfer, list[int]]] = []
    for transfer in step:
        at_source = held[transfer.src]
        try:
            arriving.append((transfer, [at_source[chunk] for chunk in transfer.chunks]))
        except KeyError as missing:
            raise AbsentError(transfer, transfer.src, missing.args[0]) from None
    for transfer, values in arriving:
        there = held[transfer.dst]
        if transfer.op == "copy":
            there.update(zip(transfer.chunks, values, strict=True))
            continue
        for chunk, value in zip(transfer.chunks, values, strict=True):
            if chunk not in there:
                raise AbsentError(transfer, transfer.dst, chunk)
            there[chunk] = _sum(there[chunk], value, transfer)


def _sum(a: int, b: int, transfer: Transfer) -> int:
    total = a + b
    if total & _guards(total.bit_length() // _BITS + 1):
        raise FaultError(f"{transfer}: a contribution would be in it more than {MOST} times")
    return total


_guard_masks: dict[int, int] = {}


def _guards(fields: int) -> int:
    """The highest bit of each field: set before a field can run over into the next."""
    if fields not in _guard_masks:
        _guard_masks[fields] = count(range(fields)) << (_BITS - 1)
    return _guard_masks[fields]
