"""What a layout does in a step, as a value: who reads which rows, whose sums go where, who updates and who gets what.

It is made by the functions that the engine reads too: `joined` (the ranks of each sum and gather), `buckets_of` and
`Bucket.shard` (what a shard has), `rows_of_rank`. Whether it is right is for `proof.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Literal, NamedTuple

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.buckets import Member, part_of_bucket
from motet.parallel.communication import CommunicationSettings, Joined, joined, undeferred
from motet.parallel.layout import Layout
from motet.parallel.matrices import Shape
from motet.parallel.placement import PLACEMENTS, buckets_of, has_rows, is_whole, part_of_rows
from motet.parallel.shares import rows_of_rank
from motet.precision.recipe import Recipe

Verb = Literal["scatter", "sum", "norm", "update", "gather", "keep", "levels"]


class Move(NamedTuple):
    """What sets of ranks do at once with a portion.

    | verb | each set |
    |---|---|
    | scatter | adds up what its ranks have of all of it; a rank gets the shard that its place in the set says |
    | sum | adds up the shard that its ranks have, for each of them |
    | norm | its ranks add what they have of the sums to the square of the norm |
    | update | is one copy: its ranks update what they have of it |
    | gather | each of its ranks gets all of it, the shards in the order of the set |
    | keep | keeps a second copy of what was gathered, in parts, and gathers it once more |
    | levels | has the same part of a second copy; a sum in two levels goes over those that share one, and then these |
    """

    verb: Verb
    sets: RankGroups


Course = tuple[Move, ...]
Cut = tuple[tuple[int, int], ...]
"""(first, stop) of each shard of a portion, from its start."""


@dataclass(frozen=True)
class Portion:
    """What is cut as one: a bucket of stages 0 to 2, or a parameter that stage 3 cuts into rows."""

    name: str
    kind: Literal["rows", "bucket"]
    members: tuple[Member, ...]
    start: int
    """In the flat tensor of all of its kind."""
    length: int
    """With padding."""
    cut: Cut
    course: Course


@dataclass(frozen=True)
class Plan:
    """A step of a layout."""

    shapes: Mapping[str, Shape]
    """Of what is trained."""
    portions: tuple[Portion, ...]
    ranks: int
    """That take a step together."""
    sends: tuple[tuple[int, ...], ...]
    """Each time that gradients travel: the micro-batches that they are of."""
    microbatches: int
    rows: tuple[tuple[range, ...], ...]
    """That each rank reads, by micro-batches; where replicas train apart, of all of them."""
    batch_sequences: int
    meetings: RankGroups = ()
    """Ranks of replicas that train apart, whose masters meet."""


@dataclass(frozen=True)
class Parameters:
    """What is trained, in the order of use."""

    shapes: Mapping[str, Shape]
    groups: Mapping[str, int]
    """The optimizer group of each; those that are not there are in the first."""


def plan_of(
    parameters: Parameters,
    layout: Layout,
    recipe: Recipe,
    settings: CommunicationSettings,
    batch_sequences: int,
    apart: bool = False,
) -> Plan:
    """Of a layout. `apart`: its replicas train apart; then each takes a step like the first, which it is of."""
    every = layout
    if apart:
        layout, settings = replace(layout, dp=layout.shards), undeferred(settings)
    microbatches = range(layout.microbatches)
    keeps = not PLACEMENTS[layout.zero].gradients
    return Plan(
        parameters.shapes,
        portions_of(parameters, layout, recipe, settings),
        layout.dp,
        (tuple(microbatches),) if keeps else tuple((number,) for number in microbatches),
        layout.microbatches,
        tuple(tuple(rows_of_rank(every, rank, batch_sequences)) for rank in range(every.dp)),
        batch_sequences,
        every.columns if apart else (),
    )


def held(plan: Plan, rank: int) -> dict[str, tuple[int, int]]:
    """(first, stop) of the elements that a rank updates of each parameter; those that it has none of are left out."""

    def shard(course: Course) -> int | None:
        """Its number; None when it updates all of what was gathered."""
        scatter, *others = (move for move in course if move.verb in ("scatter", "gather", "update"))
        gathered = others[0].verb == "gather"
        return None if gathered else next(ranks.index(rank) for ranks in scatter.sets if rank in ranks)

    courses = {id(portion.course): portion.course for portion in plan.portions}
    shards = {key: shard(course) for key, course in courses.items()}
    found = {}
    for portion in plan.portions:
        number = shards[id(portion.course)]
        first, stop = (0, portion.length) if number is None else portion.cut[number]
        for member in portion.members:
            start = max(0, portion.start + first - member.start)
            end = min(member.numel, portion.start + stop - member.start)
            if start < end:
                found[member.name] = start, end
    return found


def portions_of(
    parameters: Parameters, layout: Layout, recipe: Recipe, settings: CommunicationSettings
) -> tuple[Portion, ...]:
    """Of all parameters; rows first."""
    together = joined(settings, layout)
    course, shards = course_of(together, layout), len(together.shares[0])
    rows = {n: s for n, s in parameters.shapes.items() if has_rows(layout) and not is_whole(s, layout)}
    sizes = {n: (parameters.groups.get(n, 0), prod(s)) for n, s in parameters.shapes.items() if n not in rows}

    @cache
    def of_rows(shape: Shape) -> Cut:
        width, parts = prod(shape[1:]), (part_of_rows(shape[0], shards, shard) for shard in range(shards))
        return tuple((first * width, stop * width) for first, stop in parts)

    @cache
    def of_bucket(length: int, owner: int | None) -> Cut:
        return tuple(part_of_bucket(length, shards, shard, owner) for shard in range(shards))

    found, at = [], 0
    for name, shape in rows.items():
        numel = prod(shape)
        found.append(Portion(name, "rows", (Member(name, 0, at, numel),), at, numel, of_rows(shape), course))
        at += numel
    for number, b in enumerate(buckets_of(sizes, layout, recipe, settings)):
        cut = of_bucket(b.length, b.owner)
        found.append(Portion(f"bucket {number}", "bucket", b.members, b.start, b.length, cut, course))
    return tuple(found)


def course_of(together: Joined, layout: Layout) -> Course:
    """Of any portion of a layout."""
    reduced = (Move("scatter", together.shares), Move("sum", together.replicas))
    norm = Move("norm", (tuple(ranks[0] for ranks in together.replicas),))
    update, gather = Move("update", layout.rows), Move("gather", together.shares)
    if together.deferred:
        return (*reduced, norm, gather, update)
    keep = (Move("keep", together.near), Move("levels", together.far)) if together.near else ()
    return (*reduced, norm, update, gather, *keep)
