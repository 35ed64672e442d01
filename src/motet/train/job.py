"""A job: everything that a run is made of, as one frozen value from one TOML file.
Read one with `load_job("tiny", ["run.steps=20"])`. A mistake is reported in one sentence with the nearest valid key.

The FLOPs of a step, from the job alone.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from motet.checkpoint.settings import CheckpointSettings
from motet.core.config_loading import (
    FrozenSettings,
    builtin_texts,
    did_you_mean,
    parse_value,
    read_toml,
    settings_from_dict,
)
from motet.core.errors import InputError, check_input
from motet.core.text_files import MAX_NESTING
from motet.data.settings import NUM_SENTINELS, DataSettings
from motet.memory.policy_choice import MemorySettings
from motet.models.arch.logit_slices import padded_targets
from motet.models.hf.hf_config import download_command, is_hub_name
from motet.models.settings import ModelSettings
from motet.models.spec.layer_specs import MicroBatchShape
from motet.models.spec.model_spec import spec_from_settings
from motet.monitor.settings import MonitorSettings
from motet.parallel.context_parallel.context_partition import ContextOrder, default_order
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.layout import Layout, LayoutSettings, resolve_layout
from motet.parallel.local_sgd.schedule import LocalSGDSettings
from motet.precision.recipe import PrecisionSettings
from motet.train.config_rules import check_no_unused_settings, drop_replaced_settings
from motet.train.optimizer.optimizer_settings import OptimizerSettings, RunSettings


class Job(FrozenSettings):
    """One training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    model: ModelSettings
    data: DataSettings = DataSettings()
    layout: LayoutSettings = LayoutSettings()
    communication: CommunicationSettings = CommunicationSettings()
    outer: LocalSGDSettings = LocalSGDSettings()
    precision: PrecisionSettings = PrecisionSettings()
    memory: MemorySettings = MemorySettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    monitor: MonitorSettings = MonitorSettings()
    run: RunSettings = RunSettings()

    @model_validator(mode="after")
    def _check_settings_together(self) -> "Job":
        run = self.run
        if (run.steps is None) == (run.epochs is None):
            if run.steps is None:
                raise ValueError("neither run.steps nor run.epochs is set; set one of them")
            raise ValueError(f"both run.steps = {run.steps} and run.epochs = {run.epochs} are set; leave one out")
        return self

    def layout_for(self, dp_size: int) -> Layout:
        """The layout of `dp_size` ranks, or work items per step of a parameter server."""
        return resolve_layout(
            self.layout,
            dp_size,
            self.data.batch_sequences,
            reproducible=bool(self.run.reproducible),
            default_order=partial(default_context_order, self.model),
        )


def default_context_order(model: ModelSettings) -> ContextOrder:
    """The default order of context parallelism: that of the layers of the model, or head-tail where a module's layers
    are not known."""
    try:
        return default_order(spec_from_settings(model).attention)
    except InputError:
        return "head-tail"


def builtin_jobs() -> dict[str, str]:
    """TOML texts of the jobs that come with motet, by name."""
    return builtin_texts("motet.train", "jobs")


def load_job(source: str, overrides: list[str] | None = None) -> Job:
    """The job of a TOML file or of a built-in name, with `section.key=value` overrides applied."""
    name, hint = source.rpartition("/")[2], ""
    if is_existing_file(f"{source}/job.toml"):
        hint = f"to continue the run in this folder, say --resume-from {source};"
    elif is_hub_name(source):
        hint = f"download its config with {download_command(source)}, and say hf:{name};"
        hint = f"{hint} {did_you_mean(name, builtin_jobs())}".strip()
    tree = read_toml("job", source, builtin_jobs(), hint)
    tree.setdefault("name", Path(source).stem)
    return overridden_job(tree, overrides or [], source)


def overridden_job(tree: dict[str, Any], overrides: list[str], source: str) -> Job:
    """The job of plain nested values and overrides. A person wrote them, so a setting without effect is refused."""
    overridden = [_apply_override(tree, override) for override in overrides]
    drop_replaced_settings(tree, overridden)
    job = job_from_tree(tree, source)
    check_no_unused_settings(job, source)
    return job


def with_overrides(job: Job, overrides: list[str], source: str) -> Job:
    """The same job with some settings replaced by `section.key=value`."""
    tree = job.model_dump(mode="json", exclude_unset=True)
    for override in overrides:
        _apply_override(tree, override)
    return job_from_tree(tree, source)


def job_from_tree(tree: dict[str, Any], source: str = "job") -> Job:
    """The job of plain nested values, as TOML gives them."""
    model, optimizer = tree.get("model"), tree.get("optimizer")
    if isinstance(model, dict) and "family" not in model:
        tree = {**tree, "model": {"family": "module" if "factory" in model else "decoder", **model}}
    if isinstance(optimizer, dict) and optimizer.get("clip_norm") is False:
        tree = {**tree, "optimizer": {**optimizer, "clip_norm": None}}
    return settings_from_dict(Job, tree, source)


def is_existing_file(text: str) -> bool:
    """Whether a word of the command line names a file; `Path.is_file` raises for impossible names."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def split_job_and_overrides(words: list[str]) -> tuple[str | None, list[str]]:
    """The job that a command line names first, if it does, and the settings after it."""
    is_named = bool(words) and ("=" not in words[0] or is_existing_file(words[0]))
    return (words[0], words[1:]) if is_named else (None, words)


def _apply_override(tree: dict[str, Any], override: str) -> str:
    key, equals, text = override.partition("=")
    path, node = key.strip().split("."), tree
    is_path = equals and all(path) and len(path) <= MAX_NESTING
    example = "run.steps=100" if equals or "." not in key else f"{key}=VALUE"
    check_input(is_path, f"override {override!r} is not of the form section.key=value, e.g. {example}")
    if path[:2] == ["layout", "rules"] and path[2:]:
        path = [*path[:2], ".".join(path[2:])]  # A glob, which has dots
    for part in path[:-1]:
        node = node.setdefault(part, {})
        check_input(isinstance(node, dict), f"override {override!r}: {part!r} is a value, not a section")
    node[path[-1]] = parse_value(text.strip())
    if path in (["run", "steps"], ["run", "epochs"]):  # the last one counts
        node.pop("epochs" if path[-1] == "steps" else "steps", None)
    return ".".join(path)


def batch_shape(job: Job, rows: int) -> MicroBatchShape:
    """The sizes of a micro-batch of `rows` sequences, with the expected number of masked tokens."""
    data = job.data
    if data.objective == "spans":
        from motet.data.samples.packing import span_corruption_lengths  # It needs numpy

        spans = span_corruption_lengths(data.sequence_length, data.mask_fraction, NUM_SENTINELS)
        return MicroBatchShape(rows, spans.target_tokens, spans.source_tokens)
    targets = round(rows * data.sequence_length * data.mask_fraction) if data.objective == "masked" else None
    return MicroBatchShape(rows, data.sequence_length, targets=targets)


def computed_shape(shape: MicroBatchShape) -> MicroBatchShape:
    """The sizes of a micro-batch with the rows that the masked head computes, padding included."""
    return shape if shape.targets is None else replace(shape, targets=padded_targets(shape.targets))


def training_flops(job: Job) -> float | None:
    """FLOPs of forward and backward over the global batch, with half of the full attention if it is causal.
    None for a user's module and for a family of Hugging Face models with unknown sizes."""
    try:
        spec = spec_from_settings(job.model)
    except InputError:
        return None
    return float(spec.training_flops(batch_shape(job, job.data.batch_sequences)))
