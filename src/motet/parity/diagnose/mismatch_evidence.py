"""A tensor that differs: its ranks and elements, and the reference data of which it could be made.

Equations between tensors that hold up to rounding or do not, and which contributions a sum consists of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from motet.core.units import dtype_name
from motet.parity.compare.align_with_reference import AlignedTensorPair, ReferenceTensor, format_numbered
from motet.parity.compare.reference_runs import DifferenceAtStep
from motet.parity.compare.tensor_differences import (
    ReferenceStep,
    TensorDifference,
    compare_with_reference,
    relative_distance,
)
from motet.parity.diagnose.optimizer_update import ExpectedOptimizerUpdate
from motet.parity.diagnose.single_device_recompute import MicroBatchResult, SingleDeviceRecompute
from motet.parity.diagnose.tolerances import tolerances
from motet.parity.record.activation_parts import module_of
from motet.parity.record.tensor_recorder import (
    MASTER_PREFIX,
    ROW_KINDS,
    RankRecords,
    RecordedShard,
    RecordedTensor,
    RecordsByRank,
    TensorKey,
    TensorKind,
    group_by_key,
    parameter_name,
    sketch_shard,
)
from motet.train.optimizer.module_plan import group_parameters

TARGET_TOKENS = "target tokens"
DTYPE_EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ROUNDING_MATCH = 1e-3  # Some elements may have been rounded the other way
MAX_ENUMERATED = 8
MAX_COARSE_FACTOR = 8  # Largest numerator and denominator; larger ones are too near to each other for rounded numbers
MAX_LOCATED_FRACTION = 0.95  # Fraction of a shard's elements; more are nearly all


def as_numbers(tensor: Tensor) -> Tensor:
    """A mask as numbers; other tensors unchanged."""
    return tensor.double() if tensor.dtype == torch.bool else tensor


def is_equal_up_to_rounding(value: Tensor, expected: Tensor) -> bool:
    return relative_distance(value, expected) < tolerances().fit


def solve_coefficients(value: Tensor, basis: Sequence[Tensor]) -> list[float] | None:
    """The coefficients with which the basis sums to the value; None where no such sum exists."""
    if any(each.shape != value.shape for each in basis):
        return None
    matrix, flat = torch.stack([each.double().flatten() for each in basis], 1), value.double().flatten()
    if not matrix.numel() or not float(matrix.abs().max()):
        return None
    solution = torch.linalg.lstsq(matrix, flat[:, None], driver="gelsd").solution[:, 0]
    if relative_distance(matrix @ solution, flat) > tolerances().fit and float(value.abs().max()):
        return None
    is_present = (matrix * solution).norm(dim=0) > tolerances().fit * float(torch.linalg.vector_norm(flat))
    return torch.where(is_present, solution, 0.0).tolist()


def is_about(factor: float, target: float) -> bool:
    return abs(factor - target) <= tolerances().coefficient * (abs(target) or 1.0)


def format_factor(factor: float) -> str:
    """At most eight digits; a simple fraction is written as one."""
    if tolerances().is_coarse:
        fractions = (Fraction(numerator, n) for n in range(1, MAX_COARSE_FACTOR + 1) for numerator in range(1, n + 1))
        simple = (each for fraction in fractions for each in (fraction, 1 / fraction))
        nearest = next((each for each in simple if is_about(abs(factor), float(each))), None)
        return f"{factor:.3g}" if nearest is None else "-" * (factor < 0) + str(nearest)
    for denominator in range(2, 65):
        numerator = round(factor * denominator)
        if numerator and is_about(factor * denominator, numerator) and not is_about(factor, round(factor)):
            return f"{numerator}/{denominator}"
    return f"{factor:.8g}"


def factor_meaning(factor: float, known_factors: Mapping[str, float]) -> str:
    """The known quantities by which something was multiplied or divided, as the end of a sentence."""
    for operation, number in (("multiplied", factor), ("divided", 1 / factor if factor else 0.0)):
        sizes = {n: s if operation == "multiplied" else 1 / s for n, s in known_factors.items() if s not in (0, 1)}
        if names := [name for name, size in sizes.items() if is_about(factor, size)]:
            return f": {operation} by {' = '.join([format_factor(number), *names])}"
    if is_about(factor, 2) or is_about(factor, 0.5):
        return ": counted twice" if factor > 1 else ": halved"
    batch_count = known_factors.get(TARGET_TOKENS, 0.0)
    for name, size in known_factors.items():
        is_count = name.startswith(TARGET_TOKENS) and size not in (0, batch_count)
        if is_count and (is_about(factor, batch_count / size) or is_about(factor, size / batch_count)):
            operation = "divided" if factor > 1 else "multiplied"
            instead = f"instead of the {format_factor(batch_count)} of the batch"
            return f": {operation} by the {name}, {format_factor(size)}, {instead}"
    return ""


def find_rounding_dtype(error: Tensor, exact: Tensor) -> str:
    """The dtype whose rounding of `exact` makes this error; empty if none does."""
    for dtype in DTYPE_EPSILON:
        rounding_error = exact.to(dtype).double() - exact.double()
        is_lossy = exact.dtype != dtype and bool(rounding_error.any())
        if is_lossy and relative_distance(error, rounding_error) < ROUNDING_MATCH:
            return dtype_name(dtype)
    return ""


class MicroBatchContribution(NamedTuple):
    """The term that one micro-batch of one rank adds to a sum."""

    rank: int
    microbatch: int
    value: Tensor
    target_count: float


Contributions = Sequence[MicroBatchContribution]


def explain_contributions(value: Tensor, contributions: Contributions, rank: int | None) -> str:
    """Name the missing, repeated or scaled contributions in the sum that `rank` has."""
    present = _nonzero(contributions)
    if len(present) > 1 and value.numel() <= len(present):
        return explain_by_enumeration(value, present, "the contribution of ")
    if not present or value.numel() == 1:
        return ""
    factors = solve_coefficients(value, [c.value for c in present])
    return _explain_factors(present, factors, rank) if factors else ""


def _nonzero(contributions: Contributions) -> list[MicroBatchContribution]:
    size = max((float(c.value.abs().max()) for c in contributions if c.value.numel()), default=0.0)
    return [c for c in contributions if float(c.value.abs().max()) > tolerances().enumeration * size] if size else []


def _with_factor(contributions: Contributions, factors: Sequence[float], target: float) -> list[MicroBatchContribution]:
    return [c for c, factor in zip(contributions, factors, strict=False) if is_about(factor, target)]


def _explain_factors(contributions: Contributions, factors: Sequence[float], rank: int | None) -> str:
    if is_about(min(factors), max(factors)):
        return ""
    missing, present, repeated = (_with_factor(contributions, factors, target) for target in (0, 1, 2))
    if missing and len(missing) + len(present) == len(contributions):
        if rank is not None and {c.rank for c in present} == {rank} != {c.rank for c in contributions}:
            return f"it is the contribution of rank {rank} alone: the sum over the ranks is missing"
        return f"it leaves out the contribution of {_format_contributions(missing, contributions)}"
    if repeated and len(repeated) + len(present) == len(contributions):
        return f"it has the contribution of {_format_contributions(repeated, contributions)} twice"
    if owner := _local_mean_owner(contributions, factors):
        divisor = "their own count of targets, instead of all by that of the whole batch"
        return f"contributions of {owner} are divided by {divisor}"
    distinct = sorted({round(factor, tolerances().digits) for factor in factors})
    if len(distinct) > 3 or distinct == [1.0]:
        return ""
    groups = [
        [c for c, own in zip(contributions, factors, strict=True) if round(own, tolerances().digits) == f]
        for f in distinct
    ]
    named = zip(distinct, (_format_contributions(group, contributions) for group in groups), strict=True)
    return f"it is made of {', '.join(f'{format_factor(factor)} times that of {names}' for factor, names in named)}"


def _local_mean_owner(contributions: Contributions, factors: Sequence[float]) -> str:
    """Ranks or micro-batches, if factor times target count is the same for all of them."""
    counts_by_owner = {
        "ranks": [sum(other.target_count for other in contributions if other.rank == c.rank) for c in contributions],
        "micro-batches": [c.target_count for c in contributions],
    }
    for owner, counts in counts_by_owner.items():
        products = [factor * count for factor, count in zip(factors, counts, strict=True)]
        if len(set(counts)) > 1 and products[0] and all(is_about(p / products[0], 1) for p in products):
            return owner
    return ""


def explain_rounded_contribution(error: Tensor, contributions: Contributions) -> str:
    """One rank, or one micro-batch of all ranks, adds its contribution in a smaller dtype."""
    for group in _groups(contributions) if len(contributions) > 1 else ():
        members = [contributions[index] for index in group]
        if dtype := find_rounding_dtype(error, torch.stack([c.value.double() for c in members]).sum(0)):
            return f"the contribution of {_format_contributions(members, contributions)} was rounded to {dtype}"
    return ""


def _groups(contributions: Contributions) -> list[list[int]]:
    """Indices of the contributions of each rank, then of each micro-batch of all ranks."""
    return [
        [index for index, c in enumerate(contributions) if c[field] == value]
        for field in (0, 1)
        for value in sorted({c[field] for c in contributions})
    ]


def explain_by_enumeration(value: Tensor, contributions: Contributions, noun: str) -> str:
    """Try which contributions are missing or repeated, where a sum has too few numbers to solve for coefficients."""
    if not contributions:
        return ""
    matrix = torch.stack([c.value.double().flatten() for c in contributions])
    multiplicities = _multiplicities(contributions)
    size = torch.linalg.vector_norm(multiplicities.abs() @ matrix.abs(), dim=1)
    error = torch.linalg.vector_norm(multiplicities @ matrix - value.double().flatten(), dim=1)
    fitting = multiplicities[(error <= tolerances().enumeration * size) & (size > 0)].tolist()
    if not fitting:
        return ""
    chosen = min(fitting, key=lambda counts: sum(abs(count - 1) for count in counts))
    missing, repeated = (_with_factor(contributions, chosen, target) for target in (0, 2))
    findings = [f"it leaves out {noun}{_format_contributions(missing, contributions)}"] if missing else []
    findings += [f"it has {noun}{_format_contributions(repeated, contributions)} twice"] if repeated else []
    return " and ".join(findings)


def _multiplicities(contributions: Contributions) -> Tensor:
    """Rows of how often each contribution occurs.

    Among many contributions only one, one rank, or one micro-batch of all ranks is missing, repeated or alone.
    """
    count = len(contributions)
    if count <= MAX_ENUMERATED:
        return torch.cartesian_prod(*[torch.arange(3.0, dtype=torch.float64)] * count).view(-1, count)
    rows = [
        [inside if index in group else outside for index in range(count)]
        for group in [*([index] for index in range(count)), *_groups(contributions)]
        for inside, outside in [(0.0, 1.0), (2.0, 1.0), (1.0, 0.0)]
    ]
    return torch.tensor([[1.0] * count, *rows], dtype=torch.float64)


def _format_contributions(contributions: Contributions, all_contributions: Contributions) -> str:
    """Only the ranks are named where all of their micro-batches are meant."""
    ranks, microbatches = sorted({c.rank for c in contributions}), sorted({c.microbatch for c in contributions})
    text, named = format_numbered("rank", ranks), {c[:2] for c in contributions}
    has_all = all(c[:2] in named for c in all_contributions if c.rank in ranks)
    return text if has_all else f"{format_numbered('micro-batch', microbatches)} of {text}"


def locate_elements(shard: RecordedShard, is_wrong: Tensor, masters: RankRecords) -> str:
    """Words for the wrong elements of a shard, by their numbers in the whole tensor, and the rank that updates them.

    Empty if nearly all elements of the shard are wrong.
    """
    wrong, numel = is_wrong.nonzero().flatten(), prod(shard.spec.shape)
    if not len(wrong) or int(wrong[-1] + 1 - wrong[0]) >= MAX_LOCATED_FRACTION * shard.numel:
        return ""
    indices = shard.cut(torch.arange(1, numel + 1))[wrong] - 1  # Padding has no number
    inside = indices[indices >= 0]
    if not len(inside):
        return ", in the padding of the rank's part"
    first, last, count = int(inside.min()), int(inside.max()), len(inside)
    text = f"element {first}" if first == last else f"elements {first} to {last}"
    text = f", in {text if last - first < count else f'{count} of {text}'} of {numel}"
    start, stop = shard.start + int(wrong[0]), shard.start + int(wrong[-1])
    for rank, record in masters:
        part = record.shard
        if part and part.spec == shard.spec and part.start <= start and stop < part.stop and part.numel < numel:
            return f"{text}, which rank {rank} updates"
    return text


SCALAR_KINDS = ("sum", "norm", "evaluation", "loss")
MAX_OTHER_GRADIENTS = 8
BEFORE_CLIPPING = "the gradient before clipping"


@dataclass(frozen=True)
class LocatedDifference:
    """One tensor that differs, as the ranks recorded it and as one device has it."""

    recompute: SingleDeviceRecompute  # Recomputation of its step
    records_by_rank: RecordsByRank
    difference: DifferenceAtStep
    reference: ReferenceStep
    tensor: ReferenceTensor
    pairs: Sequence[AlignedTensorPair]

    @property
    def key(self) -> TensorKey:
        return self.tensor.key

    @cached_property
    def records_by_key(self) -> dict[TensorKey, list[tuple[int, RecordedTensor]]]:
        return group_by_key(self.records_by_rank)

    @cached_property
    def worst_pair(self) -> AlignedTensorPair:
        worst = max(self.pairs, key=lambda pair: self.reference.distance_of(self.key, pair))
        return worst._replace(value=as_numbers(worst.value), expected=as_numbers(worst.expected))

    @cached_property
    def all_differences(self) -> list[TensorDifference]:
        return compare_with_reference(self.reference, self.records_by_rank, self.recompute.planned)

    def location_text(self) -> str:
        """The ranks and elements that differ, if others do not."""
        bound, rank_pairs = self.difference.difference.bound, [p for p in self.pairs if p.rank is not None]
        ranks = sorted({p.rank or 0 for p in rank_pairs if self.reference.distance_of(self.key, p) > bound})
        is_part = 0 < len(ranks) < len({p.rank for p in self.pairs if p.value.numel()})
        text = f", on {format_numbered('rank', ranks)} alone" if is_part else ""
        text += self._pipeline_text()
        record = self.worst_pair.record
        if self.differing_slice is None or record is None or record.shard is None:
            return text
        masters = self.records_by_key.get(TensorKey("state", f"{MASTER_PREFIX}{parameter_name(self.key.name)}"), [])
        return text + locate_elements(record.shard, self._differing_elements, masters)

    def _pipeline_text(self) -> str:
        """The border and the micro-batches of a pipeline that differ, if others do not."""
        planned, stage = self.recompute.planned, None
        if planned is None or (stage := planned.stage_of(self.key)) is None:
            return ""
        sharding, bound, text = planned.plan.model_sharding, self.difference.difference.bound, ""
        is_last_block = module_of(self.key.name) == sharding.block_names[sharding.stages[stage].stop - 1]
        if is_last_block and self.key.kind == "activation gradient" and stage + 1 < len(sharding.stages):
            text = f", sent back by stage {stage + 1} to stage {stage}"
        by_microbatch = [(p.record.microbatch, self.reference.distance_of(self.key, p)) for p in self.pairs if p.record]
        wrong = sorted({microbatch for microbatch, distance in by_microbatch if distance > bound})
        is_part = 0 < len(wrong) < len(dict(by_microbatch))
        return text + (f", in {format_numbered('micro-batch', wrong)} alone" if is_part else "")

    @cached_property
    def _differing_elements(self) -> Tensor:
        """Whether each element of the worst shard differs."""
        value, expected = self.worst_pair.value, self.worst_pair.expected
        error = (value.double() - expected.double()).abs().nan_to_num(torch.inf)
        limit = 1e-3 * self.difference.difference.bound * float(expected.double().abs().max())
        return (error > limit) & (value != expected)  # Both may be the same infinity

    @cached_property
    def differing_slice(self) -> slice | None:
        """The elements of the worst shard that differ; None if nearly all do."""
        value, record = self.worst_pair.value, self.worst_pair.record
        if record is None or record.shard is None or record.is_sketched or value.numel() < 2:
            return None
        wrong = self._differing_elements.nonzero().flatten().tolist()
        return (
            slice(wrong[0], wrong[-1] + 1)
            if wrong and wrong[-1] + 1 - wrong[0] < MAX_LOCATED_FRACTION * value.numel()
            else None
        )

    def cut(self, shard: Tensor) -> Tensor:
        """The elements of the worst shard that differ."""
        return shard if self.differing_slice is None else shard[self.differing_slice]

    def select(self, tensor: Tensor) -> Tensor:
        """The part of an unsharded tensor that the worst pair is about."""
        record = self.worst_pair.record
        if record is None or record.shard is None:
            return as_numbers(tensor)
        return self.cut(sketch_shard(record.shard.cut(as_numbers(tensor)), record.shard.start))

    @cached_property
    def known_factors(self) -> dict[str, float]:
        """Description -> number by which something may have been multiplied or divided."""
        sharding, results = self.recompute.layout.sharding, self.recompute.microbatch_results
        rows, microbatches = self.recompute.subject.batch_rows, self.recompute.all_microbatches
        dp = self.recompute.layout.dp
        targets_by_rank = {
            rank: sum(r.target_count for r in results if r.rank == rank) for rank in {r.rank for r in results}
        }
        return {
            **{name: float(self.recompute.layout.dims.size(name)) for name, _ in self.recompute.layout.dims.sizes},
            "micro-batches of a rank": float(sharding.microbatches),
            "all micro-batches": float(microbatches),
            "ranks of a shard group": float(sharding.shards),
            "replicas": sharding.ranks / sharding.shards,
            "rows of the batch": float(rows),
            "rows of a rank": rows / dp,
            "rows of a micro-batch": rows / microbatches,
            TARGET_TOKENS: sum(targets_by_rank.values()),
            **{f"{TARGET_TOKENS} of rank {rank}": count for rank, count in targets_by_rank.items()},
            **{f"{TARGET_TOKENS} of micro-batch {r.microbatch} of rank {r.rank}": r.target_count for r in results},
            "scale of all gradients": self.gradient_scale,
            "the square of dp": float(dp) ** 2,
        }

    @cached_property
    def gradient_scale(self) -> float:
        """The factor by which sums of gradients are divided and clipped."""
        norm, count = self.reference.scalar("norm", "gradient norm"), self.reference.scalar("sum", TARGET_TOKENS)
        return 1.0 if norm is None or count is None else self.recompute.rank_subject.engine.gradient_scale(norm, count)

    @property
    def other_steps(self) -> dict[str, ReferenceStep]:
        """Description -> another step of one device, the nearest first."""
        steps, step = self.recompute.reference_runs.step_references, self.recompute.step
        words = {step - 1: "the step before", step + 1: "the step after"}
        others = sorted((n for n in range(len(steps)) if n != step), key=lambda n: abs(n - step + 0.1))
        return {words.get(n, f"step {n + 1}"): steps[n] for n in others}


@dataclass(frozen=True)
class MismatchEvidence:
    """The values that a hypothesis tests; the collector leaves empty the fields that a kind of tensor does not have."""

    value: Tensor
    expected: Tensor
    rank: int | None = None  # None: the value is of all ranks together
    known_factors: Mapping[str, float] = field(default_factory=dict)  # Possible origins of factors: `dp` -> 4
    kind: TensorKind = "gradient"
    name: str = ""
    contributions: Contributions = ()  # Their sum is expected
    alternatives: Mapping[str, Tensor] = field(default_factory=dict)  # Description -> tensor that it might be
    alternative_rows: Mapping[str, Tensor] = field(default_factory=dict)  # Description -> [rows, elements of each]
    value_before_step: Tensor | None = None
    source_tensors: Mapping[str, Tensor] = field(default_factory=dict)  # Name -> tensor that it might be a slice of
    results: Sequence[MicroBatchResult] = ()  # Losses and counts that a scalar is the sum or the mean of
    token_count: int = 0  # Tokens of the batch, targets or not
    optimizer: "OptimizerEvidence | None" = None
    located: LocatedDifference | None = None  # None: the tensor was computed from others, no rank recorded it

    @property
    def source(self) -> LocatedDifference:
        assert self.located is not None, "hypotheses of kinds that are only recorded"
        return self.located


class OptimizerEvidence(NamedTuple):
    """The inputs of the update of a master or a moment."""

    state_name: str  # master, exp_avg, ...
    update: ExpectedOptimizerUpdate
    gradient: MismatchEvidence  # The gradient of the update, in place of a value that is not recorded
    other_gradients: Mapping[str, Tensor]  # Description -> the gradient of another parameter
    state_before: Mapping[str, Tensor]  # Name -> tensor of the state before the step


def make_evidence(located: LocatedDifference) -> MismatchEvidence:
    """The values that hypotheses about this kind of tensor test."""
    (kind, name), pair, recompute = located.key, located.worst_pair, located.recompute
    factors = located.known_factors
    evidence = MismatchEvidence(pair.value, pair.expected, pair.rank, factors, kind=kind, name=name, located=located)
    if kind in SCALAR_KINDS:
        results = recompute.results_of(located.key)
        targets = None if kind == "evaluation" else located.reference.value_of(TensorKey("sample", "targets"))
        return replace(evidence, results=results, token_count=0 if targets is None else targets.numel())
    if kind in ROW_KINDS:
        return _with_rows(evidence, located)
    state_name = {"parameter": f"{MASTER_PREFIX}{name}", "state": name, "buffer": f"buffer/{name}"}.get(kind, "")
    before = recompute.state_before_step.get(state_name)
    shards = [t for t in located.reference.tensors.values() if t.key.kind == kind and t.record.shard]
    evidence = replace(
        evidence,
        value=located.cut(pair.value),
        expected=located.cut(pair.expected),
        alternatives=_same_kind(located),
        value_before_step=None if before is None or before.ndim == 0 else located.select(before),
        source_tensors={f"{kind} {tensor.key.name}": tensor.value for tensor in shards},
    )
    if kind == "gradient":
        return replace(evidence, contributions=_contributions(located, name))
    if kind == "clipped gradient":
        unclipped = _unclipped(located, name, BEFORE_CLIPPING)
        alternatives = {**unclipped, **evidence.alternatives, **_wrong_clippings(located, unclipped)}
        return replace(evidence, contributions=_contributions(located, name, clips=True), alternatives=alternatives)
    return replace(evidence, optimizer=_optimizer_evidence(evidence, located)) if kind == "state" else evidence


def _contributions(located: LocatedDifference, name: str, *, clips: bool = False) -> Contributions:
    recompute, scale = located.recompute, located.gradient_scale if clips else 1.0
    if (planned := recompute.planned) and not planned.has_complete_local_gradients(name):
        return [  # Only the ranks can tell which part of a gradient each of them has
            MicroBatchContribution(rank, record.microbatch, scale * located.select(gradient), 0.0)
            for rank, record in located.records_by_key.get(TensorKey("local gradient", name), [])
            if (gradient := record.in_whole()) is not None
        ]
    return [
        MicroBatchContribution(
            planned.holder(name, r.rank) if planned else r.rank,
            r.microbatch,
            scale * located.select(r.gradients[name]),
            r.target_count,
        )
        for r in recompute.microbatch_results
        if name in r.gradients
    ]


def _same_kind(located: LocatedDifference) -> dict[str, Tensor]:
    (kind, name), step, tensors = located.key, located.recompute.step, dict[str, Tensor]()
    if kind == "gradient" and step:
        previous = located.recompute.reference_runs.step_references[step - 1]
        if (clipped := previous.value_of(TensorKey("clipped gradient", name))) is not None:
            tensors["the clipped gradient of the step before"] = clipped
    if kind not in ("state", "parameter", "buffer"):
        tensors |= _in_other_steps(located, located.key, "its value in")
    tensors |= {f"that of {other}": tensor for other, tensor in _others_of_kind(located, kind, name).items()}
    selected = {words: located.select(tensor) for words, tensor in tensors.items()}
    return {words: tensor for words, tensor in selected.items() if tensor.ndim}


def _in_other_steps(located: LocatedDifference, key: TensorKey, words: str) -> dict[str, Tensor]:
    return {f"{words} {step}": r.tensors[key].value for step, r in located.other_steps.items() if key in r.tensors}


def _others_of_kind(located: LocatedDifference, kind: TensorKind, name: str) -> dict[str, Tensor]:
    """Name -> another tensor of a kind, of the same shape."""
    others = [t for t in located.reference.tensors.values() if t.key.kind == kind and t.key.name != name]
    return {other.key.name: other.value for other in others if other.value.shape == located.tensor.value.shape}


def _unclipped(located: LocatedDifference, name: str, words: str) -> dict[str, Tensor]:
    """The mean and the sum of gradients; empty where nothing is trained."""
    values = [c.value for c in _contributions(located, name)]
    if not values or not values[0].numel():
        return {}
    summed = torch.stack(values).sum(0)
    return {words: summed / located.reference.target_count, "the sum, not divided or clipped": summed}


def _wrong_clippings(located: LocatedDifference, unclipped: Mapping[str, Tensor]) -> dict[str, Tensor]:
    limit, norm = located.recompute.subject.optimizer.clip_norm, _gradient_norm(located.reference)
    if limit is None or not unclipped:
        return {}
    mean = unclipped[BEFORE_CLIPPING]
    norms = {
        "clipped by its own norm, instead of that of all gradients": float(torch.linalg.vector_norm(mean)),
        "clipped twice": norm * max(1.0, norm / limit),
        "clipped by the square of the norm": norm**2,
        "clipped by the norm of the sums, not divided": norm * located.reference.target_count,
        **{f"clipped by the norm of {words}": _gradient_norm(step) for words, step in located.other_steps.items()},
    }
    clipped = {words: mean * (limit / wrong) for words, wrong in norms.items() if wrong > limit}
    return clipped | {"cut element by element, instead of by the norm": mean.clamp(-limit, limit)}


def _gradient_norm(reference: ReferenceStep) -> float:
    return reference.scalar("norm", "gradient norm") or 0.0


def _optimizer_evidence(e: MismatchEvidence, located: LocatedDifference) -> OptimizerEvidence | None:
    state_name, _, name = located.key.name.partition("/")
    reference, record, settings = located.reference, located.worst_pair.record, located.recompute.subject.optimizer
    clipped_key, before = TensorKey("clipped gradient", name), located.recompute.state_before_step
    clipped = reference.value_of(clipped_key)
    if clipped is None or f"{MASTER_PREFIX}{name}" not in before or (record and record.is_sketched):
        return None
    groups = group_parameters(located.recompute.module, settings)
    scale, decay = next(key for key, members in groups.items() if name in members)
    state = {n.split("/")[0]: located.select(tensor) for n, tensor in before.items() if n.endswith(f"/{name}")}
    master, gradient, rate = state["master"], located.select(clipped), reference.learning_rate
    moments = {n: state.get(n, torch.zeros_like(master)) for n in ("exp_avg", "exp_avg_sq", "momentum_buffer")}
    rates = {words: step.learning_rate * scale for words, step in located.other_steps.items()}
    rates |= {f"parameters whose scale is {other:g}": rate * other for other, _ in groups}
    step = float(before.get("step", 0.0)) + 1
    update = ExpectedOptimizerUpdate(settings, rate * scale, decay, step, master, moments, gradient, rates)
    others = {words: located.select(t) for words, t in _in_other_steps(located, clipped_key, "that of").items()}
    others |= _unclipped(located, name, "the one before clipping")
    shares = _contributions(located, name, clips=True)
    used = MismatchEvidence(gradient, gradient, e.rank, e.known_factors, contributions=shares, alternatives=others)
    same_shape = list(_others_of_kind(located, "clipped gradient", name).items())[:MAX_OTHER_GRADIENTS]
    other_gradients = {f"the gradient of {other}": located.select(value) for other, value in same_shape}
    state_before = {n: t for n, t in before.items() if n.startswith(f"{state_name}/") or n.endswith(name)}
    return OptimizerEvidence(state_name, update, used, other_gradients, state_before)


def _with_rows(evidence: MismatchEvidence, located: LocatedDifference) -> MismatchEvidence:
    """Add rows that a micro-batch might have instead, and the values of its rows after another mistake."""
    (kind, name), record = located.key, located.worst_pair.record
    if record is None or evidence.value.ndim != 2:
        return evidence
    steps = {"the batch": located.reference}
    steps |= {f"the batch of {words}": reference for words, reference in located.other_steps.items()}
    rows = {
        words if key.name == name else f"{words}, {key.name}": tensor.value
        for words, reference in steps.items()
        for key, tensor in reference.tensors.items()
        if key.kind == kind and (key.name == name or kind == "random mask")
    }
    alternatives: dict[str, Tensor] = {}
    if kind == "sample":
        samples = _others_of_kind(located, kind, name)
        alternatives = {f"the value of {other}": value for other, value in samples.items()}
    own_rows = _as_rows(located, alternatives, set(record.rows))
    return replace(evidence, alternative_rows=_as_rows(located, rows), alternatives=own_rows)


def _as_rows(located: LocatedDifference, tensors: dict[str, Tensor], rows: set[int] | None = None) -> dict[str, Tensor]:
    """[rows, elements of each] of all or some rows of the tensors that have the shape of the one that differs."""
    count, shape = len(located.tensor.rows), located.tensor.value.shape
    indices = [index for index, row in enumerate(located.tensor.rows) if rows is None or row in rows]
    return {
        words: as_numbers(tensor).reshape(count, -1)[indices]
        for words, tensor in tensors.items()
        if tensor.ndim and tensor.shape == shape and tensor.shape[0] % count == 0
    }
