"""The `[optimizer]` section with its learning rate schedule, and the `[run]` section."""

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from motet.core.config_loading import FilePathText, FrozenSettings


class LearningRateScheduleSettings(FrozenSettings):
    """The learning rate over the steps, as a factor of `optimizer.learning_rate`."""

    other_names: ClassVar = {"warmup_steps": "*warmup*", "decay_steps": "*decay_iters"}
    kind: Literal["constant", "linear", "cosine", "warmup-stable-decay"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear rise from 0, before any kind."""
    decay_steps: Annotated[int, Field(ge=1)] | None = None
    """warmup-stable-decay: length of the fall at the end; a fifth of the run when not given."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The factor at the end of the fall; for every kind but constant."""


def learning_rate_factor(schedule: LearningRateScheduleSettings, step: int, total_steps: int) -> float:
    """The factor of step 0..steps-1. Warm-up reaches 1 at its last step; a fall reaches its end at the last step."""
    warmup = min(schedule.warmup_steps, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    length = schedule.decay_steps if schedule.decay_steps is not None else max(1, total_steps // 5)
    decay_start = max(warmup, total_steps - length) if schedule.kind == "warmup-stable-decay" else warmup
    if schedule.kind == "constant" or step < decay_start:
        return 1.0
    progress = min(1.0, (step - decay_start + 1) / (total_steps - decay_start))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1 - progress
    return schedule.final_fraction + (1 - schedule.final_fraction) * remaining


class ParameterGroupSettings(FrozenSettings):
    """Other values for parameters whose names match; the first group that matches counts."""

    match: Annotated[tuple[str, ...], Field(min_length=1)]
    """Shell patterns of parameter names, e.g. `["*.bias", "*norm*"]`."""
    learning_rate_scale: Annotated[float, Field(ge=0)] = 1.0
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """`optimizer.weight_decay` when not given."""


class OptimizerSettings(FrozenSettings):
    """How parameters are updated. Vectors (norms, biases, those of experts) are not decayed unless a group says so."""

    other_names: ClassVar = {
        "name": "kind type optim* adam*",
        "learning_rate": "lr *_lr",
        "betas": "*beta1 *beta2",
        "clip_norm": "*clip* max_norm max_grad_norm",
        "weight_decay": "wd",
        "schedule": "lr_scheduler* *decay_style",
    }
    remedies: ClassVar = {"clip_norm=no*": "write optimizer.clip_norm=false"}
    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: Annotated[float, Field(ge=0)] = 3e-4
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """adamw only."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """adamw only."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """sgd only."""
    nesterov: bool = False
    """sgd only."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """The global norm that gradients are cut down to; `clip_norm = false` switches it off."""
    schedule: LearningRateScheduleSettings = LearningRateScheduleSettings()
    groups: tuple[ParameterGroupSettings, ...] = ()

    @property
    def moment_kinds(self) -> tuple[str, ...]:
        """The names that torch's optimizers give to the moments of a parameter."""
        return ("exp_avg", "exp_avg_sq") if self.name == "adamw" else ("momentum_buffer",) * (self.momentum > 0)

    @property
    def moments_per_parameter(self) -> int:
        """Numbers that the optimizer keeps for each parameter."""
        return len(self.moment_kinds)

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.name == "sgd" and self.nesterov and not self.momentum:
            problem = "optimizer.nesterov = true looks ahead along a momentum, but optimizer.momentum = 0"
            raise ValueError(f"{problem}; set optimizer.momentum=0.9, or leave nesterov out")
        return self


class RunSettings(FrozenSettings):
    """The length of a run, its folder, and its devices."""

    other_names: ClassVar = {
        "steps": "*train*iter* max_steps training_steps num_steps",
        "epochs": "*epochs",
        "ranks": "n*proc_per_node num_gpus gpus world_size num_processes",
        "folder": "output_dir save_dir run_dir dump_folder",
        "device": "use_cpu no_cuda",
        "timeout_s": "*timeout*",
    }
    remedies: ClassVar = {
        "device=gpu*": "write run.device=cuda",
        "device=cuda:*": "write run.device=cuda, and choose devices by CUDA_VISIBLE_DEVICES",
        "compile=true": "write run.compile=blocks",
        "compile=false": "write run.compile=off",
    }
    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps; either this or `epochs`."""
    epochs: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Passes over the training split."""
    stop_at: Annotated[int, Field(ge=1)] | None = None
    """Stop and save after this step, although schedules go on to the end of the run; a resume continues."""
    seed: Annotated[int, Field(ge=0)] = 0
    ranks: Annotated[int, Field(ge=1, le=2**17)] = 1
    """Local ranks that `motet train` starts; `--ranks` on the command line overrides it, launchers override both."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads per rank on the CPU; the cores of the machine shared evenly when not given, or 1 with `reproducible`."""
    compile: Literal["auto", "blocks", "off"] = "auto"
    """`blocks`: torch.compile makes one graph of each kind of block; `auto`: on CUDA, where everything in the job goes
    together with it. Recipe fp64 and `motet verify` compile nothing."""
    reproducible: Literal["layout"] | None = None
    """`layout`: the same bits whatever the number of ranks and `layout.zero`, for some more time."""
    folder: FilePathText | None = None
    """The run folder; `runs/NAME-001` and so on when not given."""
    existing: Literal["resume", "refuse", "number"] = "resume"
    """If `folder` exists: continue an unfinished run of the same job, refuse, or take the next number."""
    on_nan: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite stops the run, or skips the update of that step."""
    max_skips: Annotated[int, Field(ge=1)] = 10
    """`skip` stops after this number of consecutive skipped steps."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Restarts of the ranks by the local supervisor after a failure, from the last checkpoint."""
    timeout_s: Annotated[float, Field(gt=0, le=1e7)] = 600.0
    """The time that a rank waits for the others in one collective, and the supervisor for a sign of life of a rank
    (10 s at least)."""
    cpu_backend: Literal["auto", "motet", "gloo"] = "auto"
    """The backend of collectives on CPU ranks: `auto` takes `motet` on Linux on x86-64, and Gloo elsewhere."""
    share_device: bool = False
    """Several ranks on one CUDA device, with all communication through the CPU: for checks (`scripts/gpu.py`) alone."""

    @property
    def requested_threads(self) -> int | None:
        """Threads to use; 1 for a reproducible run, since the number of threads changes the order of additions."""
        return self.threads or (1 if self.reproducible else None)
