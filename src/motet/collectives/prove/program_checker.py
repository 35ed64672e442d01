"""The proof that a Program keeps the promise of its collective, by executing it on multisets of contributors.

The proof is exact: it holds for every input. `prove_program` returns properties of the Program, or raises a
`CollectiveProofError` that names the wrong step and transfer.

The contents of a chunk as a number: how many times each rank's contribution is in it.

A multiset of ranks is one integer with a field of 16 bits per rank, so that a sum of chunks is a sum of integers. A set
would accept a contribution that was added twice.

The postcondition of each collective. The proof checks a Program against its own `final`; this checks `final`.

A sum contains every rank once, and data that only move have one origin on all ranks. An unknown collective has no
postcondition: the proof checks its Program against `final` alone.

The Programs that the library can make: every algorithm at every rank count, on every shape of hosts and grid.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, product
from typing import Literal

from motet.collectives.algorithms import algorithm_names, build, collective_names, find_algorithm
from motet.collectives.algorithms.registry import Algorithm
from motet.collectives.program import ChunkTransfer, Contributors, Program, Step, group_by_pair
from motet.core.errors import InputError

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


def missing_postcondition(program: Program) -> str | None:
    """The first requirement of the collective that `final` does not have; None if `final` has all."""
    return next(chain.from_iterable(check(program) for check in _POSTCONDITIONS.get(program.collective, ())), None)


def _final_contents(program: Program) -> tuple[Mapping[int, Contributors], ...]:
    """The chunks that each rank ends with, including its own ones, which `final` may leave out."""
    if program.collective not in ("broadcast", "all-gather", "gather", "barrier"):
        return program.final
    ranks = range(program.ranks)
    keeping = {max(ranks, key=lambda rank: len(program.final[rank]))} if program.collective == "gather" else set(ranks)
    return tuple(
        {**dict.fromkeys(initial, (rank,)), **final} if rank in keeping and not final.keys() >= set(initial) else final
        for rank, (initial, final) in enumerate(zip(program.initial, program.final, strict=True))
    )


def _all_ranks_end_with_all_chunks(program: Program) -> Iterator[str]:
    for rank, held in enumerate(_final_contents(program)):
        yield from (f"rank {rank} need not end with chunk {n}" for n in range(program.chunks) if n not in held)


def _one_rank_ends_with_all_chunks(program: Program) -> Iterator[str]:
    held = max(_final_contents(program), key=len)
    yield from (f"no rank must end with all chunks, such as chunk {n}" for n in range(program.chunks) if n not in held)


def _chunks_are_distributed(program: Program) -> Iterator[str]:
    final_chunks = set().union(*program.final)
    yield from (f"no rank must end with chunk {n}" for n in range(program.chunks) if n not in final_chunks)
    yield from (f"rank {rank} need not end with any chunk" for rank, held in enumerate(program.final) if not held)


def _sums_include_every_rank_once(program: Program) -> Iterator[str]:
    everyone = tuple(range(program.ranks))
    checked_ids: set[int] = set()  # many chunks may share one tuple
    for rank, final in enumerate(program.final):
        for chunk, sources in final.items():
            if id(sources) in checked_ids or sources == everyone or sorted(sources) == list(everyone):
                checked_ids.add(id(sources))
                continue
            where, counts = f"chunk {chunk} of rank {rank}", Counter(sources)
            yield from (f"{where} need not contain the contribution of rank {n}" for n in everyone if not counts[n])
            repeated = (n for n in everyone if counts[n] > 1)
            yield from (f"{where} must contain the contribution of rank {n} more than once" for n in repeated)


def _each_chunk_has_one_origin(program: Program) -> Iterator[str]:
    origins: dict[int, Contributors] = {}
    for rank, held in enumerate(_final_contents(program)):
        for chunk, sources in held.items():
            if len(sources) != 1:
                yield f"chunk {chunk} of rank {rank} is made of {len(sources)} contributions; it is one rank's alone"
            other = origins.setdefault(chunk, sources)
            if other != sources:
                yield f"chunk {chunk} is rank {other[0]}'s on one rank, and rank {sources[0]}'s on rank {rank}"


def _origins(program: Program) -> list[int]:
    return sorted({sources[0] for held in _final_contents(program) for sources in held.values()})


def _one_root(program: Program) -> Iterator[str]:
    origins = _origins(program)
    if len(origins) > 1:
        yield f"chunks come from ranks {origins[0]} and {origins[1]}, which is not one root"


def _every_rank_contributes(program: Program) -> Iterator[str]:
    missing = sorted(set(range(program.ranks)).difference(_origins(program)))
    yield from (f"nothing of rank {rank} must end anywhere" for rank in missing)


def _tokens_from_all_ranks(program: Program) -> Iterator[str]:
    for rank, held in enumerate(_final_contents(program)):
        missing = set(range(program.ranks)).difference(*held.values())
        yield from (f"rank {rank} need not end with a token of rank {source}" for source in sorted(missing))


def _data_move(program: Program) -> Iterator[str]:
    if all(sources == (rank,) for rank, held in enumerate(program.final) for sources in held.values()):
        yield "nothing must arrive at another rank"


def _all_ranks_exchange(program: Program) -> Iterator[str]:
    for rank, final in enumerate(program.final):
        missing = (src for src in range(program.ranks) if final.get(src * program.ranks + rank) != (src,))
        yield from (f"rank {rank} need not end with the chunk of rank {source} for it" for source in missing)


# A check may assume that those before it have found nothing.
_POSTCONDITIONS: dict[str, tuple[Callable[[Program], Iterator[str]], ...]] = {
    "broadcast": (_all_ranks_end_with_all_chunks, _each_chunk_has_one_origin, _one_root),
    "reduce": (_one_rank_ends_with_all_chunks, _sums_include_every_rank_once),
    "all-reduce": (_all_ranks_end_with_all_chunks, _sums_include_every_rank_once),
    "reduce-scatter": (_chunks_are_distributed, _sums_include_every_rank_once),
    "all-gather": (_all_ranks_end_with_all_chunks, _each_chunk_has_one_origin, _every_rank_contributes),
    "gather": (_one_rank_ends_with_all_chunks, _each_chunk_has_one_origin, _every_rank_contributes),
    "scatter": (_chunks_are_distributed, _each_chunk_has_one_origin, _one_root),
    "all-to-all": (_all_ranks_exchange,),
    "barrier": (_tokens_from_all_ranks,),
    **dict.fromkeys(("send", "copy", "signal"), (_data_move, _each_chunk_has_one_origin)),
}


# A rank issues a step as one operation, or first its sends, each of which waits for its receiver, then its receives.
SendMode = Literal["grouped", "blocking"]


class CollectiveProofError(InputError):
    """The Program is wrong."""

    def __init__(self, program: Program, step: int | None, reason: str) -> None:
        self.step = step
        where = "at the end" if step is None else f"in step {step}"
        super().__init__(f"{program} is wrong {where}: {reason}")


class PostconditionError(CollectiveProofError):
    """The `final` of a Program is not that of its collective."""

    def __init__(self, program: Program, missing: str) -> None:
        fix = "fix it, or give the collective another name"
        InputError.__init__(self, f"{program}: its `final` is not that of {program.collective}: {missing}; {fix}")
        self.step = None


@dataclass(frozen=True)
class CollectiveProof:
    """Properties of a proven Program."""

    ranks: int
    steps: int
    messages: int
    same_bits: bool  # Every rank adds the contributions to a chunk in the same order, so replicas get the same bits
    supports_blocking_sends: bool  # No deadlock if each rank sends first and a send waits for its receiver


def prove_program(program: Program, send_mode: SendMode = "grouped") -> CollectiveProof:
    """Check `final` against the collective and execute the Program; raise at the first mistake."""
    if (missing := missing_postcondition(program)) is not None:
        raise PostconditionError(program, missing)
    contents = initial_contents(program.initial)
    orders = [{chunk: hash((rank, "own")) for chunk in held} for rank, held in enumerate(program.initial)]
    for step_index, step in enumerate(program.steps):
        try:
            _check_ports(step, program.ports)
            _check_no_write_race(step)
            apply_step(contents, step)
        except InvalidCollectiveProgramError as error:
            raise CollectiveProofError(program, step_index, str(error)) from None
        _apply_to_orders(orders, step)
    _check_final_contents(program, contents)
    deadlock = _find_deadlock(program)
    if send_mode == "blocking" and deadlock is not None:
        raise CollectiveProofError(program, *deadlock)
    expected: dict[tuple[int, Contributors], int] = {}
    same_bits = all(
        expected.setdefault((chunk, sources), orders[rank][chunk]) == orders[rank][chunk]
        for rank, final in enumerate(program.final)
        for chunk, sources in final.items()
    )
    return CollectiveProof(program.ranks, len(program.steps), program.message_count, same_bits, deadlock is None)


def _apply_to_orders(orders: list[dict[int, int]], step: Step) -> None:
    """Hash each chunk's order of additions: a + b and b + a give the same bits, (a + b) + c and a + (b + c) do not."""
    for t, values in [(t, [orders[t.src][chunk] for chunk in t.chunks]) for t in step]:
        local = orders[t.dst]
        if t.op == "reduce":
            values = [hash((min(local[c], v), max(local[c], v))) for c, v in zip(t.chunks, values, strict=True)]
        local.update(zip(t.chunks, values, strict=True))


def _check_ports(step: Step, ports: int) -> None:
    for verb, rank_index in (("sends to", 0), ("receives from", 1)):
        peers_of_rank: dict[int, list[int]] = {}
        for pair in group_by_pair(step):
            peers_of_rank.setdefault(pair[rank_index], []).append(pair[1 - rank_index])
        for rank, peers in peers_of_rank.items():
            if len(peers) > ports:
                count = "one port" if ports == 1 else f"{ports} ports"
                names = ", ".join(map(str, peers))
                raise InvalidCollectiveProgramError(f"rank {rank} {verb} ranks {names} together over {count}")


def _check_no_write_race(step: Step) -> None:
    """Reject a copy onto a chunk that gets other data in the same step: no network keeps the order of arrivals."""
    writers: dict[tuple[int, int], ChunkTransfer] = {}
    for transfer in step:
        for chunk in transfer.chunks:
            other = writers.setdefault((transfer.dst, chunk), transfer)
            if other is not transfer and "copy" in (other.op, transfer.op) and other != transfer:
                where = f"chunk {chunk} of rank {transfer.dst}"
                raise InvalidCollectiveProgramError(f"{other} and {transfer} both write {where}")


def _check_final_contents(program: Program, contents: RankContents) -> None:
    expected: dict[Contributors, int] = {}
    for rank, final in enumerate(program.final):
        for chunk, sources in final.items():
            if sources not in expected:
                source, times = Counter(sources).most_common(1)[0] if sources else (0, 0)
                if times > MAX_MULTIPLICITY:
                    wish = f"`final` asks for rank {source} in chunk {chunk} of rank {rank} {times} times"
                    limit = f"give at most {MAX_MULTIPLICITY}, the largest count"
                    raise CollectiveProofError(program, None, f"{wish}; {limit}")
                expected[sources] = encode_contributors(sources)
            actual = contents[rank].get(chunk)
            if actual != expected[sources]:
                raise CollectiveProofError(program, None, _describe_difference(rank, chunk, actual, sources))


def _describe_difference(rank: int, chunk: int, actual: int | None, expected: Contributors) -> str:
    where = f"chunk {chunk} of rank {rank}"
    if actual is None:
        return f"{where} has not arrived"
    has, needs = Counter(decode_contributors(actual)), Counter(expected)
    # If a Program asks for a contribution several times, "once" does not describe the mistake.
    expects_repeats = max(needs.values(), default=1) > 1
    too_seldom = "has too seldom" if expects_repeats else "does not contain"
    too_often = "has too often" if expects_repeats else "has more than once"
    mistakes = {
        too_seldom: [source for source in needs if has[source] < needs[source]],
        too_often: [source for source in has if has[source] > max(needs[source], 1)],
        "should not have": [source for source in has if source not in needs],
    }
    parts = [
        f"{phrase} rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
        for phrase, ranks in mistakes.items()
        if ranks
    ]
    return f"{where} {' and '.join(parts)}"


_Message = tuple[int, int, int]  # (step, src, dst)


def _find_deadlock(program: Program) -> tuple[int, str] | None:
    """The first step with a cycle of ranks that wait for each other under blocking sends, and a sentence."""
    queues = _issue_order(program)
    has_progressed = True
    while has_progressed:
        has_progressed = False
        for rank, queue in enumerate(queues):
            while queue:
                _, src, dst = queue[-1]
                other = queues[dst if src == rank else src]
                if not other or other[-1] != queue[-1]:
                    break
                queue.pop()
                other.pop()
                has_progressed = True
    waiting = [rank for rank, queue in enumerate(queues) if queue]
    if not waiting:
        return None
    chain, rank = [], waiting[0]
    while rank not in chain:
        chain.append(rank)
        _, src, dst = queues[rank][-1]
        rank = dst if src == rank else src
    cycle = [*chain[chain.index(rank) :], rank]
    step = min(queues[member][-1][0] for member in cycle)
    return step, f"with sends that wait for their receiver, ranks {' -> '.join(map(str, cycle))} wait in a circle"


def _issue_order(program: Program) -> list[list[_Message]]:
    """The messages of each rank, the next one last. In a step a rank issues its sends before its receives."""
    order: list[list[_Message]] = [[] for _ in range(program.ranks)]
    for step_index, step in enumerate(program.steps):
        for end, message in product((1, 2), [(step_index, *pair) for pair in group_by_pair(step)]):
            order[message[end]].append(message)
    return [queue[::-1] for queue in order]


# A call makes the Program, since all Programs together would fill gigabytes. `keywords` are the options.
ProgramCase = partial[Program]


def all_cases(rank_counts: Sequence[int]) -> list[ProgramCase]:
    """Every algorithm at each supported rank count, with all shapes that the ranks can have."""
    return [
        partial(build, collective, name, ranks, **options)
        for collective in collective_names()
        for name in algorithm_names(collective)
        for algorithm in [find_algorithm(collective, name)]
        for ranks in rank_counts
        if algorithm.supports(ranks)
        for options in option_sets(algorithm, ranks)
    ]


def option_sets(algorithm: Algorithm, ranks: int) -> list[dict[str, object]]:
    """Options worth a separate proof: the defaults, the last root, all host counts and all grids."""
    sets: list[dict[str, object]] = [{}]
    if "root" in algorithm.options:
        sets.append({"root": ranks - 1})
    if "pieces" in algorithm.options:
        sets += [{"pieces": 1}, {"pieces": 3}]
    if "hosts" in algorithm.options:
        sets += [{"hosts": hosts} for hosts in range(2, ranks) if ranks % hosts == 0]
    # A free number of dimensions is one ring by default, and 2, 3 and 5 have separate algorithms.
    axes = algorithm.axes if len(algorithm.axes) == 1 else [n for n in algorithm.axes if n in (4, 6)]
    sets += [{"dims": dims} for count in axes for dims in _factorizations(ranks, count, 2)]
    return sets


def _factorizations(ranks: int, factor_count: int, min_length: int) -> Iterator[tuple[int, ...]]:
    if factor_count == 1:
        if ranks >= min_length:
            yield (ranks,)
        return
    for length in range(min_length, ranks + 1):
        if ranks % length == 0:
            yield from ((length, *rest) for rest in _factorizations(ranks // length, factor_count - 1, length))
