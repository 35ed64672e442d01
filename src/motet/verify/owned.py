"""Parallel code that is not motet's: functions that give full tensors after each step, against one device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, get_args

from torch import Tensor

from motet.core.errors import InputError
from motet.verify.compare import Reference
from motet.verify.given import GivenTrial, rows_of
from motet.verify.parts import Site, Whole
from motet.verify.record import Kind, Recorder, Seen
from motet.verify.runs import Referred
from motet.verify.shares import Computed, WhatIf

Step = Callable[[Any], Mapping[str, Tensor]]
"""A step with the batch of all ranks -> full tensors by name, the same on every rank."""
WHOLE: dict[str, Site] = {"loss": ("sum", "mean loss"), "norm": ("norm", "gradient norm")}
KINDS = ("gradient", "parameter", "activation")


def record_owned(trial: GivenTrial, step: Step) -> list[list[Seen]]:
    """What it gives in each step."""
    found = []
    for number in range(trial.steps):
        recorder = Recorder()
        for name, tensor in step(rows_of(trial.batch(number), range(trial.rows))).items():
            _record(recorder, name, tensor)
        found.append(recorder.seen)
    return found


def _record(recorder: Recorder, name: str, tensor: Tensor) -> None:
    kind, _, inner = name.partition(".")
    if not isinstance(tensor, Tensor | float | int):
        raise InputError(
            f"verify: your step gives {name} = {tensor!r}; give a tensor, zeros where there is no gradient"
        )
    if name in WHOLE:
        recorder.add_whole(*WHOLE[name], float(tensor))
    elif kind in KINDS and inner:
        of_kind = next(each for each in get_args(Kind) if each == kind)
        if kind == "activation":
            recorder.add_part(of_kind, inner, tensor, -1, ())
        else:
            recorder.add_piece(of_kind, inner, tensor)
    else:
        raise InputError(
            f"verify: your step gives {name!r}; names are loss, norm, gradient.NAME, parameter.NAME (of the module's "
            "parameters) and activation.NAME (of its modules)"
        )


def owned_reference(referred: Referred, steps: Sequence[Sequence[Sequence[Seen]]]) -> Referred:
    """Of what is given alone, by each rank in each step; gradients are those of the mean."""
    each: list[set[Site]] = [{(seen.kind, seen.name) for seen in given} for ranks in steps for given in ranks]
    given = {site for own in each for site in own}
    if not given:
        raise InputError("verify: your step gives nothing; give full tensors by name, gradient.NAME say")
    if odd := {site for own in each for site in given - own}:
        raise InputError(f"verify: {_told(odd)} is given in some steps or by some ranks alone; give it in all")
    if odd := given - set(referred.free[0].wholes):
        names = [name for kind, name in referred.free[0].wholes if kind == next(iter(odd))[0]]
        raise InputError(f"verify: one device has no {_told(odd)}; there are {', '.join(names) or 'none'}")
    return Referred(referred.single, [_of_mean(reference, given) for reference in referred.free], referred.folder)


def _told(sites: set[Site]) -> str:
    kind, name = min(sites)
    return f"{kind} {name}"


def _of_mean(reference: Reference, given: set[Site]) -> Reference:
    count = float(reference.wholes["sum", "target tokens"].value)
    wholes: dict[Site, Whole] = {}
    for site, whole in reference.wholes.items():
        if site in given:
            mean = whole.value / count if site[0] == "gradient" else whole.value
            wholes[site] = replace(whole, value=mean)
    return replace(reference, wholes=wholes)


class OwnedWhatIf(WhatIf):
    """Gradients are those of the mean."""

    @cached_property
    def computed(self) -> list[Computed]:
        found = super().computed
        count = sum(each.targets for each in found)
        return [
            each._replace(gradients={name: gradient / count for name, gradient in each.gradients.items()})
            for each in found
        ]
