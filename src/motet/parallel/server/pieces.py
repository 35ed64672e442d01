"""Parameters cut into pieces, and pieces spread over servers so that none has much more to send than another.

A piece is a part of one bucket: small parameters share one, and one that is larger than a piece is cut. Pieces are
numbered in the order of the buckets, that is in the order in which backward has their gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from motet.core.errors import InputError
from motet.parallel.buckets import ALIGN_ELEMENTS, Bucket


@dataclass(frozen=True)
class ServedPiece:
    """What is pushed and pulled as one."""

    bucket: int
    place: slice
    """In the flat tensors."""
    server: int

    @property
    def numel(self) -> int:
        count: int = self.place.stop - self.place.start
        return count


def cut_pieces(buckets: Sequence[Bucket], most: int, servers: int) -> tuple[ServedPiece, ...]:
    """Pieces of up to `most` numbers, each to the server that has least until then."""
    found: list[ServedPiece] = []
    held = [0] * servers
    for number, bucket in enumerate(buckets):
        count = ceil(bucket.length / most)
        size = ceil(bucket.length / count / ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        for first in range(bucket.start, bucket.stop, size):
            place = slice(first, min(first + size, bucket.stop))
            server = min(range(servers), key=lambda s: held[s])
            held[server] += place.stop - place.start
            found.append(ServedPiece(number, place, server))
    if servers > len(found):
        raise InputError(
            f"layout.server.count = {servers} is more than the pieces that parameters are cut into, {len(found)}; take "
            "fewer servers, or smaller pieces (layout.server.piece_mib)"
        )
    return tuple(found)
