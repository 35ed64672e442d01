"""How a model is spread over ranks, as a value.

Axes and techniques add their fields together with the code that reads them.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from motet.core.errors import InputError
from motet.core.settings import Settings


class LayoutSettings(Settings):
    """The `[layout]` section."""

    dp: Annotated[int, Field(ge=1)] | None = None
    """Replicas of the model; all ranks when not given."""
    microbatches: Annotated[int, Field(ge=1)] = 1
    """Parts that a rank cuts its share of the batch into, one forward and backward each."""


@dataclass(frozen=True)
class Layout:
    """A layout that is known to fit `ranks`."""

    dp: int
    microbatches: int

    @property
    def ranks(self) -> int:
        return self.dp

    def rows_per_microbatch(self, batch_sequences: int) -> int:
        return batch_sequences // (self.dp * self.microbatches)


def resolve_layout(settings: LayoutSettings, ranks: int, batch_sequences: int) -> Layout:
    """The layout for so many ranks, or a sentence about why there is none."""
    dp = settings.dp if settings.dp is not None else ranks
    if dp != ranks:
        raise InputError(
            f"layout.dp = {dp} does not match {ranks} ranks; start {dp} ranks (--ranks {dp}) or leave layout.dp out"
        )
    parts = dp * settings.microbatches
    if batch_sequences % parts:
        below, above = batch_sequences // parts * parts, -(-batch_sequences // parts) * parts
        choices = f"{above}" if below == 0 else f"{below} or {above}"
        raise InputError(
            f"data.batch_sequences = {batch_sequences} cannot be cut evenly over {dp} ranks x {settings.microbatches} "
            f"micro-batches = {parts}; use data.batch_sequences = {choices}, or another number of ranks"
        )
    return Layout(dp=dp, microbatches=settings.microbatches)
