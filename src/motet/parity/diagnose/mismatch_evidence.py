"""A tensor that differs: its ranks and elements, and the reference data of which it could be made."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from motet.parity.compare.align_with_reference import (
    AlignedTensorPair,
    ReferenceTensor,
    format_numbered,
    reshape_to_rows,
)
from motet.parity.compare.reference_runs import DifferenceAtStep
from motet.parity.compare.tensor_differences import (
    ReferenceStep,
    TensorDifference,
    compare_with_reference,
    elementwise_difference,
    pair_distance,
)
from motet.parity.diagnose.linear_fit import TARGET_TOKENS, MicroBatchContribution, as_numbers
from motet.parity.diagnose.optimizer_update import ExpectedOptimizerUpdate
from motet.parity.diagnose.single_device_recompute import MicroBatchResult, SingleDeviceRecompute
from motet.parity.record.tensor_recorder import (
    MASTER_PREFIX,
    RecordsByRank,
    TensorKey,
    TensorKind,
    group_by_key,
    sketch_shard,
)
from motet.train.optimizer.sharded_optimizer import group_parameters

ROW_KINDS = ("sample", "random mask", "activation", "activation gradient")
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

    def _distance(self, pair: AlignedTensorPair) -> float:
        return pair_distance(self.reference, self.key, pair)

    @cached_property
    def worst_pair(self) -> AlignedTensorPair:
        worst = max(self.pairs, key=self._distance)
        return worst._replace(value=as_numbers(worst.value), expected=as_numbers(worst.expected))

    @cached_property
    def all_differences(self) -> list[TensorDifference]:
        return compare_with_reference(self.reference, self.records_by_rank)

    def location_text(self) -> str:
        """The ranks and elements that differ, if others do not."""
        bound, all_ranks = self.difference.difference.bound, {p.rank for p in self.pairs if p.value.numel()}
        ranks = sorted({p.rank for p in self.pairs if p.rank is not None and self._distance(p) > bound})
        is_part = 0 < len(ranks) < len(all_ranks)
        text = f", on {format_numbered('rank', ranks)} alone" if is_part else ""
        elements, record = self.differing_slice, self.worst_pair.record
        if elements is None or record is None:
            return text
        first, last = record.start + elements.start, record.start + elements.stop - 1
        element_text = f"element {first}" if first == last else f"elements {first} to {last}"
        text = f"{text}, in {element_text} of {self.tensor.value.numel()}"
        master_key = TensorKey("state", f"{MASTER_PREFIX}{self.key.name.rpartition('/')[2]}")
        for rank, master in group_by_key(self.records_by_rank).get(master_key, []):
            is_inside = master.start <= first and last < master.start + master.numel
            if is_inside and 0 < master.numel < self.tensor.value.numel():
                return f"{text}, which rank {rank} updates"
        return text

    @cached_property
    def differing_slice(self) -> slice | None:
        """The elements of the worst shard that differ; None if nearly all do."""
        value, expected, record = self.worst_pair.value, self.worst_pair.expected, self.worst_pair.record
        if record is None or not record.is_shard or record.is_sketched or value.numel() < 2:
            return None
        error = elementwise_difference(value, expected).abs().nan_to_num(math.inf)
        limit = 1e-3 * self.difference.difference.bound * float(expected.double().abs().max())
        wrong_indices = (error > limit).nonzero().flatten().tolist()
        differing = slice(wrong_indices[0], wrong_indices[-1] + 1) if wrong_indices else slice(0, value.numel())
        return differing if differing.stop - differing.start < 0.95 * value.numel() else None

    def cut(self, shard: Tensor) -> Tensor:
        """The elements of the worst shard that differ."""
        return shard if self.differing_slice is None else shard[self.differing_slice]

    def select(self, tensor: Tensor) -> Tensor:
        """The part of an unsharded tensor that the worst pair is about."""
        record = self.worst_pair.record
        if record is None or not record.is_shard:
            return as_numbers(tensor)
        elements = as_numbers(tensor).reshape(-1)[record.start : record.start + record.numel]
        return self.cut(sketch_shard(elements, record.start))

    @cached_property
    def known_factors(self) -> dict[str, float]:
        """Description -> number by which something may have been multiplied or divided."""
        layout, results = self.recompute.layout, self.recompute.microbatch_results
        rows, microbatches = self.recompute.subject.batch_rows, self.recompute.all_microbatches
        targets_by_rank = [sum(r.target_count for r in results if r.rank == rank) for rank in range(layout.dp)]
        return {
            "dp": float(layout.dp),
            "micro-batches of a rank": float(layout.microbatches),
            "all micro-batches": float(microbatches),
            "ranks of a shard group": float(layout.shards),
            "replicas": layout.dp / layout.shards,
            "rows of the batch": float(rows),
            "rows of a rank": rows / layout.dp,
            "rows of a micro-batch": rows / microbatches,
            TARGET_TOKENS: sum(targets_by_rank),
            **{f"{TARGET_TOKENS} of rank {rank}": count for rank, count in enumerate(targets_by_rank)},
            **{f"{TARGET_TOKENS} of micro-batch {r.microbatch} of rank {r.rank}": r.target_count for r in results},
            "what gradients are scaled by": self.gradient_scale,
            "the square of dp": float(layout.dp) ** 2,
        }

    @cached_property
    def gradient_scale(self) -> float:
        """The factor by which sums of gradients are divided and clipped."""
        norm, count = self.reference.scalar("norm", "gradient norm"), self.reference.scalar("sum", TARGET_TOKENS)
        engine = self.recompute.rank_subject.engine
        return 1.0 if norm is None or count is None else engine.gradient_scale(norm, count)

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
    contributions: Sequence[MicroBatchContribution] = ()  # Their sum is expected
    previous_contributions: Sequence[MicroBatchContribution] = ()  # Those of the step before
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
    evidence = MismatchEvidence(
        pair.value, pair.expected, pair.rank, located.known_factors, kind=kind, name=name, located=located
    )
    if kind in SCALAR_KINDS:
        results = recompute.evaluation_results if kind == "evaluation" else recompute.microbatch_results
        targets = None if kind == "evaluation" else located.reference.value_of(TensorKey("sample", "targets"))
        return replace(evidence, results=results, token_count=0 if targets is None else targets.numel())
    if kind in ROW_KINDS:
        return _with_rows(evidence, located)
    state_name = {"parameter": f"{MASTER_PREFIX}{name}", "state": name, "buffer": f"buffer/{name}"}.get(kind, "")
    before = recompute.state_before_step.get(state_name)
    evidence = replace(
        evidence,
        value=located.cut(pair.value),
        expected=located.cut(pair.expected),
        alternatives=_same_kind(located),
        value_before_step=None if before is None or before.ndim == 0 else located.select(before),
        source_tensors={
            f"{kind} {key.name}": tensor.value
            for key, tensor in located.reference.tensors.items()
            if key.kind == kind and tensor.record.is_shard
        },
    )
    if kind == "gradient":
        previous = _contributions(located, name, steps_ago=1) if recompute.step else []
        return replace(evidence, contributions=_contributions(located, name), previous_contributions=previous)
    if kind == "clipped gradient":
        unclipped = _unclipped(located, name, BEFORE_CLIPPING)
        alternatives = {**unclipped, **evidence.alternatives, **_wrong_clippings(located, unclipped)}
        return replace(evidence, contributions=_contributions(located, name, clips=True), alternatives=alternatives)
    return replace(evidence, optimizer=_optimizer_evidence(evidence, located)) if kind == "state" else evidence


def _contributions(
    located: LocatedDifference, name: str, *, clips: bool = False, steps_ago: int = 0
) -> list[MicroBatchContribution]:
    recompute, scale = located.recompute, located.gradient_scale if clips else 1.0
    recompute = replace(recompute, step=recompute.step - steps_ago) if steps_ago else recompute
    return [
        MicroBatchContribution(r.rank, r.microbatch, scale * located.select(r.gradients[name]), r.target_count)
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
    values = {f"{words} {step}": reference.value_of(key) for step, reference in located.other_steps.items()}
    return {description: value for description, value in values.items() if value is not None}


def _others_of_kind(located: LocatedDifference, kind: TensorKind, name: str) -> dict[str, Tensor]:
    """Name -> another tensor of a kind, of the same shape."""
    tensors, shape = located.reference.tensors, located.tensor.value.shape
    others = {key.name: tensor.value for key, tensor in tensors.items() if key.kind == kind and key.name != name}
    return {other: value for other, value in others.items() if value.shape == shape}


def _unclipped(located: LocatedDifference, name: str, words: str) -> dict[str, Tensor]:
    """The mean and the sum of gradients; empty where nothing is trained."""
    values = [c.value for c in _contributions(located, name)]
    if not values or not values[0].numel():
        return {}
    summed = torch.stack(values).sum(0)
    return {words: summed / located.target_count, "the sum, not divided or clipped": summed}


def _wrong_clippings(located: LocatedDifference, unclipped: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mean gradient, clipped by something else than the norm of all gradients."""
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


def _optimizer_evidence(evidence: MismatchEvidence, located: LocatedDifference) -> OptimizerEvidence | None:
    """The update that made a master or a moment; None for other state."""
    state_name, _, name = located.key.name.partition("/")
    reference, record, settings = located.reference, located.worst_pair.record, located.recompute.subject.optimizer
    clipped_key, before = TensorKey("clipped gradient", name), located.recompute.state_before_step
    gradient = reference.value_of(clipped_key)
    if gradient is None or f"{MASTER_PREFIX}{name}" not in before or (record and record.is_sketched):
        return None
    trained = {n: p for n, p in located.recompute.module.named_parameters() if p.requires_grad}
    groups = group_parameters(trained, settings)
    scale, decay = next(key for key, members in groups.items() if name in members)
    state = {n.split("/")[0]: located.select(tensor) for n, tensor in before.items() if n.endswith(f"/{name}")}
    zeros, rate = torch.zeros_like(state["master"]), reference.learning_rate
    rates = {words: step.learning_rate * scale for words, step in located.other_steps.items()}
    update = ExpectedOptimizerUpdate(
        settings,
        rate * scale,
        decay,
        step_count=float(before.get("step", torch.zeros(()))) + 1,
        master=state["master"],
        moments={n: state.get(n, zeros) for n in ("exp_avg", "exp_avg_sq", "momentum_buffer")},
        gradient=located.select(gradient),
        alternative_rates=rates | {f"parameters whose scale is {other:g}": rate * other for other, _ in groups},
    )
    others = _in_other_steps(located, clipped_key, "that of")
    alternatives = {words: located.select(tensor) for words, tensor in others.items()}
    gradient_evidence = MismatchEvidence(
        evidence.value,
        evidence.expected,
        evidence.rank,
        evidence.known_factors,
        contributions=_contributions(located, name, clips=True),
        alternatives=alternatives | _unclipped(located, name, "the one before clipping"),
    )
    same_shape = list(_others_of_kind(located, "clipped gradient", name).items())[:MAX_OTHER_GRADIENTS]
    other_gradients = {f"the gradient of {other}": located.select(value) for other, value in same_shape}
    state_before = {n: t for n, t in before.items() if n.startswith(f"{state_name}/") or n.endswith(name)}
    return OptimizerEvidence(state_name, update, gradient_evidence, other_gradients, state_before)


# --- rows of a micro-batch -------------------------------------------------------------------------


def _with_rows(evidence: MismatchEvidence, located: LocatedDifference) -> MismatchEvidence:
    """Rows that a micro-batch might have instead, and what its own rows would be with another mistake."""
    (kind, name), record = located.key, located.worst_pair.record
    if record is None or evidence.value.ndim != 2:
        return evidence
    others = {f"the batch of {words}": reference for words, reference in located.other_steps.items()}
    rows = {
        words if key.name == name else f"{words}, {key.name}": tensor.value
        for words, reference in {"the batch": located.reference, **others}.items()
        for key, tensor in reference.tensors.items()
        if key.kind == kind and (key.name == name or kind == "random mask")
    }
    alternatives: dict[str, Tensor] = {}
    if kind == "sample":
        samples = _others_of_kind(located, kind, name)
        alternatives = {f"what {other} should be": value for other, value in samples.items()}
    elif kind != "random mask" and located.recompute.step > 0:
        alternatives = _with_stale_parameters(located)
    own_rows = _as_rows(located, alternatives, set(record.rows))
    return replace(evidence, alternative_rows=_as_rows(located, rows), alternatives=own_rows)


def _as_rows(
    located: LocatedDifference, tensors: Mapping[str, Tensor], rows: set[int] | None = None
) -> dict[str, Tensor]:
    """[rows, elements of each] of all or some rows of the tensors that have the shape of the one that differs."""
    count, shape = len(located.tensor.rows), located.tensor.value.shape
    indices = [index for index, row in enumerate(located.tensor.rows) if rows is None or row in rows]
    return {
        words: reshape_to_rows(as_numbers(tensor), count)[indices]
        for words, tensor in tensors.items()
        if tensor.ndim and tensor.shape == shape and tensor.shape[0] % count == 0
    }


def _with_stale_parameters(located: LocatedDifference) -> dict[str, Tensor]:
    """The tensor, computed with parameters of the step before: all, those of a module, or all but updated ones."""
    module = located.key.name.partition("[")[0].partition(" (")[0]
    updated_here = {
        record.name.removeprefix(MASTER_PREFIX): slice(record.start, record.start + record.numel)
        for record in located.records_by_rank[located.worst_pair.rank or 0]
        if record.kind == "state" and record.name.startswith(MASTER_PREFIX)
    }
    stale = "what parameters of the step before give: they were used before they were updated"
    but_updated = ", except the ones that this rank updates"
    variants: list[tuple[str, str, Mapping[str, slice], bool]] = [
        (stale, "", {}, False),
        (f"{stale} (those of {module} alone)", f"{module}.", {}, False),
        (f"{stale}{but_updated}", "", updated_here, False),
    ]
    if located.key.kind == "activation gradient":
        stale = "what backward gives with parameters of the step before"
        variants += [(stale, "", {}, True), (f"{stale}{but_updated * bool(updated_here)}", "", updated_here, True)]
        blocks: Sequence[str] = [module[:place] for place, letter in enumerate(module) if letter == "."]
        variants += [(f"{stale} (those of {block} alone)", f"{block}.", {}, True) for block in reversed(blocks)]
    tensors = {
        words: located.recompute.run_with_stale_parameters(prefix, fresh, backward_only).get(located.key)
        for words, prefix, fresh, backward_only in variants
    }
    return {words: tensor.value for words, tensor in tensors.items() if tensor is not None}
