"""Parallel code of the caller: a function that returns full tensors after each step."""

from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from motet.core.errors import InputError
from motet.parity.record.tensor_recorder import RecordedTensor, TensorKey, TensorKind, TensorRecorder
from motet.parity.subjects.module_subject import ModuleVerificationSubject, select_rows

# Called with the batch of all ranks; returns full tensors by name, the same on every rank.
ExternalStepFunction = Callable[[Any], Mapping[str, Tensor]]
SCALAR_KEYS = {"loss": TensorKey("sum", "mean loss"), "norm": TensorKey("norm", "gradient norm")}
TENSOR_KINDS = ("gradient", "parameter", "activation")


def record_external_steps(subject: ModuleVerificationSubject, step: ExternalStepFunction) -> list[list[RecordedTensor]]:
    """The tensors that the function returns for each step."""
    records_by_step = []
    for step_index in range(subject.steps):
        recorder = TensorRecorder()
        for name, tensor in step(select_rows(subject.batch(step_index), range(subject.batch_rows))).items():
            _record_output(recorder, name, tensor)
        records_by_step.append(recorder.records)
    return records_by_step


def _record_output(recorder: TensorRecorder, name: str, tensor: Any) -> None:
    prefix, _, inner = name.partition(".")
    if not isinstance(tensor, Tensor | float | int):
        advice = "give a tensor, zeros where there is no gradient"
        raise InputError(f"verify: your step gives {name} = {tensor!r}; {advice}")
    if name in SCALAR_KEYS:
        recorder.add_scalar(*SCALAR_KEYS[name], float(tensor))
        return
    if prefix not in TENSOR_KINDS or not inner:
        raise InputError(
            f"verify: your step gives {name!r}; names are loss, norm, gradient.NAME, parameter.NAME (of the module's "
            "parameters) and activation.NAME (of its modules)"
        )
    kind: TensorKind = next(each for each in get_args(TensorKind) if each == prefix)
    if kind == "activation":
        recorder.add_for_microbatch(kind, inner, torch.as_tensor(tensor), microbatch=-1, rows=())
    else:
        recorder.add_shard(kind, inner, torch.as_tensor(tensor))
