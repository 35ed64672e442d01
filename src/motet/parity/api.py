"""`motet.verify(model_fn, layouts, batch_fn)`: layouts of the caller's module, and the caller's parallel code."""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from motet.core.config_loading import settings_from_dict
from motet.core.errors import InputError, MotetError, RankFailedError, check_input
from motet.models.layout_invariant_dropout import has_dropout
from motet.parallel.layout import parse_layout, resolve_layout, with_default_ranks
from motet.parallel.model_sharding import CONTEXT_DIMENSION
from motet.parallel.process.process_group import RankGroup
from motet.parity.compare.reference_runs import ReferenceRuns, make_external_reference, run_reference
from motet.parity.diagnose.single_device_recompute import SingleDeviceRecompute, recompute_layout
from motet.parity.layout_verdict import LayoutVerdict, failed_verdict, self_difference_verdict, verify_recorded_steps
from motet.parity.rank_threads import ForkedRankPool, fork_rank_pool
from motet.parity.record import record_verification_steps as recording
from motet.parity.subjects.module_subject import (
    ExternalStepFunction,
    ModuleVerificationSubject,
    UserBatch,
    default_loss,
    record_external_steps,
)
from motet.train.config_rules import check_compositions
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.pipeline.custom_batches import LossFunction

# Called on each rank with the module, in a process group; returns a function that does a step.
ParallelizeFunction = Callable[[nn.Module], ExternalStepFunction]
LayoutArgument = str | ParallelizeFunction | tuple[str, ParallelizeFunction]


@dataclass(frozen=True)
class VerificationReport:
    """The verdicts on all layouts."""

    verdicts: tuple[LayoutVerdict, ...]

    @property
    def ok(self) -> bool:
        """Whether every layout computes the same as one device."""
        return all(verdict.ok for verdict in self.verdicts)

    def __str__(self) -> str:
        return "\n".join(map(str, self.verdicts))

    def as_json(self) -> dict[str, Any]:
        return {"layouts": [verdict.as_json() for verdict in self.verdicts]}


def verify(
    model_fn: Callable[[], nn.Module],
    layouts: Sequence[LayoutArgument],
    batch_fn: Callable[[int], UserBatch],
    *,
    loss: LossFunction = default_loss,
    optimizer: Mapping[str, Any] | None = None,
    ranks: int = 2,
    steps: int = 3,
) -> VerificationReport:
    """Whether a module computes the same numbers in these layouts as on one device, in float64.

    A layout is text, such as "dp=2 zero=3", or your own parallel code: a function that is called with the module on
    each of `ranks` ranks, in a process group. It returns a function that does a step: called with the batch of all
    ranks, that returns full tensors by name: loss, norm, gradient.NAME, parameter.NAME or activation.NAME. In a pair
    of text and function, the text says how the function splits the work, so that a cause can name ranks.
    """
    settings = settings_from_dict(OptimizerSettings, dict(optimizer or {}), "optimizer")
    check_input(layouts and not isinstance(layouts, str), f"verify: layouts = {layouts!r}; give a list of at least one")
    for name, value in (("ranks", ranks), ("steps", steps)):
        check_input(value >= 1, f"verify: {name} = {value}; give 1 or more")
    with (
        tempfile.TemporaryDirectory(prefix="motet-verify-") as temporary_folder,
        recording.single_thread(),
        torch.random.fork_rng(devices=[]),
    ):
        subject, folder = ModuleVerificationSubject(model_fn, batch_fn, loss, settings, steps), Path(temporary_folder)
        cases, verdicts = list[_Candidate](), dict[int, LayoutVerdict]()
        for index, layout in enumerate(layouts):
            try:
                cases.append(_make_layout(subject, layout, index, ranks=ranks))
            except InputError as error:
                verdicts[index] = _refused(layout, error, layouts)
        rank_functions = {str(case.index): partial(case.record_on_rank, folder=folder) for case in cases}
        with fork_rank_pool(max((case.world for case in cases), default=0), rank_functions) as pool:
            reference_runs = run_reference(subject, folder)
            for case in cases:
                try:
                    verdicts[case.index] = case.verdict(pool, reference_runs)
                except (InputError, RankFailedError) as error:
                    verdicts[case.index] = _refused(case.name, error, layouts)
        return VerificationReport(tuple(verdicts[index] for index in range(len(layouts))))


def _refused(layout: LayoutArgument, error: MotetError, layouts: Sequence[LayoutArgument]) -> LayoutVerdict:
    """The verdict on a layout that cannot be verified, which does not end the others; raise if it is the only one."""
    if len(layouts) == 1:
        raise error
    name = layout if isinstance(layout, str) else layout[0] if isinstance(layout, tuple) else str(layout)
    return failed_verdict(name, str(error).removeprefix(f"layout {name!r}: "), error.exit_code)


@dataclass(frozen=True)
class _Candidate:
    index: int
    name: str
    subject: ModuleVerificationSubject
    world: int
    parallelize: ParallelizeFunction | None

    def _records(self, folder: Path) -> recording.RecordFolder:
        return recording.RecordFolder(folder, self.index, self.world, self.subject.steps)

    def record_on_rank(self, group: RankGroup, folder: Path) -> None:
        records = self._records(folder)
        with self.subject.numerics():
            for at, recorded in self._record_phases(group, records):
                records.save(at, group.rank, recorded)

    def _record_phases(self, group: RankGroup, records: recording.RecordFolder) -> Iterable[recording.RecordedStep]:
        if self.parallelize is None:
            return recording.record_phases(
                self.subject,
                group,
                records.folder,
                checkpoint_subfolder=records.checkpoint_subfolder,
                on_sharding=partial(records.save_model_sharding, group.rank),
            )
        if has_dropout(module := self.subject.make_module()):
            raise InputError("verify: the module has dropout, whose masks your function draws by itself; set it to 0")
        steps = enumerate(record_external_steps(self.subject, self.parallelize(module)))
        return ((recording.RecordedStepKey(recording.TRAJECTORY, step), recorded) for step, recorded in steps)

    def verdict(self, pool: ForkedRankPool, runs: ReferenceRuns) -> LayoutVerdict:
        if runs.self_difference is not None:
            return self_difference_verdict(self.name, self.subject.steps - 1, runs.self_difference)
        start_s = perf_counter()
        pool.run(self.world, str(self.index))
        records = self._records(runs.folder)
        if self.parallelize is not None:
            runs = make_external_reference(runs, list(records.values()))
        if self.parallelize is None:
            recompute = recompute_layout(self.subject.with_model_sharding(records.model_sharding()), self.world, runs)
        else:  # Only the caller knows the plan
            recompute = SingleDeviceRecompute(self.subject, self.subject.layout_for(self.world), runs)
        verdict = verify_recorded_steps(self.name, recompute, records)
        return replace(verdict, seconds=perf_counter() - start_s)


def _make_layout(subject: ModuleVerificationSubject, layout: LayoutArgument, index: int, *, ranks: int) -> _Candidate:
    text, parallelize = (
        layout if isinstance(layout, tuple) else (layout, None) if isinstance(layout, str) else ("", layout)
    )
    settings = parse_layout(with_default_ranks(text, ranks))
    needs_job = f"layout {text!r}: motet.verify starts no server processes; use `motet verify JOB --layout ...`"
    check_input(not settings.uses_server_processes, needs_job)
    check_input(
        parallelize is not None or settings.dims.size(CONTEXT_DIMENSION) == 1,
        f"layout {text!r}: motet.verify does not know the tokens of a batch of a module, which ranks would share; use "
        "`motet verify JOB --layout ...`, or compare losses of motet.parallelize",
    )
    check_compositions({"layout": settings})
    world, name = settings.dims.ranks, text
    resolve_layout(settings, world, subject.batch_rows)  # Raises before any process starts
    if parallelize is not None:
        name = f"{getattr(parallelize, '__name__', type(parallelize).__name__)} on {world} ranks"
    return _Candidate(index, name, replace(subject, layout=settings), world, parallelize)
