"""A tensor that differs: its ranks and elements, and the reference data of which it could be made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from motet.parity.compare.align_with_reference import AlignedTensorPair, ReferenceTensor
from motet.parity.compare.planned_records import format_numbered
from motet.parity.compare.reference_runs import DifferenceAtStep
from motet.parity.compare.tensor_differences import ReferenceStep, TensorDifference, compare_with_reference
from motet.parity.diagnose.linear_fit import TARGET_TOKENS, Contributions, MicroBatchContribution, as_numbers
from motet.parity.diagnose.optimizer_update import ExpectedOptimizerUpdate
from motet.parity.diagnose.single_device_recompute import MicroBatchResult, SingleDeviceRecompute
from motet.parity.record.activation_parts import module_of
from motet.parity.record.tensor_recorder import (
    MASTER_PREFIX,
    ROW_KINDS,
    RecordedTensor,
    RecordsByRank,
    TensorKey,
    TensorKind,
    group_by_key,
    sketch_shard,
)
from motet.train.optimizer.parameter_groups import group_parameters

SCALAR_KINDS = ("sum", "norm", "evaluation", "loss")
MAX_OTHER_GRADIENTS = 8
BEFORE_CLIPPING = "the gradient before clipping"


@dataclass(frozen=True)
class LocatedDifference:
    """One tensor that differs, as the ranks recorded it and as one device has it."""

    recompute: SingleDeviceRecompute  # Of its step
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
        bound, of_ranks = self.difference.difference.bound, [p for p in self.pairs if p.rank is not None]
        ranks = sorted({p.rank or 0 for p in of_ranks if self.reference.distance_of(self.key, p) > bound})
        is_part = 0 < len(ranks) < len({p.rank for p in self.pairs if p.value.numel()})
        text = f", on {format_numbered('rank', ranks)} alone" if is_part else ""
        text += self._pipeline_text()
        elements, record = self.differing_slice, self.worst_pair.record
        if elements is None or record is None:
            return text
        start = record.shard.start if record.shard else 0
        first, last = start + elements.start, start + elements.stop - 1
        element_text = f"element {first}" if first == last else f"elements {first} to {last}"
        text = f"{text}, in {element_text} of {self.tensor.value.numel()}"
        master_key = TensorKey("state", f"{MASTER_PREFIX}{self.key.name.rpartition('/')[2]}")
        for rank, record in self.records_by_key.get(master_key, []):
            is_inside = record.shard is not None and record.shard.start <= first and last < record.shard.stop
            if is_inside and record.shard and record.shard.numel < self.tensor.value.numel():
                return f"{text}, which rank {rank} updates"
        return text

    def _pipeline_text(self) -> str:
        """The border and the micro-batches of a pipeline that differ, if others do not."""
        planned, stage = self.recompute.planned, None
        if planned is None or (stage := planned.stage_of(self.key)) is None:
            return ""
        sharding, bound, text = planned.plan.model_sharding, self.difference.difference.bound, ""
        is_last_block = module_of(self.key.name) == sharding.block_names[sharding.stages[stage].stop - 1]
        if is_last_block and self.key.kind == "activation gradient" and stage + 1 < len(sharding.stages):
            text = f", of what stage {stage + 1} sends back to stage {stage}"
        by_microbatch = [(p.record.microbatch, self.reference.distance_of(self.key, p)) for p in self.pairs if p.record]
        wrong = sorted({microbatch for microbatch, distance in by_microbatch if distance > bound})
        is_part = 0 < len(wrong) < len(dict(by_microbatch))
        return text + (f", in {format_numbered('micro-batch', wrong)} alone" if is_part else "")

    @cached_property
    def differing_slice(self) -> slice | None:
        """The elements of the worst shard that differ; None if nearly all do."""
        value, expected, record = self.worst_pair.value, self.worst_pair.expected, self.worst_pair.record
        if record is None or record.shard is None or record.is_sketched or value.numel() < 2:
            return None
        error = (value.double() - expected.double()).abs().nan_to_num(torch.inf)
        limit = 1e-3 * self.difference.difference.bound * float(expected.double().abs().max())
        wrong = ((error > limit) & (value != expected)).nonzero().flatten().tolist()  # Both may be the same infinity
        return slice(wrong[0], wrong[-1] + 1) if wrong and wrong[-1] + 1 - wrong[0] < 0.95 * value.numel() else None

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
        targets_by_rank = {
            rank: sum(r.target_count for r in results if r.rank == rank) for rank in {r.rank for r in results}
        }
        return {
            **{name: float(self.recompute.layout.dims.size(name)) for name, _ in self.recompute.layout.dims.sizes},
            "dp": float(sharding.ranks),
            "micro-batches of a rank": float(sharding.microbatches),
            "all micro-batches": float(microbatches),
            "ranks of a shard group": float(sharding.shards),
            "replicas": sharding.ranks / sharding.shards,
            "rows of the batch": float(rows),
            "rows of a rank": rows / sharding.ranks,
            "rows of a micro-batch": rows / microbatches,
            TARGET_TOKENS: sum(targets_by_rank.values()),
            **{f"{TARGET_TOKENS} of rank {rank}": count for rank, count in targets_by_rank.items()},
            **{f"{TARGET_TOKENS} of micro-batch {r.microbatch} of rank {r.rank}": r.target_count for r in results},
            "what gradients are scaled by": self.gradient_scale,
            "the square of dp": float(sharding.ranks) ** 2,
        }

    @cached_property
    def gradient_scale(self) -> float:
        """The factor by which sums of gradients are divided and clipped."""
        norm, count = self.reference.scalar("norm", "gradient norm"), self.reference.scalar("sum", TARGET_TOKENS)
        return 1.0 if norm is None or count is None else self.recompute.rank_subject.engine.gradient_scale(norm, count)

    @property
    def target_count(self) -> float:
        return self.reference.scalar("sum", TARGET_TOKENS) or 1.0

    @property
    def other_steps(self) -> dict[str, ReferenceStep]:
        """Description -> another step of one device, the nearest first."""
        steps, step = self.recompute.reference_runs.step_references, self.recompute.step
        words = {step - 1: "the step before", step + 1: "the step after"}
        others = sorted((n for n in range(len(steps)) if n != step), key=lambda n: abs(n - step + 0.1))
        return {words.get(n, f"step {n + 1}"): steps[n] for n in others}


@dataclass(frozen=True)
class MismatchEvidence:
    """The values of a hypothesis; the collector leaves empty what the kind of the tensor does not have."""

    value: Tensor
    expected: Tensor
    rank: int | None = None  # None: the value is of all ranks together
    known_factors: Mapping[str, float] = field(default_factory=dict)  # What factors may come from: `dp` -> 4
    kind: TensorKind = "gradient"
    name: str = ""
    contributions: Contributions = ()  # Their sum is expected
    alternatives: Mapping[str, Tensor] = field(default_factory=dict)  # Description -> what it might be instead
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
    """Everything that hypotheses about this kind of tensor look at."""
    (kind, name), pair, recompute = located.key, located.worst_pair, located.recompute
    factors = located.known_factors
    evidence = MismatchEvidence(pair.value, pair.expected, pair.rank, factors, kind=kind, name=name, located=located)
    if kind in SCALAR_KINDS:
        results = recompute.evaluation_results if kind == "evaluation" else recompute.microbatch_results
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
        tensors |= _in_other_steps(located, located.key, "what it was in")
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
    return {words: summed / located.target_count, "the sum, not divided or clipped": summed}


def _wrong_clippings(located: LocatedDifference, unclipped: Mapping[str, Tensor]) -> dict[str, Tensor]:
    limit, norm = located.recompute.subject.optimizer.clip_norm, _gradient_norm(located.reference)
    if limit is None or not unclipped:
        return {}
    mean = unclipped[BEFORE_CLIPPING]
    norms = {
        "clipped by its own norm, instead of that of all gradients": float(torch.linalg.vector_norm(mean)),
        "clipped twice": norm * max(1.0, norm / limit),
        "clipped by the square of the norm": norm**2,
        "clipped by the norm of the sums, not divided": norm * located.target_count,
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
    trained = {n: p for n, p in located.recompute.module.named_parameters() if p.requires_grad}
    groups = group_parameters(trained, settings)
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
    """Rows that a micro-batch might have instead, and what its own rows would be with another mistake."""
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
        alternatives = {f"what {other} should be": value for other, value in samples.items()}
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
