"""A Program as one rank plays it on tensors: what it sends and receives in each step, from where to where, and how much
scratch that takes.

There are three buffers. The `input` holds the rank's first chunks, one after another, and is never written; the
`output` holds those that it must have at the end; what is underway lives in `scratch`. What arrives lands where it
belongs, if nothing is in its way there. A chunk of a sum that is still in the input is added to what arrived, so that
even a sum on its way to another rank takes no room but its own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, TypeVar

from motet.collectives.score import Operation, Program, Step, Transfer, messages
from motet.core.errors import InputError

T = TypeVar("T")
Buffer = Literal["input", "output", "scratch"]


class Span(NamedTuple):
    """Some elements of a buffer."""

    buffer: Buffer
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


class Message(NamedTuple):
    """What goes to, or comes from, another rank at once."""

    peer: int
    span: Span


class Arrival(NamedTuple):
    """Some elements of what was received."""

    message: int
    """Its number among the step's receives."""
    span: Span


class Move(NamedTuple):
    """A copy within the rank."""

    target: Span
    source: Span


class Update(NamedTuple):
    """`target` becomes `own` with all that has arrived added in this order; without `own` it becomes what arrived."""

    target: Span
    own: Span | None
    arrived: tuple[Arrival, ...]
    after_sends: bool
    """The target is being sent in this step."""


class Count(NamedTuple):
    """How many ranks' contributions are in a part of the output at the end."""

    span: Span
    ranks: int


@dataclass(frozen=True)
class Act:
    """What one rank does in one step, in this order."""

    packs: tuple[Move, ...]
    """Bring together what is one message and does not lie together."""
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    updates: tuple[Update, ...]


@dataclass(frozen=True)
class Part:
    """The part that one rank plays in a Program."""

    acts: tuple[Act, ...]
    """One for each step of the Program, also where there is nothing to do."""
    scratch: int
    """Elements."""
    finish: tuple[Move, ...]
    """At the end: what the rank had from the start and nobody has written."""
    counts: tuple[Count, ...]
    """For averages."""

    @cached_property
    def sent(self) -> int:
        """Elements that go to other ranks."""
        return sum(message.span.elements for act in self.acts for message in act.sends)

    @cached_property
    def messages(self) -> int:
        """How many messages go to other ranks. An empty one is not sent."""
        return sum(len(act.sends) for act in self.acts)


def extents(program: Program, elements: int) -> tuple[int, ...]:
    """How many elements each chunk has, of so many in all chunks: in proportion to the sizes, as even as possible."""
    before = list(accumulate(program.sizes, initial=0))
    cuts = [elements * weight // before[-1] if before[-1] else 0 for weight in before]
    return tuple(stop - start for start, stop in pairwise(cuts))


def elements_sent(program: Program, rank: int, elements: int) -> int:
    """What a rank sends in all when the chunks together have so many elements."""
    before = [0, *accumulate(extents(program, elements))]
    return sum(before[t.last + 1] - before[t.first] for step in program.steps for t in step if t.src == rank)


def elements(program: Program, rank: int, held: int, kept: int) -> int | None:
    """How many elements all chunks have, when this rank has `held` at the start and room for `kept` at the end.

    A rank that has nothing but passes on what others have takes the sizes for numbers of elements. None where a rank
    has no part at all.
    """
    total = sum(program.sizes)
    ends = (("input", program.initial[rank], held), ("output", program.final[rank], kept))
    share, numel = max((sum(program.sizes[chunk] for chunk in chunks), numel) for _, chunks, numel in ends)
    found, rest = divmod(numel * total, share) if share else (total, 0)
    if rest:
        raise InputError(
            f"{program}: {numel} elements on rank {rank} cannot be {share} of {total} equal parts; "
            f"give it a multiple of {share}"
        )
    lengths = extents(program, found)
    for name, chunks, numel in ends:
        wanted = sum(lengths[chunk] for chunk in chunks)
        if numel != wanted:
            raise InputError(f"{program}: the {name} of rank {rank} has {numel} elements; it must have {wanted}")
    if not share and not any(rank in (t.src, t.dst) for step in program.steps for t in step):
        return None
    return found


def lower(program: Program, rank: int, elements: int, in_place: bool) -> Part:
    """The part of a rank; `elements` are those of all chunks together.

    With `in_place` a chunk that the rank both starts and ends with lies in the output from the start, and is written.
    """
    return _lower(Same(program), rank, elements, in_place)


class Same:
    """A Program as a key: compared by being the same one, which is quick and keeps it alive."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __hash__(self) -> int:
        return id(self.program)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.program is self.program


@lru_cache(maxsize=1024)
def _lower(key: Same, rank: int, elements: int, in_place: bool) -> Part:
    program = key.program
    lengths = extents(program, elements)
    first = laid("input", program.initial[rank], lengths)
    homes = laid("output", program.final[rank], lengths)
    if in_place:
        first |= {chunk: homes[chunk] for chunk in first if chunk in homes}
    stage = _Stage(rank, lengths, homes, first)
    acts = tuple(stage.act(step, after) for step, after in zip(program.steps, _needed(program, rank), strict=True))
    filled = {chunk: home for chunk, home in homes.items() if home.elements}
    left = [Move(home, stage.place[chunk]) for chunk, home in filled.items() if stage.place[chunk] != home]
    counts = [Count(home, len(program.final[rank][chunk])) for chunk, home in filled.items()]
    return Part(acts, stage.scratch, _merged(left, _one_move), _merged(counts, _one_count))


def laid(buffer: Buffer, chunks: Iterable[int], lengths: Sequence[int]) -> dict[int, Span]:
    """One chunk after another."""
    found, at = {}, 0
    for chunk in sorted(chunks):
        found[chunk] = Span(buffer, at, at + lengths[chunk])
        at += lengths[chunk]
    return found


def _needed(program: Program, rank: int) -> list[set[int]]:
    """After each step, the chunks of this rank that are still read, added to, or belong to the end."""
    needed = set(program.final[rank])
    found: list[set[int]] = []
    for step in reversed(program.steps):
        found.append(set(needed))
        for t in step:
            if t.dst == rank and t.op == "copy":
                needed.difference_update(t.chunks)
        for t in step:
            if t.src == rank or (t.dst == rank and t.op == "reduce"):
                needed.update(t.chunks)
    return found[::-1]


class _Stage:
    """Where the chunks of a rank are while its part is written, step by step."""

    def __init__(self, rank: int, lengths: Sequence[int], homes: dict[int, Span], place: dict[int, Span]) -> None:
        self.rank = rank
        self.lengths = lengths
        self.homes = homes
        self.place = place
        self.scratch = 0
        self._taken: list[Span] = []
        self._sent: list[Span] = []

    def act(self, step: Step, needed_after: set[int]) -> Act:
        ours = {
            pair: [chunk for t in transfers for chunk in t.chunks if self.lengths[chunk]]
            for pair, transfers in messages(step).items()
            if self.rank in pair
        }
        packs: list[Move] = []
        self._sent = []
        sends = [
            Message(dst, self._gather(chunks, packs))
            for (src, dst), chunks in ours.items()
            if src == self.rank and chunks
        ]
        incoming = self._incoming(step)
        receives: list[Message] = []
        arrived: dict[tuple[int, int], Arrival] = {}
        for (src, dst), chunks in ours.items():
            if dst == self.rank and chunks:
                span = self._landing(src, chunks, incoming) or self._room(chunks)
                for chunk, where in zip(chunks, self._cut(span, chunks), strict=True):
                    arrived[src, chunk] = Arrival(len(receives), where)
                receives.append(Message(src, span))
        updates = [
            update
            for chunk, transfers in incoming.items()
            if (update := self._update(chunk, transfers[0].op, tuple(arrived[t.src, chunk] for t in transfers)))
        ]
        live = (self.place[chunk] for chunk in needed_after if self.lengths[chunk] and chunk in self.place)
        self._taken = [span for span in live if span.buffer == "scratch"]
        updates.sort(key=lambda update: (max(arrival.message for arrival in update.arrived), update.target))
        return Act(_merged(packs, _one_move), tuple(receives), tuple(sends), _merged(updates, _one_update))

    def _gather(self, chunks: list[int], packs: list[Move]) -> Span:
        """Where these chunks lie one after another; they are brought together if they do not."""
        spans = [self.place[chunk] for chunk in chunks]
        if together := _chain(spans):
            self._sent.append(together)
            return together
        room = self._room(chunks)
        packs += [Move(target, span) for target, span in zip(self._cut(room, chunks), spans, strict=True)]
        return room

    def _incoming(self, step: Step) -> dict[int, list[Transfer]]:
        """What arrives for each chunk, in the order of the list."""
        found: dict[int, list[Transfer]] = {}
        for t in step:
            if t.dst == self.rank:
                for chunk in t.chunks:
                    if self.lengths[chunk]:
                        found.setdefault(chunk, []).append(t)
        return found

    def _landing(self, src: int, chunks: list[int], incoming: dict[int, list[Transfer]]) -> Span | None:
        """Where in the output a whole message belongs, if nothing is lost there."""
        for chunk in chunks:
            first = incoming[chunk][0]
            if chunk not in self.homes or first.src != src:
                return None
            if first.op == "reduce" and self.place[chunk].buffer != "input":
                return None
        together = _chain([self.homes[chunk] for chunk in chunks])
        return together if together and not self._is_sent(together) else None

    def _update(self, chunk: int, op: Operation, arrived: tuple[Arrival, ...]) -> Update | None:
        """What to do with what has arrived for a chunk; nothing if it is where it belongs."""
        own, landed = self.place.get(chunk), arrived[0].span
        if op == "copy":
            own, arrived = None, arrived[:1]
        target = self.homes.get(chunk, landed) if own is None or own.buffer == "input" else own
        self.place[chunk] = target
        if own is None and target == landed:
            return None
        return Update(target, own, arrived, self._is_sent(target))

    def _is_sent(self, span: Span) -> bool:
        """Whether some of it goes out in this step."""
        return any(
            span.buffer == other.buffer and span.start < other.stop and other.start < span.stop for other in self._sent
        )

    def _cut(self, span: Span, chunks: list[int]) -> list[Span]:
        cuts = accumulate((self.lengths[chunk] for chunk in chunks), initial=span.start)
        return [Span(span.buffer, start, stop) for start, stop in pairwise(cuts)]

    def _room(self, chunks: list[int]) -> Span:
        """The first gap in the scratch that is wide enough."""
        width, start = sum(self.lengths[chunk] for chunk in chunks), 0
        for taken in sorted(self._taken):
            if taken.start - start >= width:
                break
            start = max(start, taken.stop)
        span = Span("scratch", start, start + width)
        self._taken.append(span)
        self.scratch = max(self.scratch, span.stop)
        return span


def _chain(spans: Sequence[Span]) -> Span | None:
    """The one that they are together, if each follows the one before."""
    together = spans[0]
    for span in spans[1:]:
        if (span.buffer, span.start) != (together.buffer, together.stop):
            return None
        together = together._replace(stop=span.stop)
    return together


def _merged(items: Iterable[T], join: Callable[[T, T], T | None]) -> tuple[T, ...]:
    """With neighbours as one, where they can be."""
    found: list[T] = []
    for item in items:
        both = join(found[-1], item) if found else None
        if both is None:
            found.append(item)
        else:
            found[-1] = both
    return tuple(found)


def _one_move(a: Move, b: Move) -> Move | None:
    target, source = _chain([a.target, b.target]), _chain([a.source, b.source])
    return Move(target, source) if target and source else None


def _one_count(a: Count, b: Count) -> Count | None:
    span = _chain([a.span, b.span])
    return Count(span, a.ranks) if span and a.ranks == b.ranks else None


def _one_update(a: Update, b: Update) -> Update | None:
    target = _chain([a.target, b.target])
    own = _chain([a.own, b.own]) if a.own and b.own else None
    if target is None or (own is None) != (a.own is None and b.own is None) or len(a.arrived) != len(b.arrived):
        return None
    arrived: list[Arrival] = []
    for one, other in zip(a.arrived, b.arrived, strict=True):
        span = _chain([one.span, other.span])
        if one.message != other.message or span is None:
            return None
        arrived.append(Arrival(one.message, span))
    return Update(target, own, tuple(arrived), a.after_sends or b.after_sends)
