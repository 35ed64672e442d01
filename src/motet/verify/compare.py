"""How far what ranks computed is from the reference, tensor by tensor; put together from the parts that they have."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from motet.verify.parts import Given, Part, Site, UnfitError, Whole, is_of_no_rows, parts_of
from motet.verify.record import Kind, Seen

EPSILON = 2.0**-53
ROUNDINGS = 8.0
"""How many roundings of its size a number may be off for each square root of the operations behind it."""
MARGIN = 64.0
"""How many times as far from the reference as a perturbed reference is."""
COARSER = 8
"""So many bits fewer than the reference's numbers have are no accident."""
FEWEST_BITS = 3
"""Of a number that was rounded; ones and zeros were not."""
HUGE = 1e30
"""What masks places, as infinity does; nothing is measured by it."""
OUTLIER = 1e6
"""So many times as large as most of its kind is no measure for them."""


@dataclass(frozen=True)
class Reference:
    """A step on one device."""

    wholes: Mapping[Site, Whole]
    """In the order of execution."""
    learning_rate: float
    noise: dict[Site, float] = field(default_factory=dict)
    """How far a perturbed reference is from it, by the same measure."""
    varying: set[Site] = field(default_factory=set)
    """Of no rows, and another for other micro-batches: nothing to compare it with."""

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Of elements of tensors that are alike, in the mean of squares; what is far larger than most is left out."""
        found: dict[str, list[tuple[float, int]]] = {}
        for site, whole in self.wholes.items():
            found.setdefault(_family(site), []).append((size_of(whole.value) ** 2, whole.value.numel()))
        return {family: _usual_size(each) for family, each in found.items()}

    def tensor(self, site: Site) -> Tensor | None:
        found = self.wholes.get(site)
        return None if found is None else found.value


class Difference(NamedTuple):
    """Of one tensor, by the worst of the parts that it came in."""

    site: Site
    relative: float
    bound: float
    rank: int | None
    """Whose part it is; None: of all together."""
    what: str = ""
    """Where it is not by how much."""

    @property
    def is_rounding(self) -> bool:
        return not self.what and self.relative <= self.bound


def reference_of(seen: Iterable[Seen]) -> dict[Site, Whole]:
    seen = list(seen)
    rows = next((each.rows for each in seen if each.rows), ())
    found: dict[Site, Whole] = {}
    order = {kind: number for number, kind in enumerate(get_args(Kind))}
    early = ("starting parameter", "sample", "random mask", "activation", "loss", "activation gradient")
    for each in sorted(seen, key=lambda each: 0 if each.kind in early else order[each.kind]):
        value = each.value if each.shape is None else each.value.view(each.shape)
        found[each.kind, each.name] = Whole((each.kind, each.name), value, rows, each)
    return found


def _family(site: Site) -> str:
    """Moments are not as large as masters, and a loss not as a count."""
    kind, name = site
    return f"{kind} {name.partition('/')[0]}" if kind in ("state", "sum", "evaluation") else kind


def _usual_size(each: Sequence[tuple[float, int]]) -> float:
    """`each`: (sum of squares, count) of a tensor."""
    means = [squares / count for squares, count in each if squares]
    most = OUTLIER**2 * median(means) if means else 0.0
    usual = [(squares, count) for squares, count in each if count and squares / count <= most]
    total, elements = sum(squares for squares, _ in usual), sum(count for _, count in usual)
    return math.sqrt(total / elements) if elements else 0.0


def compare(reference: Reference, ranks: Sequence[Sequence[Seen]]) -> list[Difference]:
    """One for each tensor of the reference, in its order, and for what only ranks have."""
    by_site = sites_of(ranks)
    found = []
    for site, whole in reference.wholes.items():
        given = by_site.pop(site, [])
        found.append(_difference(reference, whole, given))
    for site, given in by_site.items():
        found.append(Difference(site, math.inf, 0.0, given[0][0], "one device has no such tensor"))
    return found


def sites_of(ranks: Sequence[Sequence[Seen]]) -> dict[Site, list[tuple[int, Seen]]]:
    by_site: dict[Site, list[tuple[int, Seen]]] = {}
    for rank, seen in enumerate(ranks):
        for each in seen:
            by_site.setdefault((each.kind, each.name), []).append((rank, each))
    return by_site


def varying(reference: Reference, ranks: Sequence[Sequence[Seen]]) -> set[Site]:
    """What differs in a reference of which each row was a micro-batch, though nothing that comes of it does: the
    places of the targets, a mean over rows, modules that are called for each row. Where rows do depend on each other,
    only what has no rows."""
    by_site, differences = sites_of(ranks), compare(reference, ranks)
    other = {each.site for each in differences if not each.is_rounding}
    inside = {site for site in other if site[0] in INSIDE and by_site.get(site)}
    if not any(site[0] in ("gradient", "sum", "norm") for site in other):
        uneven = {_module(site) for site in other - inside if site[0] in INSIDE}
        return inside | {site for site in reference.wholes if site[0] in INSIDE and _module(site) in uneven}
    return {site for site in inside if _is_table(reference.wholes[site], by_site[site])}


INSIDE = ("activation", "activation gradient")


def _module(site: Site) -> str:
    """Whose output it is, in whatever call."""
    return site[1].partition(" (call")[0].partition("[")[0]


def _is_table(whole: Whole, given: Given) -> bool:
    try:
        parts_of(whole, given)
    except UnfitError:
        return True
    return is_of_no_rows(whole, given)


def _difference(reference: Reference, whole: Whole, given: Given) -> Difference:
    site, bound = whole.site, bound_of(reference, whole)
    if site in reference.varying or bound == math.inf:
        return Difference(site, 0.0, bound, None)
    if not given:
        return Difference(site, math.inf, bound, None, "no rank has it")
    try:
        parts = parts_of(whole, given)
    except UnfitError as error:
        return Difference(site, math.inf, bound, error.rank, str(error))
    worst = Difference(site, 0.0, bound, None)
    for part in parts:
        if what := _of_other_precision(part, whole.seen.dtype):
            return Difference(site, math.inf, bound, part.rank, what)
        relative = distance(part.value, part.expected, floor_of(reference, site, part))
        if relative > worst.relative:
            worst = Difference(site, relative, bound, part.rank)
    return worst


def floor_of(reference: Reference, site: Site, part: Part) -> float:
    """What is as good as nothing to differ from."""
    count = part.seen.numel if part.seen and part.seen.shape is not None else part.expected.numel()
    size = reference.learning_rate if site[0] == "parameter" else reference.sizes[_family(site)]
    return size * math.sqrt(count)


def _of_other_precision(part: Part, dtype: str) -> str:
    seen = part.seen
    if seen is None:
        return ""
    if seen.dtype != dtype:
        return f"it is kept in {seen.dtype} on rank {part.rank}, and in {dtype} on one device"
    is_coarser = FEWEST_BITS <= seen.bits <= part.bits - COARSER
    if is_coarser and 0 < distance(part.value, part.expected, 0.0) < 2.0 ** (1 - seen.bits):
        said = {24: "float32", 11: "float16", 8: "bfloat16"}.get(seen.bits, f"{seen.bits} bits")
        return f"its numbers were rounded to {said}: they have {seen.bits} bits, on one device {part.bits}"
    return ""


def bound_of(reference: Reference, whole: Whole) -> float:
    if whole.site[0] in ("sample", "random mask"):
        return 0.0
    operations = ROUNDINGS * EPSILON * math.sqrt(max(1.0, whole.seen.operations))
    return max(operations, MARGIN * reference.noise.get(whole.site, 0.0))


def distance(value: Tensor, expected: Tensor, floor: float) -> float:
    """Of two tensors, by their norms; `floor`: what is as good as nothing to differ from."""
    off = float(torch.linalg.vector_norm(apart(value, expected)))
    if off == 0:
        return 0.0
    size = max(size_of(expected), floor)
    return off / size if size and not math.isnan(off) else math.inf


def apart(value: Tensor, expected: Tensor) -> Tensor:
    """Their difference; 0 where both are the same infinity."""
    a, b = value.double(), expected.double()
    return torch.where(a == b, 0.0, a - b)


def size_of(tensor: Tensor) -> float:
    """The norm of what is neither infinite nor a mask."""
    wide = tensor.double()
    return float(torch.linalg.vector_norm(torch.where(wide.abs() < HUGE, wide, 0.0)))
