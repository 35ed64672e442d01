"""Sinks of events: the interface of callbacks, files of a run, TensorBoard and W&B.

Listening to a run: one method that gets every event, or one method for each kind of event.
Console, files and trackers of motet are callbacks too. A callback that raises is reported once, then dropped, so that
a tracker cannot end a training run; one that raises a `MotetError` ends the run with that message.

The sinks of the two files in every run folder: `events.jsonl`, and `summary.json` at the start and end.

TensorBoard and Weights & Biases as callbacks with the same names. Each is imported only if a job uses it.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from motet.core.errors import CheckpointSaveError, InputError, convert_os_errors
from motet.core.text_files import open_without_links
from motet.monitor import events
from motet.monitor.events import (
    EVENTS_FILE,
    EvaluationDone,
    Event,
    ExpertsMeasured,
    RunEnded,
    RunStarted,
    StepDone,
    TextSampled,
    read_events,
)
from motet.monitor.summary import summarize, write_summary


class Callback:
    """Subclass it and define the methods you need. Only rank 0 calls it, in the order of the events."""

    def on_event(self, event: events.Event) -> None:
        """Passes each event to the method of its kind; override it to get them all in one place."""
        getattr(self, _METHODS[type(event)])(event)

    def on_start(self, event: events.RunStarted) -> None: ...

    def on_step(self, event: events.StepDone) -> None:
        """Every `monitor.every` steps, and at the first, the last and any failing step."""

    def on_overflow(self, event: events.GradientsOverflowed) -> None: ...
    def on_recomputation(self, event: events.RecomputationChosen) -> None: ...
    def on_numerics(self, event: events.NumericsMeasured) -> None: ...
    def on_experts(self, event: events.ExpertsMeasured) -> None:
        """Every `monitor.every` steps of a mixture of experts, before `on_step`."""

    def on_evaluation(self, event: events.EvaluationDone) -> None: ...
    def on_checkpoint_started(self, event: events.CheckpointStarted) -> None: ...
    def on_checkpoint(self, event: events.CheckpointSaved) -> None: ...
    def on_sample(self, event: events.TextSampled) -> None: ...
    def on_replica_check(self, event: events.ReplicaCheckDone) -> None: ...
    def on_profile(self, event: events.ProfileSaved) -> None: ...
    def on_warning(self, event: events.WarningIssued) -> None: ...
    def on_prediction(self, event: events.StepPredicted) -> None: ...
    def on_end(self, event: events.RunEnded) -> None: ...

    def close(self) -> None:
        """Called once at the very end, also if the run ends without `RunEnded`."""


_METHODS: dict[type[events.Event], str] = {
    events.RunStarted: "on_start",
    events.StepDone: "on_step",
    events.GradientsOverflowed: "on_overflow",
    events.RecomputationChosen: "on_recomputation",
    events.NumericsMeasured: "on_numerics",
    events.ExpertsMeasured: "on_experts",
    events.EvaluationDone: "on_evaluation",
    events.CheckpointStarted: "on_checkpoint_started",
    events.CheckpointSaved: "on_checkpoint",
    events.TextSampled: "on_sample",
    events.ReplicaCheckDone: "on_replica_check",
    events.ProfileSaved: "on_profile",
    events.WarningIssued: "on_warning",
    events.StepPredicted: "on_prediction",
    events.RunEnded: "on_end",
}


class JsonlSink(Callback):
    """Appends each event as a line, which the operating system has when the method returns: kill -9 loses none.
    An incomplete line of a killed attempt is cut off first. A full disk is a `CheckpointSaveError`, and so is a file
    that somebody has removed or replaced. A symbolic link is not followed."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVENTS_FILE
        remedy = "free some space or repair the folder"
        self._convert_errors = partial(convert_os_errors, f"write {self._path}", remedy, CheckpointSaveError)
        with self._convert_errors():
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open_without_links(self._path, "a+b")
            self._identity = os.fstat(self._file.fileno())
            self._file.truncate(self._path.read_bytes().rfind(b"\n") + 1)

    def on_event(self, event: Event) -> None:
        line = event.model_dump_json().encode() + b"\n"
        if not self._is_in_place():
            raise CheckpointSaveError(
                f"{self._path} was moved, removed or replaced while the run was training, alone or with its folder; "
                "checkpoints are as they were left: put the folder back in its place, then --resume-from it"
            )
        with self._convert_errors():
            while line:  # a full disk may take a part of it
                line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()

    def _is_in_place(self) -> bool:
        with self._convert_errors(), suppress(FileNotFoundError, NotADirectoryError):
            return os.path.samestat(self._path.lstat(), self._identity)
        return False


class SummarySink(Callback):
    """Writes `summary.json` from the events in `events.jsonl`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_start(self, event: RunStarted | RunEnded) -> None:
        write_summary(summarize(read_events(self._folder / EVENTS_FILE)), self._folder)

    on_end = on_start


_STEP_SCALARS = {
    "train/loss": "loss",
    "train/balance_loss": "balance_loss",
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "learning_rate",
    "train/loss_scale": "loss_scale",
    "train/epoch": "epoch",
    "speed/step_time_s": "step_time_s",
    "speed/tokens_per_s": "tokens_per_s",
    "speed/mfu": "mfu",
    "memory/peak_bytes": "memory_bytes",
}


_CELL_PIXELS = 8  # The width and height of a cell in a heat map


class TensorBoardSink(Callback):
    """Writes scalars and sampled text to `tensorboard/`; a resumed run replaces the steps that it repeats."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make_writer = partial(SummaryWriter, str(folder / "tensorboard"), flush_secs=10)
        self._writer: SummaryWriter | None = None

    def on_start(self, event: RunStarted) -> None:
        self._writer = self._make_writer(purge_step=event.first_step if event.first_step > 1 else None)

    def on_step(self, event: StepDone) -> None:
        self._add(step_scalars(event), event)

    def on_experts(self, event: ExpertsMeasured) -> None:
        """A heat map with a row of cells for each layer: black for no tokens, white for twice the mean or more."""
        import numpy as np

        self._add({"experts/max_over_mean": event.worst.max_over_mean}, event)
        cells = np.zeros((len(event.layers), max(len(layer.loads) for layer in event.layers)), dtype=np.uint8)
        for row, layer in zip(cells, event.layers, strict=True):
            loads = np.asarray(layer.loads, dtype=np.float64)
            row[: len(loads)] = np.rint(255 * (loads / max(loads.mean(), 1.0) / 2).clip(0, 1))
        assert self._writer is not None, "events begin with RunStarted"
        image = cells.repeat(_CELL_PIXELS, 0).repeat(_CELL_PIXELS, 1)
        self._writer.add_image("experts/load", image, event.step, event.time, dataformats="HW")

    def on_evaluation(self, event: EvaluationDone) -> None:
        self._add(evaluation_scalars(event), event)

    def on_sample(self, event: TextSampled) -> None:
        assert self._writer is not None, "events begin with RunStarted"
        self._writer.add_text("sample", event.prompt + event.text, event.step, event.time)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, scalars: dict[str, float], event: StepDone | ExpertsMeasured | EvaluationDone) -> None:
        assert self._writer is not None, "events begin with RunStarted"
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, event.step, event.time)


class WandbSink(Callback):
    """Logs to Weights & Biases: each attempt is a run in a group named after the run folder."""

    def __init__(self, folder: Path, project: str, mode: Literal["online", "offline"], job: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise InputError(
                f"monitor.wandb = {mode!r} needs the package wandb, which is not installed; "
                "install it with `pip install 'motet[wandb]'` or set monitor.wandb=off"
            ) from None
        try:
            run = {"project": project, "group": folder.name, "name": folder.name, "dir": str(folder), "mode": mode}
            # Its lines and its capture of stdout would tear the progress display.
            quiet = wandb.Settings(silent=True, console="off", init_timeout=30.0)
            self._run = wandb.init(**run, config=dict(job), settings=quiet)
        except Exception as error:  # any error is reported before training starts
            raise InputError(
                f"monitor.wandb = {mode!r} does not start: {error}; use monitor.wandb=offline and `wandb sync` later"
            ) from error

    def on_step(self, event: StepDone) -> None:
        self._run.log(step_scalars(event), step=event.step)

    def on_experts(self, event: ExpertsMeasured) -> None:
        self._run.log({"experts/max_over_mean": event.worst.max_over_mean}, step=event.step)

    def on_evaluation(self, event: EvaluationDone) -> None:
        self._run.log(evaluation_scalars(event), step=event.step)

    def close(self) -> None:
        self._run.finish()


def step_scalars(event: StepDone) -> dict[str, float]:
    """The values of a step that trackers show, by name."""
    values = {name: getattr(event, field) for name, field in _STEP_SCALARS.items()}
    return {name: value for name, value in values.items() if value is not None}


def evaluation_scalars(event: EvaluationDone) -> dict[str, float]:
    """The values of an evaluation that trackers show, by name."""
    values = {"loss": event.loss, "perplexity": event.perplexity, "accuracy": event.accuracy}
    return {f"{event.split}/{name}": value for name, value in values.items() if value is not None}
