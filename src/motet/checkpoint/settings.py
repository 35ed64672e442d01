"""The `[checkpoint]` section."""

from typing import Annotated, ClassVar

from pydantic import Field

from motet.core.config_loading import FrozenSettings


class CheckpointSettings(FrozenSettings):
    """When the state of a run is saved. The end of a run, Ctrl-C and SIGTERM always save."""

    other_names: ClassVar = {"every": "*interval save_steps save_every", "keep": "save_total_limit keep_latest*"}
    every: Annotated[int, Field(ge=1)] | None = None
    """Steps between checkpoints; only at the end when not given."""
    keep: Annotated[int, Field(ge=1)] = 2
    """How many of the newest checkpoints stay."""
