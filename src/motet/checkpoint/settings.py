"""The `[checkpoint]` section."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from motet.core.config_loading import FrozenSettings
from motet.memory.policy_choice import parse_bytes


class CheckpointSettings(FrozenSettings):
    """The times at which the state of a run is saved. The end of a run, Ctrl-C and SIGTERM always save."""

    other_names: ClassVar = {
        "every": "*interval save_steps save_every",
        "keep": "save_total_limit keep_latest*",
        "mode": "async* *async_save* async_mode",
        "keep_every": "keep_period keep_every_n*",
    }
    remedies: ClassVar = {
        "every=*[0-9]*[a-z]*": "it counts steps, and minutes are checkpoint.every_minutes=10",
        "every_minutes=*[0-9]*[a-z]*": "write the number of minutes alone, such as checkpoint.every_minutes=10",
    }
    every: Annotated[int, Field(ge=1)] | None = None
    """Steps between checkpoints."""
    every_minutes: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """Minutes between checkpoints, by the clock of rank 0; 10 where `every` is not given either. 0 saves none by the
    clock."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Number of the newest checkpoints that stay."""
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Checkpoints of multiples of these steps are made, and never removed."""
    mode: Literal["async", "sync"] = "async"
    """`async` writes a checkpoint while the next steps run; `sync` lets all ranks wait until it is on disk."""
    staging: Annotated[int, BeforeValidator(parse_bytes), Field(ge=2**20, le=2**40)] = 2**28
    """Pinned memory of the host through which the values of a GPU travel to the disk, such as `512MiB`. An update that
    would change values which find no room in it waits."""

    @property
    def minutes_between(self) -> float | None:
        """The minutes between checkpoints by the clock; None if steps decide."""
        default = 10.0 if self.every is None else 0.0
        return (default if self.every_minutes is None else self.every_minutes) or None

    def is_due(self, done: int) -> bool:
        """Whether a number of completed steps asks for a checkpoint."""
        return any(done % each == 0 for each in self.step_intervals)

    @property
    def step_intervals(self) -> list[int]:
        """The numbers of steps at whose multiples checkpoints are made."""
        return [each for each in (self.every, self.keep_every) if each is not None]
