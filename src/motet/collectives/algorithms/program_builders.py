"""What algorithms share: where chunks start and end in each collective, powers of two, and how ranks are grouped."""

from collections.abc import Sequence
from fractions import Fraction
from math import isqrt, prod

from motet.collectives.program import ChunkTransfer, Contributors, Program, Step
from motet.core.errors import InputError


def all_ranks(ranks: int) -> Contributors:
    return tuple(range(ranks))


def broadcast_program(
    collective: str, algorithm: str, ranks: int, chunks: int, root: int, steps: Sequence[Sequence[ChunkTransfer]]
) -> Program:
    """A broadcast: the root has everything, and everybody gets it."""
    check_root(root, ranks)
    everything = tuple(range(chunks))
    return Program(
        collective,
        algorithm,
        ranks,
        sizes=(1,) * chunks,
        initial=tuple(everything if rank == root else () for rank in range(ranks)),
        final=(dict.fromkeys(everything, (root,)),) * ranks,
        steps=_freeze_steps(steps),
    )


def all_gather_program(algorithm: str, ranks: int, steps: Sequence[Sequence[ChunkTransfer]], ports: int = 1) -> Program:
    """An all-gather: rank i has chunk i, and everybody gets all of them."""
    return Program(
        "all-gather",
        algorithm,
        ranks,
        sizes=(1,) * ranks,
        initial=tuple((rank,) for rank in range(ranks)),
        final=({chunk: (chunk,) for chunk in range(ranks)},) * ranks,
        steps=_freeze_steps(steps),
        ports=ports,
    )


def scatter_program(algorithm: str, ranks: int, root: int, steps: Sequence[Sequence[ChunkTransfer]]) -> Program:
    """A scatter: the root has everything, and rank i gets chunk i."""
    check_root(root, ranks)
    return Program(
        "scatter",
        algorithm,
        ranks,
        sizes=(1,) * ranks,
        initial=tuple(tuple(range(ranks)) if rank == root else () for rank in range(ranks)),
        final=tuple({rank: (root,)} for rank in range(ranks)),
        steps=_freeze_steps(steps),
    )


def all_reduce_program(
    algorithm: str, ranks: int, chunks: int, steps: Sequence[Sequence[ChunkTransfer]], ports: int = 1
) -> Program:
    """An all-reduce: everybody has a summand of everything, and gets the sum."""
    everything = tuple(range(chunks))
    return Program(
        "all-reduce",
        algorithm,
        ranks,
        sizes=(1,) * chunks,
        initial=(everything,) * ranks,
        final=(dict.fromkeys(everything, all_ranks(ranks)),) * ranks,
        steps=_freeze_steps(steps),
        ports=ports,
    )


def all_to_all_program(algorithm: str, ranks: int, steps: Sequence[Sequence[ChunkTransfer]], ports: int = 1) -> Program:
    """An all-to-all: chunk `i * ranks + j` is what rank i has for rank j."""
    return Program(
        "all-to-all",
        algorithm,
        ranks,
        sizes=(1,) * ranks**2,
        initial=tuple(tuple(range(rank * ranks, (rank + 1) * ranks)) for rank in range(ranks)),
        final=tuple({source * ranks + rank: (source,) for source in range(ranks)} for rank in range(ranks)),
        steps=_freeze_steps(steps),
        ports=ports,
    )


def _freeze_steps(steps: Sequence[Sequence[ChunkTransfer]]) -> tuple[Step, ...]:
    return tuple(tuple(step) for step in steps)


def check_root(root: int, ranks: int, name: str = "root") -> None:
    if not 0 <= root < ranks:
        raise InputError(f"{name} {root}: with {ranks} ranks it is one of 0 to {ranks - 1}")


def doubling_rounds(ranks: int) -> int:
    """How many doublings reach all ranks: the logarithm to base 2, rounded up."""
    return (ranks - 1).bit_length()


def floor_power_of_two(ranks: int) -> int:
    """The largest power of two that is not more."""
    return 1 << (ranks.bit_length() - 1)


def is_composite(ranks: int) -> bool:
    return prime_factor_count(ranks) >= 2


def prime_factor_count(number: int) -> int:
    """How many primes it is the product of."""
    return len(_prime_factors(number))


def _prime_factors(number: int) -> list[int]:
    primes: list[int] = []
    divisor = 2
    while divisor <= isqrt(number):
        while number % divisor == 0:
            primes.append(divisor)
            number //= divisor
        divisor += 1
    return [*primes, number] if number > 1 else primes


def grid_dims(ranks: int, dims: Sequence[int] | None, axes: int | None) -> tuple[int, ...]:
    """The lengths of a grid of so many ranks: those given, or the most even ones."""
    if dims is None:
        assert axes is not None
        lengths = [1] * axes
        for prime in sorted(_prime_factors(ranks), reverse=True):
            lengths[lengths.index(min(lengths))] *= prime
        return tuple(sorted(lengths))
    if axes is not None and len(dims) != axes:
        raise InputError(f"dims {'x'.join(map(str, dims))}: this algorithm has {axes} dimensions")
    if prod(dims) != ranks or min(dims) < 2:
        raise InputError(
            f"dims {'x'.join(map(str, dims))}: lengths must be at least 2 and their product must be the {ranks} ranks; "
            f"for example {'x'.join(map(str, grid_dims(ranks, None, min(2, prime_factor_count(ranks)))))}"
        )
    return tuple(dims)


def hosts_and_ranks_per_host(ranks: int, hosts: int | None) -> tuple[int, int]:
    """(hosts, ranks in each): as given, or as even as possible."""
    if hosts is None:
        hosts = grid_dims(ranks, None, 2)[0]
    if not 1 <= hosts <= ranks or ranks % hosts:
        possible = ", ".join(str(count) for count in range(1, ranks + 1) if ranks % count == 0)
        raise InputError(f"hosts {hosts}: {ranks} ranks are spread evenly over {possible} hosts")
    return hosts, ranks // hosts


def split_over_hosts(ranks: int, hosts: int | None) -> list[range]:
    """The ranks of each host, neighbours together; sizes differ by at most one."""
    if hosts is None:
        hosts = grid_dims(ranks, None, 2)[0] if is_composite(ranks) else max(2, isqrt(ranks))
    if not 1 <= hosts <= ranks:
        raise InputError(f"hosts {hosts}: {ranks} ranks are on 1 to {ranks} hosts")
    least, more = divmod(ranks, hosts)
    starts = [host * least + min(host, more) for host in range(hosts + 1)]
    return [range(starts[host], starts[host + 1]) for host in range(hosts)]


def check_pieces(pieces: int, ranks: int) -> None:
    max_pieces = _MAX_TOTAL_PIECES // ranks
    if not 1 <= pieces <= max_pieces:
        raise InputError(
            f"pieces {pieces}: a message is cut into at least 1, and with {ranks} ranks at most {max_pieces}"
        )


_MAX_TOTAL_PIECES = 2**18  # On all ranks together; each piece is a few transfers on each, and takes some hundred bytes


def fraction(count: int, of: int) -> Fraction:
    return Fraction(count, of)
