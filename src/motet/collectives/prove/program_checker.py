"""The proof that a Program does what its collective promises, by executing it on multisets of contributors.

The proof is exact: it holds for every input. `prove_program` returns what it learned about the Program, or raises a
`CollectiveProofError` that names the wrong step and transfer.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Literal

from motet.collectives.program import ChunkTransfer, Contributors, Program, Step, group_by_pair
from motet.collectives.prove import contributions
from motet.collectives.prove.contributions import MAX_MULTIPLICITY, InvalidCollectiveProgramError
from motet.collectives.prove.postconditions import missing_postcondition
from motet.core.errors import InputError

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
    contents = contributions.initial_contents(program.initial)
    orders = [{chunk: hash((rank, "own")) for chunk in held} for rank, held in enumerate(program.initial)]
    for step_index, step in enumerate(program.steps):
        try:
            _check_ports(step, program.ports)
            _check_no_write_race(step)
            contributions.apply_step(contents, step)
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


def _check_final_contents(program: Program, contents: contributions.RankContents) -> None:
    expected: dict[Contributors, int] = {}
    for rank, final in enumerate(program.final):
        for chunk, sources in final.items():
            if sources not in expected:
                source, times = Counter(sources).most_common(1)[0] if sources else (0, 0)
                if times > MAX_MULTIPLICITY:
                    wish = f"`final` asks for rank {source} in chunk {chunk} of rank {rank} {times} times"
                    limit = f"give at most {MAX_MULTIPLICITY}, the largest count"
                    raise CollectiveProofError(program, None, f"{wish}; {limit}")
                expected[sources] = contributions.encode_contributors(sources)
            actual = contents[rank].get(chunk)
            if actual != expected[sources]:
                raise CollectiveProofError(program, None, _describe_difference(rank, chunk, actual, sources))


def _describe_difference(rank: int, chunk: int, actual: int | None, expected: Contributors) -> str:
    where = f"chunk {chunk} of rank {rank}"
    if actual is None:
        return f"{where} has not arrived"
    has, needs = Counter(contributions.decode_contributors(actual)), Counter(expected)
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
        f"{what} rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
        for what, ranks in mistakes.items()
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
