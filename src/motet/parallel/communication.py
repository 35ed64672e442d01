"""The `[communication]` section: when gradients travel, in what portions, and by which algorithms."""

from typing import Annotated, Literal

from pydantic import Field

from motet.core.settings import Settings

Mebibytes = Annotated[float, Field(gt=0, le=2**20)]


class CommunicationSettings(Settings):
    """How ranks exchange gradients and parameters."""

    overlap: Literal["backward", "none"] = "backward"
    """Send each bucket of gradients as soon as backward has all of it, or all of them after the whole backward."""
    bucket_mib: Mebibytes = 25.0
    """Gradients that travel together, in MiB; a larger parameter has a bucket to itself."""
    first_bucket_mib: Mebibytes = 1.0
    """The same for the bucket that is complete first, so that sending begins early."""
    all_reduce: str = "backend"
    """`backend` leaves the choice to the backend; a name of `motet collectives list all-reduce` is carried out."""
    reduce_scatter: str = "backend"
    """The same for reduce-scatter."""
    all_gather: str = "backend"
    """The same for all-gather."""
