"""`motet.verify(model_fn, layouts, batch_fn)`: layouts of a module of the caller's own, and parallel code of theirs."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from motet.core.config_loading import settings_from_dict
from motet.core.errors import InputError
from motet.models.layout_invariant_dropout import has_dropout
from motet.parallel.layout import Layout, resolve_layout
from motet.parallel.process.process_group import RankGroup
from motet.parity.candidate_layouts import with_default_ranks
from motet.parity.compare.reference_runs import TRAJECTORY, ReferenceRuns, record_phases, run_reference, single_thread
from motet.parity.diagnose.explain_difference import make_layout_verdict
from motet.parity.diagnose.single_device_recompute import SingleDeviceRecompute
from motet.parity.layout_verdict import LayoutVerdict, self_difference_verdict
from motet.parity.process_pool import ForkedRankPool, fork_rank_pool
from motet.parity.rank_main import load_records, recorded_phases, records_file, save_records
from motet.parity.record.tensor_recorder import RecordedTensor
from motet.parity.subjects.external_parallel_code import (
    ExternalStepFunction,
    MeanGradientRecompute,
    make_external_reference,
    record_external_steps,
)
from motet.parity.subjects.module_subject import LossFunction, ModuleVerificationSubject, UserBatch, default_loss
from motet.train.optimizer.optimizer_settings import OptimizerSettings

# Called on each rank with the module, in a process group; gives what does a step.
ParallelizeFunction = Callable[[nn.Module], ExternalStepFunction]


@dataclass(frozen=True)
class VerificationReport:
    """What is found out about some layouts."""

    verdicts: tuple[LayoutVerdict, ...]

    @property
    def ok(self) -> bool:
        """All of them compute what one device does."""
        return all(verdict.ok for verdict in self.verdicts)

    def __str__(self) -> str:
        return "\n".join(map(str, self.verdicts))

    def as_json(self) -> dict[str, Any]:
        return {"layouts": [verdict.as_json() for verdict in self.verdicts]}


def verify(  # what a training step is made of, by name
    model_fn: Callable[[], nn.Module],
    layouts: Sequence[str | ParallelizeFunction | tuple[str, ParallelizeFunction]],
    batch_fn: Callable[[int], UserBatch],
    *,
    loss: LossFunction = default_loss,
    optimizer: Mapping[str, Any] | None = None,
    ranks: int = 2,
    steps: int = 3,
) -> VerificationReport:
    """Whether a module computes the same numbers in these layouts as on one device, in float64.

    A layout is text, such as "dp=2 zero=3", or parallel code of your own: a function that is called on each of `ranks`
    ranks with the module, in a process group, and gives a function that does a step: with the batch of all ranks, it
    gives full tensors by name: loss, norm, gradient.NAME, parameter.NAME or activation.NAME. With a pair of text and
    function, the text says how the function cuts the work, which causes are told by.
    """
    optimizer_settings = settings_from_dict(OptimizerSettings, dict(optimizer or {}), "optimizer")
    if isinstance(layouts, str) or not layouts:
        raise InputError(f"verify: layouts = {layouts!r}; give a list of at least one")
    for name, value in (("ranks", ranks), ("steps", steps)):
        if value < 1:
            raise InputError(f"verify: {name} = {value}; give 1 or more")
    with (
        tempfile.TemporaryDirectory(prefix="motet-verify-") as temporary_folder,
        single_thread(),
        torch.random.fork_rng(devices=[]),
    ):
        subject, folder = (
            ModuleVerificationSubject(model_fn, batch_fn, loss, optimizer_settings, steps),
            Path(temporary_folder),
        )
        verifications = [_make_verification(subject, layout, ranks, number) for number, layout in enumerate(layouts)]
        rank_functions = {str(case.index): partial(case.record_on_rank, folder=folder) for case in verifications}
        with fork_rank_pool(max(case.world for case in verifications), rank_functions) as pool:
            reference_runs = run_reference(subject, folder)
            return VerificationReport(tuple(case.verdict(pool, reference_runs) for case in verifications))


@dataclass(frozen=True)
class _ModuleLayoutVerification:
    """A layout, or somebody's function."""

    index: int
    name: str
    subject: ModuleVerificationSubject
    world: int
    layout: Layout
    parallelize: ParallelizeFunction | None = None

    def record_on_rank(self, group: RankGroup, folder: Path) -> None:
        """On a rank: leave what it has seen."""
        with self.subject.numerics():
            for phase, step, records in self._record_phases(group, folder):
                save_records(records, records_file(folder, self.index, (phase, step), group.rank))

    def _record_phases(self, group: RankGroup, folder: Path) -> Iterator[tuple[str, int, list[RecordedTensor]]]:
        if self.parallelize is None:
            yield from record_phases(self.subject, group, folder, f"layout-{self.index}")
            return
        if has_dropout(module := self.subject.make_module()):
            raise InputError("verify: the module has dropout, whose masks your function draws by itself; set it to 0")
        for step, records in enumerate(record_external_steps(self.subject, self.parallelize(module))):
            yield TRAJECTORY, step, records

    def verdict(self, pool: ForkedRankPool, reference_runs: ReferenceRuns) -> LayoutVerdict:
        if reference_runs.self_difference is not None:
            return self_difference_verdict(self.name, *reference_runs.self_difference)
        start_s = perf_counter()
        pool.run(self.world, str(self.index))
        records_at = partial(load_records, reference_runs.folder, self.index, self.world)
        phases, recompute_class = (
            recorded_phases(reference_runs.folder, self.index, self.subject.steps),
            SingleDeviceRecompute,
        )
        if self.parallelize is not None:
            recompute_class = MeanGradientRecompute
            reference_runs = make_external_reference(reference_runs, [records_at(*each) for each in phases])
        make_recompute = partial(recompute_class, self.subject, self.layout, reference_runs)
        return replace(
            make_layout_verdict(self.name, make_recompute, reference_runs, phases, records_at),
            seconds=perf_counter() - start_s,
        )


def _make_verification(
    subject: ModuleVerificationSubject,
    layout: str | ParallelizeFunction | tuple[str, ParallelizeFunction],
    ranks: int,
    index: int,
) -> _ModuleLayoutVerification:
    text, parallelize = (
        layout if isinstance(layout, tuple) else (layout, None) if isinstance(layout, str) else ("", layout)
    )
    laid_out_subject = subject.with_layout(with_default_ranks(text, ranks))
    if laid_out_subject.layout.uses_server_processes:
        raise InputError(f"layout {text!r}: servers are processes of a job; use `motet verify JOB --layout ...`")
    world = laid_out_subject.layout.dp or ranks
    name = (
        text
        if parallelize is None
        else f"{getattr(parallelize, '__name__', type(parallelize).__name__)} on {world} ranks"
    )
    return _ModuleLayoutVerification(
        index,
        name,
        laid_out_subject,
        world,
        resolve_layout(laid_out_subject.layout, world, subject.batch_rows),
        parallelize,
    )
