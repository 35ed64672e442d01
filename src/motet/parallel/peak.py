"""How many bytes more than it keeps a rank needs at the worst moment of a step, activations apart.

These are gradients before they are summed, and what stage 3 gathers. At stage 3 the moments are those of FSDP2 on CPU
ranks: it gathers one block ahead in backward, holds what arrived of one unit until the next has arrived in forward, and
holds what it sent of one unit until it sends the next.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod

from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.buckets import Bucket
from motet.parallel.communication import CommunicationSettings
from motet.parallel.layout import Layout
from motet.parallel.matrices import Shape
from motet.parallel.placement import PLACEMENTS, Portions, Unit, cut_into_rows
from motet.precision.recipe import Recipe


def peak(portions: Portions, layout: Layout, recipe: Recipe, settings: CommunicationSettings) -> int:
    """Beyond what `memory` says is kept. Uncompressed, each block called once, and without what algorithms need.

    Gradients are taken one after another; where autograd has that of a bias after the next matrix's, it is one more.
    """
    if portions.units:
        return _of_units(portions.units, layout, recipe)
    return _of_buckets(portions.buckets, layout, recipe, settings.overlap != "none")


def _of_buckets(buckets: Sequence[Bucket], layout: Layout, recipe: Recipe, overlap: bool) -> int:
    """A gradient as autograd has it; at stage 2 also whole buckets, of which one is filled while another travels."""
    compute, reduce = DTYPE_BYTES[recipe.compute], DTYPE_BYTES[recipe.reduce]
    largest = [compute * max(member.numel for member in bucket.members) for bucket in buckets]
    if not PLACEMENTS[layout.zero].gradients:
        return max(largest)
    whole = [reduce * bucket.length for bucket in buckets]
    arriving = [size // layout.shards if layout.microbatches > 1 else 0 for size in whole]
    if not overlap:
        sending = (sum(whole[i:]) + sum(arriving[i : i + 2]) for i in range(len(whole)))
        return max(*(sum(whole[: i + 1]) + size for i, size in enumerate(largest)), *sending)
    alone = whole[0] + max(largest[0], arriving[0])
    return max(
        alone,
        *(whole[i] + whole[j] + arriving[i] + max(largest[j], arriving[j]) for i, j in pairwise(range(len(buckets)))),
    )


def _of_units(units: Sequence[Unit], layout: Layout, recipe: Recipe) -> int:
    """Gradients of the step before are freed when a step begins; those of its first micro-batch take their place.

    Where there are replicas, sums over micro-batches wait for the last one beside the gradients that they are part of.
    """
    last = layout.microbatches - 1
    waits = layout.dp > layout.shards
    kept = DTYPE_BYTES[recipe.master] * sum(cut_into_rows(unit.trainable, layout.shards) for unit in units)
    cases = [(0, 0, 1 if waits and last else 0)]  # what is summed, what waits, and whether that grows with each unit
    cases += [(kept, kept if waits else 0, 0)] if last > 1 else []
    cases += [(kept, kept if waits else 0, -1 if waits else 0)] if last else []
    return max(max(_moments(units, layout, recipe, *case)) for case in cases) - kept


def _moments(
    units: Sequence[Unit], layout: Layout, recipe: Recipe, summed: int, waiting: int, grows: int
) -> Iterator[int]:
    """What there is of a micro-batch besides masters and moments of the optimizer."""
    compute, reduce, shards = DTYPE_BYTES[recipe.compute], DTYPE_BYTES[recipe.reduce], layout.shards
    *blocks, root = units

    def whole(unit: Unit) -> int:
        return compute * shards * cut_into_rows(unit.trainable + unit.frozen, shards)

    kept = summed + waiting
    yield 2 * whole(root) + kept  # as it arrives, and as it is used
    held, before = whole(root), whole(root)
    for block in blocks:  # what arrived for the one before is freed after what arrives for this one
        yield held + before + 2 * whole(block) + kept
        held, before = held + (0 if layout.regather else whole(block)), whole(block)
    held += compute * _elements(root.late)
    sent, ahead = 0, 0
    for number, unit in enumerate((*reversed(blocks), root)):
        if unit.is_block and layout.regather:
            yield held + sent + kept + (ahead or whole(unit)) + whole(unit)
            held += whole(unit)
            ahead = whole(blocks[-2 - number]) if number + 1 < len(blocks) else 0
        gradients = compute * _elements(unit.trainable)
        grown = gradients if unit.is_block else gradients - compute * _elements(unit.late)
        yield held + ahead + sent + kept + grown
        held += grown - whole(unit)  # it is freed before its gradients are sent
        sent = reduce * shards * cut_into_rows(unit.trainable, shards)
        yield held + ahead + sent + kept
        held -= gradients
        mine = sent // shards
        last = compute * _elements(unit.trainable[-1:])
        yield held + ahead + sent + kept + mine + max(grows, 0) * mine + last
        kept += (0 if summed else mine) + grows * mine


def _elements(shapes: Iterable[Shape]) -> int:
    return sum(map(prod, shapes))
