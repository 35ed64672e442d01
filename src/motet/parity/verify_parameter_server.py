"""A parameter server, from outside: a job is trained with it for real, and what it leaves is compared."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from motet.checkpoint.load import load_checkpoint
from motet.checkpoint.manifest import is_compression_state, read_manifest
from motet.core.errors import RankFailedError
from motet.monitor.events import EVENTS_FILE, StepDone, read_events
from motet.parity.candidate_layouts import CandidateLayout
from motet.parity.compare.reference_runs import ReferenceRuns, step_checkpoint_path
from motet.parity.compare.tensor_differences import ReferenceStep, build_reference_tensors
from motet.parity.diagnose.mismatch_hypotheses import TensorMismatch, explain_mismatch
from motet.parity.layout_verdict import DifferenceAtStep, LayoutVerdict, failed_verdict, find_differences, wrong_verdict
from motet.parity.record.random_sign_sketch import sketch_shard
from motet.parity.record.tensor_recorder import RecordedTensor, TensorRecorder
from motet.train.job import Job, with_overrides
from motet.train.launch.entry_points import SupervisorIO, TrainRequest, supervise_local_ranks
from motet.train.launch.supervisor import LaunchExitStatus

TRAINING_RUN = "of a whole run"


class ParameterServerVerifier:
    """Layouts with servers, against the same run on one device."""

    def __init__(self, job: Job, reference_runs: ReferenceRuns, environment: Mapping[str, str]) -> None:
        self._job = job
        self._reference_runs = reference_runs
        self._environment = environment

    def verdict(self, candidate: CandidateLayout) -> LayoutVerdict:
        """Its `first_difference` is in what the run leaves after a step: numbers, moments, parameters."""
        records_by_step, exit_status = _train_and_record(candidate.job, candidate.world, self._environment)
        if exit_status.message:
            return failed_verdict(
                candidate.layout, f"{exit_status.message} (of the job made small)", exit_status.exit_code
            )
        worst, first, noise_dominated = find_differences(
            lambda _, step: self._references[step],
            [(TRAINING_RUN, step) for step in range(len(self._references))],
            lambda _, step: [records_by_step[step]],
        )
        if first is None:
            return LayoutVerdict(
                candidate.layout, True, worst.difference.relative_error, str(worst), noise_dominated=noise_dominated
            )
        verdict = wrong_verdict(
            candidate.layout, worst, first, lambda: self._explain(candidate, records_by_step[first.step], first)
        )
        return replace(verdict, rank=None)  # the run as a whole

    @cached_property
    def _references(self) -> list[ReferenceStep]:
        """The same run on one device; how far rounding may carry it is known from the perturbed references."""
        records_by_step, exit_status = _train_and_record(self._job, 1, self._environment, sketches_shards=False)
        if exit_status.message:
            raise RankFailedError(f"one device: {exit_status.message} (of the job made small)")
        rates = [reference.learning_rate for reference in self._reference_runs.step_references]
        noise = [dict(free.noise) for free in self._reference_runs.trajectory_references]
        total_flops = max(
            whole.record.flops_so_far for whole in self._reference_runs.trajectory_references[0].tensors.values()
        )
        return [
            ReferenceStep(build_reference_tensors(each._replace(flops_so_far=total_flops) for each in one), rate, known)
            for one, rate, known in zip(records_by_step, rates, noise, strict=True)
        ]

    def _explain(
        self, candidate: CandidateLayout, records: list[RecordedTensor], step_difference: DifferenceAtStep
    ) -> str:
        if step_difference.difference.reason:
            return step_difference.difference.reason
        key = step_difference.difference.key
        value = next(each.value for each in records if (each.kind, each.name) == key)
        expected = sketch_shard(self._references[step_difference.step].tensors[key].value.reshape(-1), 0)
        if step_difference.step:
            value_before_step = self._references[step_difference.step - 1].value_of(key)
        else:
            value_before_step = self._reference_runs.trajectory_references[0].value_of(
                ("starting parameter", key[1].removeprefix("master/"))
            )
        known_factors = {"workers": float(candidate.world), "servers": float(candidate.job.layout.server.count)}
        known_factors["micro-batches of a worker"] = float(candidate.job.layout.microbatches)
        flat_before = (
            None
            if value_before_step is None or value_before_step.ndim == 0
            else sketch_shard(value_before_step.reshape(-1), 0)
        )
        return explain_mismatch(
            TensorMismatch(value.reshape(-1), expected, None, known_factors, value_before_step=flat_before)
        )


def _train_and_record(
    job: Job, ranks: int, environment: Mapping[str, str], sketches_shards: bool = True
) -> tuple[list[list[RecordedTensor]], LaunchExitStatus]:
    """What a run leaves after each step, if it comes to its end."""
    with tempfile.TemporaryDirectory(prefix="motet-verify-run-") as name, Path(os.devnull).open("wb") as null_output:
        folder = Path(name) / "run"
        settings = [
            f"run.folder={folder}",
            f"run.ranks={ranks}",
            "checkpoint.every=1",
            "monitor.tensorboard=false",
            "run.device=cpu",
        ]
        run_job = with_overrides(job, settings, "verify")
        host = SupervisorIO(environment, lambda text: None, lambda: nullcontext(lambda *_: None), null_output.fileno())
        path, exit_status = supervise_local_ranks(TrainRequest(run_job, None, ["motet", "verify"]), host)
        exit_status.raise_if_stopped()
        if exit_status.message:
            return [], exit_status
        steps = [event for event in read_events(path / EVENTS_FILE) if isinstance(event, StepDone)]
        return [
            _record_step_end(path, event, TensorRecorder(sketches_shards=sketches_shards)) for event in steps
        ], exit_status


def _record_step_end(path: Path, event: StepDone, recorder: TensorRecorder) -> list[RecordedTensor]:
    recorder.add_scalar("sum", "target tokens", event.target_tokens)
    recorder.add_scalar("sum", "mean loss", event.loss)
    recorder.add_scalar("norm", "gradient norm", event.grad_norm or 0.0)
    checkpoint = step_checkpoint_path(path, event.step)
    manifest = read_manifest(checkpoint)
    shapes = {name: shape for name, shape in manifest.shapes.items() if not is_compression_state(name)}
    state = {name: torch.empty(shape, dtype=getattr(torch, manifest.dtypes[name])) for name, shape in shapes.items()}
    load_checkpoint(checkpoint, state, None)
    for name in sorted(state, key=lambda name: name.startswith("master/")):
        recorder.add_shard("state", name, state[name])
    return recorder.records
