"""Reports a run to its user: events for the console, files and trackers, which rank 0 writes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from motet.cluster.device_clock import DeviceClock
from motet.cluster.local_device import discover_device, peak_memory_bytes, slow_matmul_warnings
from motet.core.units import DTYPE_BYTES
from motet.monitor.event_dispatcher import EventDispatcher, open_event_dispatcher
from motet.monitor.events import ExpertsMeasured, RoutedLayerLoads, RunStarted, StepDone, TextSampled, WarningIssued
from motet.monitor.sinks import Callback
from motet.monitor.stdout_stderr import stderr_console
from motet.parallel.process.process_group import ranks_on_this_host
from motet.precision.numerics import numerics_remark
from motet.train.build import TrainingComponents
from motet.train.forecast.disk_speed import disk_speed_of_run
from motet.train.job import Job, training_flops
from motet.train.job_step_plan import split_warnings
from motet.train.pipeline.predicted_bubble import bubble_warning
from motet.train.pipeline.stage_usage import StepUsage
from motet.train.state import ResumePoint
from motet.train.step import StepResult


@dataclass
class RunReport:
    """The events of a run. The monitor of other ranks than 0 ignores them."""

    job: Job
    parts: TrainingComponents
    monitor: EventDispatcher

    _uncompiled: str | None = None  # The reason that was reported

    def __post_init__(self) -> None:
        multiplied = "float32" if self.job.precision.emulate else self.job.precision.resolved.compute
        measured = [multiplied, "float32"] if DTYPE_BYTES[multiplied] < DTYPE_BYTES["float32"] else [multiplied]
        self.device = discover_device(self.parts.group.device, measured)
        peak = self.device.peak_flops.get(multiplied)
        self._peak_flops = peak.value * self.parts.ranks if peak else None
        self._step_flops = training_flops(self.job)
        self._warning_about_peak = self._warning_about_shared_host()
        if self._warning_about_peak:
            self._peak_flops = None
        self._disk_speed = disk_speed_of_run(self.job, self.parts)
        self._graphs = 0

    def report_start(self, resume_point: ResumePoint) -> None:
        """Report what runs where, and warn of everything that the user should know before the first step."""
        job, parts, newest = self.job, self.parts, resume_point.checkpoint
        self.monitor.on_event(
            RunStarted(
                name=job.name,
                ranks=parts.ranks,
                layout=str(parts.layout),
                threads=torch.get_num_threads(),
                device=self.device.name,
                parameters=parts.engine.plan.inventory.parameter_count,
                data=parts.data.fingerprint,
                first_step=resume_point.completed_steps + 1,
                last_step=parts.total_steps,
                resumed_from=f"checkpoints/{newest.name}" if newest else None,
                num_classes=parts.model.num_classes,
                **self._extent_of_run(),
            )
        )
        splits = split_warnings(job, parts.engine.plan, len(parts.group.local_ranks or ()))
        numerics = numerics_remark(job.precision, parts.group.device)
        bubble = bubble_warning(parts.layout, job.data.batch_sequences)
        remarks = [parts.model.remark, numerics, *splits, bubble, self._shortness_warning(), self._warning_about_peak]
        remarks += parts.data.samples.remarks
        for text in [*filter(None, remarks), *resume_point.remarks, *slow_matmul_warnings(self.device)]:
            self.monitor.on_event(WarningIssued(text=text))
        self._report_uncompiled()
        if parts.engine.compiled and not parts.group.rank:
            parts.engine.compiled.log = lambda text: stderr_console().print(text, highlight=False)

    def _extent_of_run(self) -> dict[str, float | None]:
        """How long the run is, and what it evaluates and saves, which rank 0 shows."""
        if self.parts.group.rank:
            return {}
        job, data = self.job, self.parts.data
        return {
            "steps_per_epoch": data.train_samples / job.data.batch_sequences,
            "validation_targets": data.evaluation_targets("validation", job.monitor.evaluate_batches),
            "checkpoint_every": job.checkpoint.every,
            "checkpoint_every_minutes": job.checkpoint.minutes_between,
        }

    def _warning_about_shared_host(self) -> str | None:
        """All ranks call this."""
        group = self.parts.group
        local = len(group.local_ranks or range(group.world))
        if group.device.type != "cpu" or local == group.world or (ranks := ranks_on_this_host(group)) <= local:
            return None
        return (
            f"the share of peak is left out: {ranks} ranks of several launches share this host and its cores; give one "
            f"launch all of them (--nproc-per-node {ranks})"
        )

    def _share_of_peak(self, seconds: float) -> float | None:
        if self._step_flops is None or not self._peak_flops:
            return None
        share = self._step_flops / (seconds * self._peak_flops)
        if share <= 1:
            return share
        self._peak_flops = None
        text = f"the share of peak is left out: it would be {share:.0%} of what products reached before the first step"
        self.monitor.on_event(WarningIssued(text=f"{text}, when other programs may have kept the device busy"))
        return None

    def _shortness_warning(self) -> str | None:
        if self.parts.total_steps > 1 or self.job.run.steps is not None:
            return None
        samples, batch = self.parts.data.train_samples, self.job.data.batch_sequences
        return (
            f"the run has {self.parts.total_steps} step, since an epoch has {samples} samples and a step "
            f"data.batch_sequences = {batch}; raise run.epochs, or lower data.batch_sequences"
        )

    def report_step(self, done: int, result: StepResult, seconds: float) -> None:
        step_done = StepDone(
            step=done,
            loss=result.loss,
            target_tokens=result.targets,
            tokens=result.tokens,
            learning_rate=result.learning_rate,
            balance_loss=result.experts and result.experts.loss_sum / (result.targets or 1.0),
            grad_norm=result.grad_norm,
            skipped=not result.is_finite,
            loss_scale=result.loss_scale,
            step_time_s=seconds,
            tokens_per_s=result.tokens / seconds,
            mfu=self._share_of_peak(seconds),
            **vars(result.usage or StepUsage(peak_memory_bytes(self.parts.group.device))),
            epoch=self.parts.data.epoch_at(done),
            compiled_graphs=self._graphs_of_step(),
            server=result.server_work,
        )
        if result.experts is not None and self.monitor.is_reported(done):
            layers = tuple(
                RoutedLayerLoads(**layer._asdict(), max_over_mean=layer.max_over_mean)
                for layer in result.experts.layers
            )
            self.monitor.on_event(ExpertsMeasured(step=done, layers=layers))
        for event in (step_done, result.overflow, result.recomputation, result.numerics):
            if event is not None:
                self.monitor.on_event(event)
        if self._disk_speed is not None and (text := self._disk_speed.warning_after_step()):
            self.monitor.on_event(WarningIssued(text=text))

    def _graphs_of_step(self) -> int:
        """The graphs since the last call; the reason is reported where blocks began to run eagerly."""
        if (compiled := self.parts.engine.compiled) is None:
            return 0
        before, self._graphs = self._graphs, compiled.graphs
        self._report_uncompiled()
        return self._graphs - before

    def _report_uncompiled(self) -> None:
        compiled = self.parts.engine.compiled
        if compiled is not None and compiled.reason not in (None, self._uncompiled):
            self._uncompiled = compiled.reason
            remedy = "set run.compile=off to leave the warning out"
            self.monitor.on_event(WarningIssued(text=f"blocks run eagerly, not compiled: {compiled.reason}; {remedy}"))

    def report_sample(self) -> None:
        """Let the trained model continue the job's prompt; all ranks call this."""
        job, parts, model = self.job, self.parts, self.parts.model
        count, temperature, tokenizer = job.monitor.sample_tokens, job.monitor.sample_temperature, parts.data.tokenizer
        if not count or not model.is_autoregressive:
            return
        prompt = tokenizer.encode(job.monitor.sample_prompt) or [tokenizer.end_id]
        tokens = parts.generate(prompt, count, seed=job.run.seed, temperature=temperature)
        step, text = parts.total_steps, tokenizer.decode(tokens)
        self.monitor.on_event(TextSampled(step=step, prompt=job.monitor.sample_prompt, text=text))

    def report_prediction(self) -> None:
        """Report the planner's prediction of a step, on the rank whose events are shown."""
        if self.parts.group.rank or not self.job.monitor.predict:
            return
        # After the last step: a run starts without the planner
        from motet.train.forecast.step_forecast import predict_step

        stages = self.parts.engine.plan.model_sharding.stages
        if predicted := predict_step(self.job, self.parts.layout, stages, device=self.parts.group.device):
            self.monitor.on_event(predicted)


def open_rank_monitor(job: Job, parts: TrainingComponents, callbacks: Sequence[Callback] = ()) -> EventDispatcher:
    """The monitor of a run on rank 0, for the folder of its checkpoints, and one that ignores all events elsewhere."""
    if parts.group.rank:
        return EventDispatcher()
    clock = DeviceClock(parts.group.device) if parts.group.device.type == "cuda" else None
    folder, settings = parts.state.checkpoint_folder.parent, job.model_dump(mode="json")
    return open_event_dispatcher(job.monitor, folder, settings, callbacks=callbacks, device_clock=clock)
