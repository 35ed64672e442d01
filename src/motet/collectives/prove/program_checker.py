"""The proof that a Program does what its collective promises, by playing it on multisets of contributors.

It is exact, not a test on some numbers: what is proven holds for every input. `prove` returns what it has found out
about the Program, or raises `UnprovenError` with the step and the transfer that are wrong.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from motet.collectives.program import ChunkTransfer, Contributors, Program, Step, group_by_pair
from motet.collectives.prove.contributions import (
    MAX_MULTIPLICITY,
    InvalidCollectiveProgramError,
    RankContents,
    apply_step,
    decode_contributors,
    encode_contributors,
    initial_contents,
)
from motet.collectives.prove.postconditions import missing_postcondition
from motet.core.errors import InputError

# How a rank issues a step: all its sends and receives as one operation, or first its sends, each of which waits for its
# receiver, and then its receives.
SendMode = Literal["grouped", "blocking"]


class UnprovenCollectiveError(InputError):
    """A Program that is wrong."""

    def __init__(self, program: Program, step: int | None, reason: str) -> None:
        self.step = step
        where = "at the end" if step is None else f"in step {step}"
        super().__init__(f"{program} is wrong {where}: {reason}")


class PostconditionError(UnprovenCollectiveError):
    """A Program whose `final` is not that of the collective it is called after."""

    def __init__(self, program: Program, missing: str) -> None:
        InputError.__init__(
            self,
            f"{program}: its `final` is not that of {program.collective}: {missing}; mend it, or give the collective a "
            "name of its own",
        )
        self.step = None


@dataclass(frozen=True)
class CollectiveProof:
    """What is known of a Program that does what it promises."""

    ranks: int
    steps: int
    messages: int
    same_bits: bool  # Every rank adds up a chunk in the same order, so that replicas get the same bits
    supports_blocking_sends: bool  # It also runs when a rank sends before it receives and a send waits for its receiver


def prove_program(program: Program, send_mode: SendMode = "grouped") -> CollectiveProof:
    """Hold `final` to the collective's name and play the Program; raise at the first thing that is wrong."""
    missing = missing_postcondition(program)
    if missing is not None:
        raise PostconditionError(program, missing)
    contents = initial_contents(program.initial)
    reduction_orders = _ReductionOrderTracker(program)
    for step_index, step in enumerate(program.steps):
        try:
            _check_ports(step, program.ports)
            _check_no_write_race(step)
            apply_step(contents, step)
        except InvalidCollectiveProgramError as error:
            raise UnprovenCollectiveError(program, step_index, str(error)) from None
        reduction_orders.apply_step(step)
    _check_final_contents(program, contents)
    deadlock = _find_deadlock(program)
    if send_mode == "blocking" and deadlock is not None:
        raise UnprovenCollectiveError(program, *deadlock)
    return CollectiveProof(
        program.ranks,
        len(program.steps),
        program.message_count,
        reduction_orders.is_same_on_all_ranks(),
        deadlock is None,
    )


def _check_ports(step: Step, ports: int) -> None:
    sent: dict[int, list[int]] = {}
    received: dict[int, list[int]] = {}
    for src, dst in group_by_pair(step):
        sent.setdefault(src, []).append(dst)
        received.setdefault(dst, []).append(src)
    for verb, preposition, ends in (("sends", "to", sent), ("receives", "from", received)):
        for rank, peers in ends.items():
            if len(peers) > ports:
                names = ", ".join(map(str, peers))
                raise InvalidCollectiveProgramError(
                    f"rank {rank} {verb} {preposition} ranks {names} at once over {_describe_ports(ports)}"
                )


def _describe_ports(ports: int) -> str:
    return "one port" if ports == 1 else f"{ports} ports"


def _check_no_write_race(step: Step) -> None:
    """A copy that replaces what arrives in the same step would depend on an order that no network keeps."""
    writers: dict[tuple[int, int], ChunkTransfer] = {}
    for transfer in step:
        for chunk in transfer.chunks:
            other = writers.setdefault((transfer.dst, chunk), transfer)
            if other is not transfer and "copy" in (other.op, transfer.op) and other != transfer:
                raise InvalidCollectiveProgramError(
                    f"{other} and {transfer} both write chunk {chunk} of rank {transfer.dst}"
                )


def _check_final_contents(program: Program, contents: RankContents) -> None:
    expected: dict[Contributors, int] = {}
    for rank, final in enumerate(program.final):
        for chunk, sources in final.items():
            if sources not in expected:
                source, times = Counter(sources).most_common(1)[0] if sources else (0, 0)
                if times > MAX_MULTIPLICITY:
                    asks = f"`final` asks for rank {source} in chunk {chunk} of rank {rank} {times} times"
                    raise UnprovenCollectiveError(
                        program, None, f"{asks}; give at most {MAX_MULTIPLICITY}, which is what can be counted"
                    )
                expected[sources] = encode_contributors(sources)
            actual = contents[rank].get(chunk)
            if actual != expected[sources]:
                raise UnprovenCollectiveError(program, None, _describe_difference(rank, chunk, actual, sources))


def _describe_difference(rank: int, chunk: int, actual: int | None, expected: Contributors) -> str:
    where = f"chunk {chunk} of rank {rank}"
    if actual is None:
        return f"{where} has not arrived"
    actual_counts, expected_counts = Counter(decode_contributors(actual)), Counter(expected)
    unexpected = [rank for rank in actual_counts if rank not in expected_counts]
    fewer = [rank for rank in expected_counts if actual_counts[rank] < expected_counts[rank]]
    more = [rank for rank in actual_counts if actual_counts[rank] > max(expected_counts[rank], 1)]
    # A Program may ask for a contribution several times: then "once" would not say what is wrong.
    expects_repeats = max(expected_counts.values(), default=1) > 1
    parts = [
        f"{what} rank{'s' if len(which) > 1 else ''} {', '.join(map(str, sorted(which)))}"
        for what, which in (
            ("has too seldom" if expects_repeats else "lacks", fewer),
            ("has too often" if expects_repeats else "has more than once", more),
            ("should not have", unexpected),
        )
        if which
    ]
    return f"{where} {' and '.join(parts)}"


class _ReductionOrderTracker:
    """In what order each rank adds up a chunk, as a number: a + b and b + a give the same bits, (a + b) + c others."""

    def __init__(self, program: Program) -> None:
        self._final = program.final
        self._order_hashes = [
            {chunk: hash((rank, "own")) for chunk in chunks} for rank, chunks in enumerate(program.initial)
        ]

    def apply_step(self, step: Step) -> None:
        incoming = [(t, [self._order_hashes[t.src][chunk] for chunk in t.chunks]) for t in step]
        for t, values in incoming:
            destination_chunks = self._order_hashes[t.dst]
            for chunk, value in zip(t.chunks, values, strict=True):
                if t.op == "reduce":
                    a, b = destination_chunks[chunk], value
                    destination_chunks[chunk] = hash((a, b) if a < b else (b, a))
                else:
                    destination_chunks[chunk] = value

    def is_same_on_all_ranks(self) -> bool:
        expected_hashes: dict[tuple[int, Contributors], int] = {}
        return all(
            expected_hashes.setdefault((chunk, sources), self._order_hashes[rank][chunk])
            == self._order_hashes[rank][chunk]
            for rank, final in enumerate(self._final)
            for chunk, sources in final.items()
        )


def _find_deadlock(program: Program) -> tuple[int, str] | None:
    """The first step, and the ranks, that wait for each other in a circle under blocking sends."""
    message_queues = _issue_order(program)
    positions = [0] * program.ranks
    has_progressed = True
    while has_progressed:
        has_progressed = False
        for rank in range(program.ranks):
            while positions[rank] < len(message_queues[rank]):
                pair = message_queues[rank][positions[rank]]
                other = pair[2] if pair[1] == rank else pair[1]
                if positions[other] >= len(message_queues[other]) or message_queues[other][positions[other]] != pair:
                    break
                positions[rank] += 1
                positions[other] += 1
                has_progressed = True
    waiting_ranks = [rank for rank in range(program.ranks) if positions[rank] < len(message_queues[rank])]
    if not waiting_ranks:
        return None
    return _deadlock_cycle(message_queues, positions, waiting_ranks[0])


def _issue_order(program: Program) -> list[list[tuple[int, int, int]]]:
    """(step, src, dst) for each rank, in the order in which it issues them: its sends in a step first."""
    order: list[list[tuple[int, int, int]]] = [[] for _ in range(program.ranks)]
    for step_index, step in enumerate(program.steps):
        step_messages = [(step_index, src, dst) for src, dst in group_by_pair(step)]
        for message in step_messages:
            order[message[1]].append(message)
        for message in step_messages:
            order[message[2]].append(message)
    return order


def _deadlock_cycle(
    message_queues: list[list[tuple[int, int, int]]], positions: list[int], first_rank: int
) -> tuple[int, str]:
    """Follow who waits for whom until somebody comes twice."""
    chain: list[int] = []
    rank = first_rank
    while rank not in chain:
        chain.append(rank)
        _, src, dst = message_queues[rank][positions[rank]]
        rank = dst if src == rank else src
    cycle = [*chain[chain.index(rank) :], rank]
    step = min(message_queues[member][positions[member]][0] for member in cycle)
    return step, f"with sends that wait for their receiver, ranks {' -> '.join(map(str, cycle))} wait in a circle"
