"""A parameter server, verified from outside: a job is trained with it, and its checkpoints and events are compared."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from motet.checkpoint.data_files import CheckpointShard
from motet.checkpoint.loading import load_checkpoint
from motet.checkpoint.manifest import read_manifest
from motet.core.errors import RankFailedError
from motet.monitor.events import EVENTS_FILE, StepDone, read_events
from motet.parity.candidate_layouts import CandidateLayout
from motet.parity.compare.reference_runs import DifferenceAtStep, ReferenceRuns, compare_recorded_steps
from motet.parity.compare.tensor_differences import ReferenceStep, build_reference_tensors
from motet.parity.diagnose.mismatch_evidence import MismatchEvidence, as_numbers
from motet.parity.diagnose.tensor_hypotheses import TENSOR_HYPOTHESES, explain
from motet.parity.layout_verdict import LayoutVerdict, failed_verdict, make_verdict
from motet.parity.record.engine_hooks import record_state
from motet.parity.record.record_verification_steps import RecordedStepKey, step_checkpoint_path
from motet.parity.record.tensor_recorder import MASTER_PREFIX, RecordedTensor, TensorKey, TensorRecorder, sketch_shard
from motet.train.job import Job, with_overrides
from motet.train.launch.entry_points import SupervisorIO, TrainRequest, supervise_local_ranks
from motet.train.launch.supervisor import LaunchExitStatus


@dataclass(frozen=True)
class ParameterServerVerifier:
    """Layouts with server processes, compared with the same run on one device."""

    job: Job
    reference_runs: ReferenceRuns
    environment: Mapping[str, str]

    def verdict(self, candidate: CandidateLayout) -> LayoutVerdict:
        """Train, then compare metrics, moments and parameters after each step."""
        records_by_step, exit_status = _train_and_record(candidate.job, candidate.world, self.environment)
        if exit_status.message:
            reason = f"{exit_status.message} (of the small job)"
            return failed_verdict(candidate.layout, reason, exit_status.exit_code)
        recorded = {RecordedStepKey("of a whole run", step): [each] for step, each in enumerate(records_by_step)}
        comparison = compare_recorded_steps(self._run_references, recorded)
        first = comparison.first
        cause = self._likely_cause(candidate, records_by_step[first.at.step], first) if first else ""
        return replace(make_verdict(candidate.layout, comparison, cause), rank=None)

    @cached_property
    def _run_references(self) -> ReferenceRuns:
        """The same run on one device, with the noise of the perturbed references."""
        records_by_step, exit_status = _train_and_record(self.job, 1, self.environment, sketches_shards=False)
        if exit_status.message:
            raise RankFailedError(f"one device: {exit_status.message} (of the small job)")
        steps = self.reference_runs.trajectory_references
        total = [[r._replace(flops_so_far=steps[0].total_flops) for r in records] for records in records_by_step]
        references = [
            ReferenceStep(build_reference_tensors(records), step.learning_rate, dict(step.noise))
            for records, step in zip(total, steps, strict=True)
        ]
        return replace(self.reference_runs, trajectory_references=references)

    def _likely_cause(self, candidate: CandidateLayout, records: list[RecordedTensor], first: DifferenceAtStep) -> str:
        if first.difference.reason:
            return first.difference.reason
        key, step, references = first.difference.key, first.at.step, self._run_references.trajectory_references
        starting_key = TensorKey("starting parameter", key.name.removeprefix(MASTER_PREFIX))
        starting_value = self.reference_runs.trajectory_references[0].value_of(starting_key)
        before, layout = references[step - 1].value_of(key) if step else starting_value, candidate.job.layout
        sizes = {"workers": candidate.world, "servers": layout.server.count}
        sizes["micro-batches of a worker"] = layout.microbatches or 1
        before = None if before is None or not before.ndim else sketch_shard(as_numbers(before.reshape(-1)), 0)
        evidence = MismatchEvidence(
            as_numbers(next(record for record in records if record.key == key).value.reshape(-1)),
            sketch_shard(as_numbers(references[step].tensors[key].value.reshape(-1)), 0),
            known_factors={name: float(size) for name, size in sizes.items()},
            value_before_step=before,
        )
        return explain(evidence, TENSOR_HYPOTHESES)


def _train_and_record(
    job: Job, ranks: int, environment: Mapping[str, str], *, sketches_shards: bool = True
) -> tuple[list[list[RecordedTensor]], LaunchExitStatus]:
    with tempfile.TemporaryDirectory(prefix="motet-verify-run-") as name, Path(os.devnull).open("wb") as null_output:
        settings = [f"run.folder={Path(name) / 'run'}", f"run.ranks={ranks}", "checkpoint.every=1"]
        settings += ["monitor.tensorboard=false", "run.device=cpu"]
        host = SupervisorIO(environment, lambda text: None, lambda: nullcontext(lambda *_: None), null_output.fileno())
        request = TrainRequest(with_overrides(job, settings, "verify"), None, ["motet", "verify"])
        path, exit_status = supervise_local_ranks(request, host)
        exit_status.raise_if_stopped()
        if exit_status.message:
            return [], exit_status
        steps = [event for event in read_events(path / EVENTS_FILE) if isinstance(event, StepDone)]
        return [_record_step_end(path, event, sketches_shards) for event in steps], exit_status


def _record_step_end(path: Path, event: StepDone, sketches_shards: bool) -> list[RecordedTensor]:
    recorder = TensorRecorder(sketches_shards=sketches_shards)
    recorder.add_step_scalars(event.target_tokens, event.loss, event.grad_norm or 0.0)
    checkpoint = step_checkpoint_path(path, event.step)
    manifest = read_manifest(checkpoint)
    dtypes = {name: getattr(torch, dtype) for name, dtype in manifest.dtypes.items()}
    state = {name: torch.empty(shape, dtype=dtypes[name]) for name, shape in manifest.shapes.items()}
    load_checkpoint(checkpoint, {name: CheckpointShard.from_tensor(tensor) for name, tensor in state.items()}, None)
    record_state(recorder, state)
    return recorder.records
