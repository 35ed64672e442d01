"""A job: everything that a run is made of, as one frozen value from one TOML file.

Read with `load_job("tiny", ["run.steps=20"])`. Whatever is wrong is told in one sentence with the nearest valid key.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from motet.checkpoint.settings import CheckpointSettings
from motet.core.base_settings import FrozenSettings
from motet.core.config_loading import builtin_texts, read_toml, settings_from_dict
from motet.core.errors import InputError
from motet.data.settings import DataSettings
from motet.models.settings import ModelSettings
from motet.monitor.settings import MonitorSettings
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.layout import Layout, LayoutSettings, resolve_layout
from motet.parallel.local_sgd.schedule import LocalSGDSettings
from motet.precision.recipe import PrecisionSettings
from motet.train.config_rules import check_no_unused_settings, drop_replaced_settings
from motet.train.optimizer.optimizer_settings import OptimizerSettings, RunSettings
from motet.train.renamed_settings import check_no_renamed_settings
from motet.train.reproducibility_rules import reproducibility_conflicts


class Job(FrozenSettings):
    """One training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    model: ModelSettings
    data: DataSettings = DataSettings()
    layout: LayoutSettings = LayoutSettings()
    communication: CommunicationSettings = CommunicationSettings()
    outer: LocalSGDSettings = LocalSGDSettings()
    precision: PrecisionSettings = PrecisionSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    monitor: MonitorSettings = MonitorSettings()
    run: RunSettings = RunSettings()

    @model_validator(mode="after")
    def _length_is_given_once(self) -> "Job":
        if (self.run.steps is None) == (self.run.epochs is None):
            length_text = (
                f"both run.steps = {self.run.steps} and run.epochs = {self.run.epochs}" if self.run.steps else "neither"
            )
            raise ValueError(f"a run needs either run.steps or run.epochs; {length_text} given")
        return self

    @model_validator(mode="after")
    def _has_no_reproducibility_conflict(self) -> "Job":
        for sentence in reproducibility_conflicts(self) if self.run.reproducible else ():
            raise ValueError(sentence)
        return self

    def layout_for(self, dp_size: int) -> Layout:
        """The layout of so many ranks, or shares of a parameter server."""
        return resolve_layout(self.layout, dp_size, self.data.batch_sequences, bool(self.run.reproducible))


def builtin_jobs() -> dict[str, str]:
    """Name -> TOML text of the jobs that come with motet."""
    return builtin_texts("motet.train", "jobs")


def load_job(source: str, overrides: list[str] | None = None) -> Job:
    """The job of a TOML file or of a built-in name, with `section.key=value` overrides applied."""
    is_run = is_existing_file(f"{source}/job.toml")
    hint = f"to continue the run in this folder, say --resume-from {source};" if is_run else ""
    tree = read_toml("job", source, builtin_jobs(), hint)
    tree.setdefault("name", Path(source).stem)
    return overridden_job(tree, overrides or [], source)


def overridden_job(tree: dict[str, Any], overrides: list[str], source: str) -> Job:
    """The job of plain nested values and overrides. A person wrote them, so a setting without effect is refused."""
    overridden = [_apply_override(tree, override) for override in overrides]
    check_no_renamed_settings(tree, source)
    drop_replaced_settings(tree, overridden)
    job = job_from_tree(tree, source)
    check_no_unused_settings(job, source)
    return job


def with_overrides(job: Job, overrides: list[str], source: str) -> Job:
    """The same job with some settings replaced by `section.key=value`."""
    tree = job.model_dump(mode="json", exclude_unset=True)
    for override in overrides:
        _apply_override(tree, override)
    check_no_renamed_settings(tree, source)
    return job_from_tree(tree, source)


def job_from_tree(tree: dict[str, Any], source: str = "job") -> Job:
    """Validate plain nested values, as TOML gives them."""
    model = tree.get("model")
    if isinstance(model, dict) and "family" not in model:
        tree = {**tree, "model": {"family": "module" if "factory" in model else "decoder", **model}}
    optimizer = tree.get("optimizer")
    if isinstance(optimizer, dict) and optimizer.get("clip_norm") is False:
        tree = {**tree, "optimizer": {**optimizer, "clip_norm": None}}
    return settings_from_dict(Job, tree, source)


def is_existing_file(text: str) -> bool:
    """Whether a word of the command line names a file; `Path.is_file` raises at what no file can be called."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def split_job_and_overrides(words: list[str]) -> tuple[str | None, list[str]]:
    """What a command line says first, if it names a job, and the settings after it."""
    is_named = bool(words) and ("=" not in words[0] or is_existing_file(words[0]))
    return (words[0], words[1:]) if is_named else (None, words)


def _apply_override(tree: dict[str, Any], override: str) -> str:
    """Put one value into the tree, and say at which key."""
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise InputError(f"override {override!r} is not of the form section.key=value, e.g. run.steps=100")
    node = tree
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise InputError(f"override {override!r}: {part!r} is a value, not a section")
    node[path[-1]] = _parse_value(text.strip())
    if path in (["run", "steps"], ["run", "epochs"]):  # the length given last is the one that counts
        node.pop("epochs" if path[-1] == "steps" else "steps", None)
    return ".".join(path)


def _parse_value(text: str) -> Any:
    """A TOML value, or the text itself where it is none (so that no shell needs nested quotes)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
