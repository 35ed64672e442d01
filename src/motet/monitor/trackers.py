"""TensorBoard and Weights & Biases as callbacks with the same names. Each is imported only if a job uses it."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from motet.core.errors import InputError
from motet.monitor.callback import Callback
from motet.monitor.events import EvaluationDone, RunStarted, StepDone, TextSampled

_STEP_SCALARS = {
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "learning_rate",
    "train/loss_scale": "loss_scale",
    "train/epoch": "epoch",
    "speed/step_time_s": "step_time_s",
    "speed/tokens_per_s": "tokens_per_s",
    "speed/mfu": "mfu",
    "memory/peak_bytes": "memory_bytes",
}


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

    def on_evaluation(self, event: EvaluationDone) -> None:
        self._add(evaluation_scalars(event), event)

    def on_sample(self, event: TextSampled) -> None:
        assert self._writer is not None, "events begin with RunStarted"
        self._writer.add_text("sample", event.prompt + event.text, event.step, event.time)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, scalars: dict[str, float], event: StepDone | EvaluationDone) -> None:
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
            # Its own lines and its capture of stdout would tear the progress display.
            quiet = wandb.Settings(silent=True, console="off", init_timeout=30.0)
            self._run = wandb.init(**run, config=dict(job), settings=quiet)
        except Exception as error:  # whatever it is, it is reported before training starts
            raise InputError(
                f"monitor.wandb = {mode!r} does not start: {error}; use monitor.wandb=offline and `wandb sync` later"
            ) from error

    def on_step(self, event: StepDone) -> None:
        self._run.log(step_scalars(event), step=event.step)

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
