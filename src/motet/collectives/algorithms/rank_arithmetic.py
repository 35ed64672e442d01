"""Ranks as powers of two, on grids and on hosts, and checks of an algorithm's options."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isqrt, prod

from motet.core.errors import InputError, check_input

# The most on all ranks together: a piece is a few transfers of some hundred bytes on each rank.
_MAX_TOTAL_PIECES = 2**18


def doubling_rounds(ranks: int) -> int:
    """The number of doublings that reach all ranks: log2(ranks), rounded up."""
    return (ranks - 1).bit_length()


def floor_power_of_two(ranks: int) -> int:
    """The largest power of two up to `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def is_composite(ranks: int) -> bool:
    return len(prime_factors(ranks)) >= 2


def prime_factors(number: int) -> list[int]:
    """The ascending primes whose product is the number."""
    for divisor in range(2, isqrt(number) + 1):
        if number % divisor == 0:
            return [divisor, *prime_factors(number // divisor)]
    return [number] if number > 1 else []


def grid_dims(ranks: int, dims: Sequence[int] | None, axes: int | None) -> tuple[int, ...]:
    """The lengths of a grid of ranks: `dims`, or the most even ones."""
    if dims is None:
        assert axes is not None
        lengths = [1] * axes
        for prime in reversed(prime_factors(ranks)):
            lengths[lengths.index(min(lengths))] *= prime
        return tuple(sorted(lengths))
    check_input(axes is None or len(dims) == axes, f"dims {format_dims(dims)}: this algorithm has {axes} dimensions")
    if prod(dims) != ranks or min(dims) < 2:
        example = grid_dims(ranks, None, min(2, len(prime_factors(ranks))))
        remedy = "give lengths of at least 2 with this product, for example"
        raise InputError(f"dims {format_dims(dims)} are not a grid of {ranks} ranks; {remedy} {format_dims(example)}")
    return tuple(dims)


def format_dims(dims: Iterable[int]) -> str:
    return "x".join(map(str, dims))


def hosts_and_ranks_per_host(ranks: int, hosts: int | None) -> tuple[int, int]:
    """(hosts, ranks in each): `hosts`, or as even as possible."""
    if hosts is None:
        hosts = grid_dims(ranks, None, 2)[0]
    if not 1 <= hosts <= ranks or ranks % hosts:
        possible = ", ".join(str(count) for count in range(1, ranks + 1) if ranks % count == 0)
        raise InputError(f"hosts {hosts}: not a divisor of {ranks} ranks; give one of {possible}")
    return hosts, ranks // hosts


def split_over_hosts(ranks: int, hosts: int | None) -> list[range]:
    """Consecutive ranks for each host; the sizes of hosts differ by at most one."""
    if hosts is None:
        hosts = grid_dims(ranks, None, 2)[0] if is_composite(ranks) else max(2, isqrt(ranks))
    check_input(1 <= hosts <= ranks, f"hosts {hosts}: give 1 to {ranks} hosts for {ranks} ranks")
    smallest, larger_hosts = divmod(ranks, hosts)
    starts = [host * smallest + min(host, larger_hosts) for host in range(hosts + 1)]
    return [range(*bounds) for bounds in pairwise(starts)]


def check_pieces(pieces: int, ranks: int) -> None:
    most = _MAX_TOTAL_PIECES // ranks
    message = f"pieces {pieces}: give 1 to {most} with {ranks} ranks"
    check_input(1 <= pieces <= most, message)
