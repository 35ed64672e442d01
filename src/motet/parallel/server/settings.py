"""The `[layout.server]` section: a parameter server instead of all-reduce."""

from typing import Annotated, Literal

from pydantic import Field

from motet.core.errors import InputError
from motet.core.settings import Settings
from motet.parallel.server.protocol import Owners, Rule


class ServerSettings(Settings):
    """Servers that keep the parameters, and how far workers may run apart."""

    count: Annotated[int, Field(ge=1)] = 1
    """Servers, each with its part of the parameters; they are processes beside the workers."""
    mode: Literal["sync", "first-k", "bounded", "async"] = "sync"
    """When an update is made: of all shares of a step (`sync`), of the first `first` of them (`first-k`), of all while
    workers go on for `staleness` steps (`bounded`), or of every share by itself (`async`)."""
    first: Annotated[int, Field(ge=1)] | None = None
    """Of `first-k`: how many workers' gradients make a step; those that come later are dropped."""
    staleness: Annotated[int, Field(ge=0)] | None = None
    """Of `bounded`: step t is computed with all updates of steps before t - staleness at least."""
    copies: Literal[1, 2] = 1
    """Servers that keep each part; a push is acknowledged when all of them have it."""
    order: Literal["need", "arrival"] = "need"
    """What is sent first of what waits: what the next forward needs first, which overtakes what is underway; or what
    came first."""
    piece_mib: Annotated[float, Field(gt=0, le=2**20)] = 4.0
    """What travels as one, in MiB; larger parameters are cut, and smaller ones go together."""


def rule_of(settings: ServerSettings, workers: int, steps: int) -> Rule:
    """What the protocol goes by."""
    check_server(settings, workers)
    closes, ahead, alone = workers, 0, False
    if settings.mode == "first-k":
        closes = settings.first or workers
    if settings.mode == "bounded":
        ahead = settings.staleness or 0
    if settings.mode == "async":
        return Rule(workers, steps, 1, None, alone=True)
    return Rule(workers, steps, closes, ahead, alone)


def check_server(settings: ServerSettings, workers: int) -> None:
    """Refuse what so many workers cannot do."""
    if settings.mode == "first-k" and settings.first is None:
        raise InputError("layout.server.mode = 'first-k' needs to know how many; set layout.server.first")
    if settings.mode == "bounded" and settings.staleness is None:
        raise InputError("layout.server.mode = 'bounded' needs a bound; set layout.server.staleness")
    if settings.first is not None and settings.first > workers:
        raise InputError(f"layout.server.first = {settings.first} of {workers} workers; set it to {workers} at most")
    if settings.copies > settings.count:
        raise InputError(
            f"layout.server.copies = {settings.copies}, but there is {settings.count} server; set layout.server.count=2"
        )


def owners_of(servers: list[int], settings: ServerSettings) -> tuple[Owners, ...]:
    """Of pieces whose first server is given."""
    return tuple(
        Owners(tuple(f"s{(first + copy) % settings.count}" for copy in range(settings.copies))) for first in servers
    )
