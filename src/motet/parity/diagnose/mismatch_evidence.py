"""A tensor that differs, and the reference data of which it could be made: contributions, other tensors, rows, updates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from motet.parity.compare.align_with_reference import reshape_to_rows
from motet.parity.compare.tensor_differences import ReferenceStep
from motet.parity.diagnose.contribution_fit import MicroBatchContribution
from motet.parity.diagnose.located_difference import LocatedDifference
from motet.parity.diagnose.optimizer_update import ExpectedOptimizerUpdate
from motet.parity.diagnose.single_device_recompute import MicroBatchResult
from motet.parity.record.tensor_recorder import MASTER_PREFIX, TensorKey, TensorKind
from motet.train.optimizer.sharded_optimizer import group_parameters

ROW_KINDS = ("sample", "random mask", "activation", "activation gradient")
SCALAR_KINDS = ("sum", "norm", "evaluation", "loss")
MAX_OTHER_GRADIENTS = 8


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

    def as_numbers(self) -> "MismatchEvidence":
        """The same, with masks as numbers."""
        if self.value.dtype != torch.bool:
            return self
        return replace(
            self,
            value=self.value.double(),
            expected=self.expected.double(),
            alternatives={words: tensor.double() for words, tensor in self.alternatives.items()},
            alternative_rows={words: rows.double() for words, rows in self.alternative_rows.items()},
            value_before_step=None if self.value_before_step is None else self.value_before_step.double(),
        )


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
        targets = located.reference.value_of(TensorKey("sample", "targets"))
        token_count = 0 if kind == "evaluation" or targets is None else targets.numel()
        return replace(evidence, results=results, token_count=token_count)
    if kind in ROW_KINDS:
        return _with_rows(evidence, located)
    if pair.is_shard and located.differing_slice is not None:
        evidence = replace(
            evidence, value=pair.value[located.differing_slice], expected=pair.expected[located.differing_slice]
        )
    tensors = located.reference.tensors.values()
    evidence = replace(
        evidence,
        alternatives=_same_kind(located),
        value_before_step=_value_before_step(located),
        source_tensors={
            f"{t.key.kind} {t.key.name}": t.value for t in tensors if t.key.kind == kind and t.record.is_shard
        },
    )
    if kind == "gradient":
        previous = _contributions(located, name, steps_ago=1) if located.step else []
        return replace(evidence, contributions=_contributions(located, name), previous_contributions=previous)
    if kind == "clipped gradient":
        contributions = _contributions(located, name, scale=located.gradient_scale)
        alternatives = {**_unclipped(located, name), **evidence.alternatives, **_wrong_clippings(located, name)}
        return replace(evidence, contributions=contributions, alternatives=alternatives)
    return replace(evidence, optimizer=_optimizer_evidence(evidence, located)) if kind == "state" else evidence


def _contributions(
    located: LocatedDifference, name: str, *, scale: float = 1.0, steps_ago: int = 0
) -> list[MicroBatchContribution]:
    recompute = replace(located.recompute, step=located.step - steps_ago) if steps_ago else located.recompute
    return [
        MicroBatchContribution(r.rank, r.microbatch, scale * located.select(r.gradients[name]), r.target_count)
        for r in recompute.microbatch_results
        if name in r.gradients
    ]


def _same_kind(located: LocatedDifference) -> dict[str, Tensor]:
    """Tensors of the same kind and shape: of other steps, and of other names."""
    (kind, name), shape, tensors = located.key, located.tensor.value.shape, dict[str, Tensor]()
    if kind == "gradient" and located.step:
        previous = located.recompute.reference_runs.step_references[located.step - 1]
        if (clipped := previous.value_of(TensorKey("clipped gradient", name))) is not None:
            tensors["the clipped gradient of the step before"] = clipped
    if kind not in ("state", "parameter", "buffer"):
        tensors |= {f"what it was in {words}": t for words, t in _in_other_steps(located, located.key).items()}
    for key, other in located.reference.tensors.items():
        if key.kind == kind and key.name != name and other.value.shape == shape:
            tensors[f"that of {key.name}"] = other.value
    selected = {words: located.select(tensor) for words, tensor in tensors.items()}
    return {words: tensor for words, tensor in selected.items() if tensor.ndim}


def _in_other_steps(located: LocatedDifference, key: TensorKey) -> dict[str, Tensor]:
    values = {words: reference.value_of(key) for words, reference in located.other_steps.items()}
    return {words: value for words, value in values.items() if value is not None}


def _value_before_step(located: LocatedDifference) -> Tensor | None:
    kind, name = located.key
    key = {"parameter": f"{MASTER_PREFIX}{name}", "state": name, "buffer": f"buffer/{name}"}.get(kind, "")
    before = located.recompute.state_before_step.get(key)
    return None if before is None or before.ndim == 0 else located.select(before)


def _summed_gradient(located: LocatedDifference, name: str, scale: float = 1.0) -> Tensor | None:
    values = [c.value for c in _contributions(located, name, scale=scale)]
    return sum(values[1:], values[0]) if values and values[0].numel() else None


def _unclipped(located: LocatedDifference, name: str) -> dict[str, Tensor]:
    summed = _summed_gradient(located, name)
    if summed is None:
        return {}
    mean = summed / located.target_count
    return {"the gradient before clipping": mean, "the sum, not divided or clipped": summed}


def _wrong_clippings(located: LocatedDifference, name: str) -> dict[str, Tensor]:
    """The mean gradient, clipped by something else than the norm of all gradients."""
    limit, norm = located.recompute.subject.optimizer.clip_norm, _gradient_norm(located.reference)
    summed = _summed_gradient(located, name)
    if limit is None or summed is None:
        return {}
    mean = summed / located.target_count
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
    gradient, before = reference.value_of(TensorKey("clipped gradient", name)), located.recompute.state_before_step
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
    others = _in_other_steps(located, TensorKey("clipped gradient", name))
    alternatives = {f"that of {words}": located.select(tensor) for words, tensor in others.items()}
    clip = located.gradient_scale
    if (summed := _summed_gradient(located, name, clip)) is not None:
        alternatives["the one before clipping"] = summed / clip / located.target_count
        alternatives["the sum, not divided or clipped"] = summed / clip
    gradient_evidence = MismatchEvidence(
        evidence.value,
        evidence.expected,
        evidence.rank,
        evidence.known_factors,
        contributions=_contributions(located, name, scale=clip),
        alternatives=alternatives,
    )
    same_shape = [
        (key.name, tensor.value)
        for key, tensor in reference.tensors.items()
        if (key.kind, tensor.value.shape) == ("clipped gradient", located.tensor.value.shape) and key.name != name
    ]
    other_gradients = {
        f"the gradient of {other}": located.select(value) for other, value in same_shape[:MAX_OTHER_GRADIENTS]
    }
    state_before = {n: t for n, t in before.items() if n.startswith(f"{state_name}/") or n.endswith(name)}
    return OptimizerEvidence(state_name, update, gradient_evidence, other_gradients, state_before)


# --- rows of a micro-batch -------------------------------------------------------------------------


def _with_rows(evidence: MismatchEvidence, located: LocatedDifference) -> MismatchEvidence:
    """Rows that a micro-batch might have instead, and what its own rows would be with another mistake."""
    (kind, name), record = located.key, located.worst_pair.record
    if record is None or evidence.value.ndim != 2:
        return evidence
    rows: dict[str, Tensor] = {}
    batches = {f"the batch of {words}": reference for words, reference in located.other_steps.items()}
    for words, reference in {"the batch": located.reference, **batches}.items():
        for key, tensor in reference.tensors.items():
            if key.kind == kind and (key.name == name or kind == "random mask"):
                label = words if key.name == name else f"{words}, {key.name}"
                rows |= _as_rows(located, {label: tensor.value})
    alternatives: dict[str, Tensor] = {}
    if kind == "sample":
        samples = [key for key in located.reference.tensors if key.kind == kind and key.name != name]
        alternatives = {f"what {key.name} should be": located.reference.tensors[key].value for key in samples}
    elif kind != "random mask" and located.step > 0:
        alternatives = _with_stale_parameters(located)
    return replace(evidence, alternative_rows=rows, alternatives=_as_rows(located, alternatives, set(record.rows)))


def _as_rows(
    located: LocatedDifference, tensors: Mapping[str, Tensor], rows: set[int] | None = None
) -> dict[str, Tensor]:
    """[rows, elements of each] of all or some rows of the tensors that have the shape of the one that differs."""
    count, shape = len(located.tensor.rows), located.tensor.value.shape
    indices = [index for index, row in enumerate(located.tensor.rows) if rows is None or row in rows]
    return {
        words: reshape_to_rows(tensor, count)[indices]
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
