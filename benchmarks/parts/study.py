"""Ways to train the job `tiny` that are compared with one of them: their common settings and their differences."""

from collections.abc import Mapping
from dataclasses import dataclass

COMMON = (
    "data.sequence_length=128",
    "data.batch_sequences=4",
    "optimizer.learning_rate=1e-3",
    "optimizer.schedule.warmup_steps=50",
    "checkpoint.every=1000000",
    "monitor.evaluate_every=1000000",
    "monitor.evaluate_batches=32",
    "monitor.sample_tokens=0",
    "monitor.spans=false",
    "monitor.tensorboard=false",
    "run.device=cpu",
)
"""1e-3 instead of the job's 2e-3, since a batch has a quarter of its sequences, of half the length."""


@dataclass(frozen=True)
class Variant:
    """A way to train."""

    words: str
    settings: tuple[str, ...]
    colour: int
    label: str | None = None
    """The label at its line in a picture; else its name."""
    dashed: bool = False
    without: str | None = None
    """The name of the same variant without error feedback."""
    is_without: bool = False
    bound: int | None = None
    """The most steps that a gradient may be behind in a run with a parameter server."""


@dataclass(frozen=True)
class Study:
    """Variants, and the page that compares them."""

    page: str
    """Name of the page, and of its pictures."""
    variants: Mapping[str, Variant]
    reference: str
    """The variant that the others are compared with."""
    reference_run: str
    """In words."""
    ranks: int
    where: str
    """The ranks or processes that train, in words."""
    dashed: str = ""
    """The meaning of a dashed line."""
    common: tuple[str, ...] = COMMON
    prefix: str = ""
    """A prefix of the names of runs."""

    def settings(self, name: str, seed: int, steps: int) -> list[str]:
        return [*self.common, *self.variants[name].settings, f"run.seed={seed}", f"run.steps={steps}"]

    def run_name(self, name: str, seed: int, steps: int) -> str:
        """The name of a run in the table of curves."""
        return f"{self.prefix}{name}-{steps}-seed{seed}"
