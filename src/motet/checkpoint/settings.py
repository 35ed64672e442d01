"""The `[checkpoint]` section."""

from typing import Annotated, ClassVar

from pydantic import Field

from motet.core.config_loading import FrozenSettings


class CheckpointSettings(FrozenSettings):
    """The times at which the state of a run is saved. The end of a run, Ctrl-C and SIGTERM always save."""

    other_names: ClassVar = {"every": "*interval save_steps save_every", "keep": "save_total_limit keep_latest*"}
    remedies: ClassVar = {
        "every=*[0-9]*[a-z]*": "it counts steps, and minutes are checkpoint.every_minutes=10",
        "every_minutes=*[0-9]*[a-z]*": "write the number of minutes alone, such as checkpoint.every_minutes=10",
    }
    every: Annotated[int, Field(ge=1)] | None = None
    """Steps between checkpoints."""
    every_minutes: Annotated[float, Field(ge=0, le=1e6)] = 10.0
    """Minutes between checkpoints where `every` is not given, by the clock of rank 0; 0 saves at the end alone."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Number of the newest checkpoints that stay."""

    @property
    def minutes_between(self) -> float | None:
        """The minutes between checkpoints by the clock; None if steps decide."""
        return self.every_minutes if self.every is None and self.every_minutes else None
