"""The contents of a chunk as a number: how many times each rank's contribution is in it.

A multiset of ranks is one integer with a field of 16 bits per rank, so that a sum of chunks is a sum of integers. A set
would accept a contribution that was added twice.
"""

from collections.abc import Iterable, Sequence
from functools import cache

from motet.collectives.program import ChunkTransfer, Contributors, Step

_FIELD_BITS = 16
MAX_MULTIPLICITY = (1 << (_FIELD_BITS - 1)) - 1  # The most times that a contribution can be in a chunk

RankContents = list[dict[int, int]]  # For each rank its chunks, with the encoded contributors of each


class InvalidCollectiveProgramError(ValueError):
    """A Program does something impossible."""


def initial_contents(initial: Sequence[Iterable[int]]) -> RankContents:
    """The contents before the first step: each rank's own contributions."""
    return [dict.fromkeys(chunks, encode_contributors((rank,))) for rank, chunks in enumerate(initial)]


def encode_contributors(contributors: Iterable[int]) -> int:
    return sum(1 << (_FIELD_BITS * rank) for rank in contributors)


def decode_contributors(encoded: int) -> Contributors:
    """The ascending ranks, repeated as often as contained."""
    fields = range(encoded.bit_length() // _FIELD_BITS + 1)
    counts = (encoded >> (_FIELD_BITS * rank) & (1 << _FIELD_BITS) - 1 for rank in fields)
    return tuple(rank for rank, count in enumerate(counts) for _ in range(count))


def apply_step(contents: RankContents, step: Step) -> None:
    """Execute one step: read all sources first, then apply the arrivals in order."""
    arriving: list[tuple[ChunkTransfer, list[int]]] = []
    for transfer in step:
        source_chunks = contents[transfer.src]
        try:
            arriving.append((transfer, [source_chunks[chunk] for chunk in transfer.chunks]))
        except KeyError as missing:
            problem = f"rank {transfer.src} has nothing to send, since chunk {missing.args[0]} has not arrived there"
            raise InvalidCollectiveProgramError(f"{transfer}: {problem}") from None
    for transfer, values in arriving:
        destination_chunks = contents[transfer.dst]
        if transfer.op == "copy":
            destination_chunks.update(zip(transfer.chunks, values, strict=True))
            continue
        for chunk, value in zip(transfer.chunks, values, strict=True):
            if chunk not in destination_chunks:
                problem = f"rank {transfer.dst} has nothing to add to, since chunk {chunk} has not arrived there"
                raise InvalidCollectiveProgramError(f"{transfer}: {problem}")
            total = destination_chunks[chunk] = destination_chunks[chunk] + value
            if total & _overflow_mask(total.bit_length() // _FIELD_BITS + 1):
                problem = f"a contribution would be in it more than {MAX_MULTIPLICITY} times"
                raise InvalidCollectiveProgramError(f"{transfer}: {problem}")


@cache
def _overflow_mask(fields: int) -> int:
    """The highest bit of each field, which is set before a field overflows into the next."""
    return encode_contributors(range(fields)) << (_FIELD_BITS - 1)
