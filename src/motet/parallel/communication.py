"""The `[communication]` section: when gradients travel, in what portions, and by which algorithms."""

from typing import Annotated, Literal

from pydantic import Field

from motet.collectives.library import find
from motet.core.errors import InputError
from motet.core.settings import Settings
from motet.parallel.layout import Layout

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


def check_communication(settings: CommunicationSettings, layout: Layout) -> None:
    """Refuse algorithms that do not exist, or do not do for the ranks that they are to join."""
    for collective, name, ranks in (
        ("all-reduce", settings.all_reduce, layout.dp // layout.shards),
        ("reduce-scatter", settings.reduce_scatter, layout.shards),
        ("all-gather", settings.all_gather, layout.shards),
    ):
        if name == "backend":
            continue
        key = f"communication.{collective.replace('-', '_')}"
        try:
            found = find(collective, name)
            if ranks > 1:
                found.refuse(ranks)
        except InputError as error:
            raise InputError(f"{key} = {name!r}: {error}; or leave it to the backend") from None
        if not found.same_bits:
            raise InputError(
                f"{key} = {name!r} adds in another order on each rank, so that replicas would drift apart; "
                "take one that `motet collectives list` marks as giving all ranks the same bits"
            )
