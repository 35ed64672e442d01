"""The proof that a Program does what its collective promises, by playing it on multisets of contributors.

It is exact, not a test on some numbers: what is proven holds for every input. `prove` returns what it has found out
about the Program, or raises `UnprovenError` with the step and the transfer that are wrong.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from motet.collectives.ledger import MOST, FaultError, Held, contributors, count, play, start
from motet.collectives.promise import shortfall
from motet.collectives.score import Contributors, Program, Step, Transfer, messages
from motet.core.errors import InputError

Sends = Literal["grouped", "blocking"]
"""How a rank issues a step: all its sends and receives as one operation, or first its sends, each of which waits for
its receiver, and then its receives."""


class UnprovenError(InputError):
    """A Program that is wrong."""

    def __init__(self, program: Program, step: int | None, what: str) -> None:
        self.step = step
        where = "at the end" if step is None else f"in step {step}"
        super().__init__(f"{program} is wrong {where}: {what}")


class UnpromisedError(UnprovenError):
    """A Program whose `final` is not that of the collective it is called after."""

    def __init__(self, program: Program, lacking: str) -> None:
        InputError.__init__(
            self,
            f"{program}: its `final` is not that of {program.collective}: {lacking}; mend it, or give the collective a "
            "name of its own",
        )
        self.step = None


@dataclass(frozen=True)
class Proof:
    """What is known of a Program that does what it promises."""

    ranks: int
    steps: int
    messages: int
    same_bits: bool
    """Every rank adds up a chunk in the same order, so that replicas get the same bits."""
    blocking: bool
    """It also runs when a rank sends before it receives and a send waits for its receiver."""


def prove(program: Program, sends: Sends = "grouped") -> Proof:
    """Hold `final` to the collective's name and play the Program; raise at the first thing that is wrong."""
    lacking = shortfall(program)
    if lacking is not None:
        raise UnpromisedError(program, lacking)
    held = start(program.initial)
    orders = _Orders(program)
    for number, step in enumerate(program.steps):
        try:
            _within_ports(step, program.ports)
            _no_race(step)
            play(held, step)
        except FaultError as fault:
            raise UnprovenError(program, number, str(fault)) from None
        orders.play(step)
    _at_the_end(program, held)
    stuck = _deadlock(program)
    if sends == "blocking" and stuck is not None:
        raise UnprovenError(program, *stuck)
    return Proof(program.ranks, len(program.steps), program.messages, orders.agree(), stuck is None)


def _within_ports(step: Step, ports: int) -> None:
    sent: dict[int, list[int]] = {}
    received: dict[int, list[int]] = {}
    for src, dst in messages(step):
        sent.setdefault(src, []).append(dst)
        received.setdefault(dst, []).append(src)
    for verb, preposition, ends in (("sends", "to", sent), ("receives", "from", received)):
        for rank, others in ends.items():
            if len(others) > ports:
                names = ", ".join(map(str, others))
                raise FaultError(f"rank {rank} {verb} {preposition} ranks {names} at once over {_ports(ports)}")


def _ports(ports: int) -> str:
    return "one port" if ports == 1 else f"{ports} ports"


def _no_race(step: Step) -> None:
    """A copy that replaces what arrives in the same step would depend on an order that no network keeps."""
    written: dict[tuple[int, int], Transfer] = {}
    for transfer in step:
        for chunk in transfer.chunks:
            other = written.setdefault((transfer.dst, chunk), transfer)
            if other is not transfer and "copy" in (other.op, transfer.op) and other != transfer:
                raise FaultError(f"{other} and {transfer} both write chunk {chunk} of rank {transfer.dst}")


def _at_the_end(program: Program, held: Held) -> None:
    wanted: dict[Contributors, int] = {}
    for rank, final in enumerate(program.final):
        for chunk, sources in final.items():
            if sources not in wanted:
                source, times = Counter(sources).most_common(1)[0] if sources else (0, 0)
                if times > MOST:
                    asks = f"`final` asks for rank {source} in chunk {chunk} of rank {rank} {times} times"
                    raise UnprovenError(program, None, f"{asks}; give at most {MOST}, which is what can be counted")
                wanted[sources] = count(sources)
            found = held[rank].get(chunk)
            if found != wanted[sources]:
                raise UnprovenError(program, None, _difference(rank, chunk, found, sources))


def _difference(rank: int, chunk: int, found: int | None, wanted: Contributors) -> str:
    where = f"chunk {chunk} of rank {rank}"
    if found is None:
        return f"{where} has not arrived"
    there, due = Counter(contributors(found)), Counter(wanted)
    strange = [rank for rank in there if rank not in due]
    fewer = [rank for rank in due if there[rank] < due[rank]]
    more = [rank for rank in there if there[rank] > max(due[rank], 1)]
    # A Program may ask for a contribution several times: then "once" would not say what is wrong.
    often = max(due.values(), default=1) > 1
    parts = [
        f"{what} rank{'s' if len(which) > 1 else ''} {', '.join(map(str, sorted(which)))}"
        for what, which in (
            ("has too seldom" if often else "lacks", fewer),
            ("has too often" if often else "has more than once", more),
            ("should not have", strange),
        )
        if which
    ]
    return f"{where} {' and '.join(parts)}"


class _Orders:
    """In what order each rank adds up a chunk, as a number: a + b and b + a give the same bits, (a + b) + c others."""

    def __init__(self, program: Program) -> None:
        self._final = program.final
        self._held = [{chunk: hash((rank, "own")) for chunk in chunks} for rank, chunks in enumerate(program.initial)]

    def play(self, step: Step) -> None:
        arriving = [(t, [self._held[t.src][chunk] for chunk in t.chunks]) for t in step]
        for t, values in arriving:
            there = self._held[t.dst]
            for chunk, value in zip(t.chunks, values, strict=True):
                if t.op == "reduce":
                    a, b = there[chunk], value
                    there[chunk] = hash((a, b) if a < b else (b, a))
                else:
                    there[chunk] = value

    def agree(self) -> bool:
        seen: dict[tuple[int, Contributors], int] = {}
        return all(
            seen.setdefault((chunk, sources), self._held[rank][chunk]) == self._held[rank][chunk]
            for rank, final in enumerate(self._final)
            for chunk, sources in final.items()
        )


def _deadlock(program: Program) -> tuple[int, str] | None:
    """The first step, and the ranks, that wait for each other in a circle under blocking sends."""
    todo = _issued(program)
    at = [0] * program.ranks
    moved = True
    while moved:
        moved = False
        for rank in range(program.ranks):
            while at[rank] < len(todo[rank]):
                pair = todo[rank][at[rank]]
                other = pair[2] if pair[1] == rank else pair[1]
                if at[other] >= len(todo[other]) or todo[other][at[other]] != pair:
                    break
                at[rank] += 1
                at[other] += 1
                moved = True
    waiting = [rank for rank in range(program.ranks) if at[rank] < len(todo[rank])]
    if not waiting:
        return None
    return _circle(todo, at, waiting[0])


def _issued(program: Program) -> list[list[tuple[int, int, int]]]:
    """(step, src, dst) for each rank, in the order in which it issues them: its sends in a step first."""
    order: list[list[tuple[int, int, int]]] = [[] for _ in range(program.ranks)]
    for number, step in enumerate(program.steps):
        mine = [(number, src, dst) for src, dst in messages(step)]
        for message in mine:
            order[message[1]].append(message)
        for message in mine:
            order[message[2]].append(message)
    return order


def _circle(todo: list[list[tuple[int, int, int]]], at: list[int], first: int) -> tuple[int, str]:
    """Follow who waits for whom until somebody comes twice."""
    chain: list[int] = []
    rank = first
    while rank not in chain:
        chain.append(rank)
        _, src, dst = todo[rank][at[rank]]
        rank = dst if src == rank else src
    circle = [*chain[chain.index(rank) :], rank]
    step = min(todo[member][at[member]][0] for member in circle)
    return step, f"with sends that wait for their receiver, ranks {' -> '.join(map(str, circle))} wait in a circle"


def proven(program: Program) -> bool:
    """Whether the Program does what it promises."""
    try:
        prove(program)
    except UnprovenError:
        return False
    return True
