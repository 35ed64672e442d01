"""Parallel code that is not motet's: functions that give full tensors after each step, against one device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, get_args

from torch import Tensor

from motet.core.errors import InputError
from motet.parity.compare.align_with_reference import ReferenceTensor, TensorKey
from motet.parity.compare.reference_runs import ReferenceRuns
from motet.parity.compare.tensor_differences import ReferenceStep
from motet.parity.diagnose.single_device_recompute import MicroBatchResult, SingleDeviceRecompute
from motet.parity.record.tensor_recorder import RecordedTensor, TensorKind, TensorRecorder
from motet.parity.subjects.module_subject import ModuleVerificationSubject, select_rows

# A step with the batch of all ranks -> full tensors by name, the same on every rank.
ExternalStepFunction = Callable[[Any], Mapping[str, Tensor]]
SCALAR_KEYS: dict[str, TensorKey] = {"loss": ("sum", "mean loss"), "norm": ("norm", "gradient norm")}
TENSOR_KINDS = ("gradient", "parameter", "activation")


def record_external_steps(subject: ModuleVerificationSubject, step: ExternalStepFunction) -> list[list[RecordedTensor]]:
    """What it gives in each step."""
    records_by_step = []
    for step_index in range(subject.steps):
        recorder = TensorRecorder()
        for name, tensor in step(select_rows(subject.batch(step_index), range(subject.batch_rows))).items():
            _record_output(recorder, name, tensor)
        records_by_step.append(recorder.records)
    return records_by_step


def _record_output(recorder: TensorRecorder, name: str, tensor: Tensor) -> None:
    kind, _, inner = name.partition(".")
    if not isinstance(tensor, Tensor | float | int):
        raise InputError(
            f"verify: your step gives {name} = {tensor!r}; give a tensor, zeros where there is no gradient"
        )
    if name in SCALAR_KEYS:
        recorder.add_scalar(*SCALAR_KEYS[name], float(tensor))
    elif kind in TENSOR_KINDS and inner:
        tensor_kind = next(each for each in get_args(TensorKind) if each == kind)
        if kind == "activation":
            recorder.add_for_microbatch(tensor_kind, inner, tensor, -1, ())
        else:
            recorder.add_shard(tensor_kind, inner, tensor)
    else:
        raise InputError(
            f"verify: your step gives {name!r}; names are loss, norm, gradient.NAME, parameter.NAME (of the module's "
            "parameters) and activation.NAME (of its modules)"
        )


def make_external_reference(
    reference_runs: ReferenceRuns, records_by_step: Sequence[Sequence[Sequence[RecordedTensor]]]
) -> ReferenceRuns:
    """Of what is given alone, by each rank in each step; gradients are those of the mean."""
    keys_of_each_rank: list[set[TensorKey]] = [
        {(seen.kind, seen.name) for seen in recorded_keys} for ranks in records_by_step for recorded_keys in ranks
    ]
    given = {site for own in keys_of_each_rank for site in own}
    if not given:
        raise InputError("verify: your step gives nothing; give full tensors by name, gradient.NAME say")
    if inconsistent_keys := {site for own in keys_of_each_rank for site in given - own}:
        raise InputError(
            f"verify: {_format_key(inconsistent_keys)} is given in some steps or by some ranks alone; give it in all"
        )
    if inconsistent_keys := given - set(reference_runs.trajectory_references[0].tensors):
        names = [
            name
            for kind, name in reference_runs.trajectory_references[0].tensors
            if kind == next(iter(inconsistent_keys))[0]
        ]
        raise InputError(
            f"verify: one device has no {_format_key(inconsistent_keys)}; there are {', '.join(names) or 'none'}"
        )
    return ReferenceRuns(
        reference_runs.step_references,
        [_with_mean_gradients(reference, given) for reference in reference_runs.trajectory_references],
        reference_runs.folder,
    )


def _format_key(keys: set[TensorKey]) -> str:
    kind, name = min(keys)
    return f"{kind} {name}"


def _with_mean_gradients(reference: ReferenceStep, recorded_keys: set[TensorKey]) -> ReferenceStep:
    count = float(reference.tensors["sum", "target tokens"].value)
    tensors: dict[TensorKey, ReferenceTensor] = {}
    for key, reference_tensor in reference.tensors.items():
        if key in recorded_keys:
            mean = reference_tensor.value / count if key[0] == "gradient" else reference_tensor.value
            tensors[key] = replace(reference_tensor, value=mean)
    return replace(reference, tensors=tensors)


class MeanGradientRecompute(SingleDeviceRecompute):
    """Gradients are those of the mean."""

    @cached_property
    def microbatch_results(self) -> list[MicroBatchResult]:
        results = super().microbatch_results
        count = sum(each.target_count for each in results)
        return [
            each._replace(gradients={name: gradient / count for name, gradient in each.gradients.items()})
            for each in results
        ]
