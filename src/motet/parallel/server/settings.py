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
    shares: Annotated[int, Field(ge=1)] | None = None
    """Parts that the work of a step is cut into, for whoever is free; else as many as workers at the start."""
    patience_s: Annotated[float, Field(gt=0, le=1e6)] = 30.0
    """For so long a process may be out of reach, before others do its work and it has to join anew."""
    spares: Annotated[int, Field(ge=0)] = 3
    """So many workers and servers that end are started again, by whom they were started; the others go on meanwhile."""
    snapshot_every: Annotated[int, Field(ge=0)] = 1
    """Updates after which a server without a second one keeps on disk what it has, for whoever takes its place;
    0: never."""
    listen: str | None = None
    """HOST:PORT at which the desk can be reached by workers that join while the run goes on (`motet train --join`)."""
    piece_mib: Annotated[float, Field(gt=0, le=2**20)] = 4.0
    """What travels as one, in MiB; larger parameters are cut, and smaller ones go together."""


def rule_of(settings: ServerSettings, workers: int, steps: int) -> Rule:
    """What the protocol goes by."""
    check_server(settings, workers)
    shares = settings.shares or workers
    closes, ahead = shares, 0
    if settings.mode == "first-k":
        closes = settings.first or shares
    if settings.mode == "bounded":
        ahead = settings.staleness or 0
    if settings.mode == "async":
        return Rule(shares, steps, 1, None, alone=True)
    return Rule(shares, steps, closes, ahead)


def check_server(settings: ServerSettings, workers: int) -> None:
    """Refuse what so many workers cannot do."""
    if settings.mode == "first-k" and settings.first is None:
        raise InputError("layout.server.mode = 'first-k' needs to know how many; set layout.server.first")
    if settings.mode == "bounded" and settings.staleness is None:
        raise InputError("layout.server.mode = 'bounded' needs a bound; set layout.server.staleness")
    shares = settings.shares or workers
    if settings.first is not None and settings.first > shares:
        raise InputError(f"layout.server.first = {settings.first} of {shares} shares; set it to {shares} at most")
    if settings.copies > settings.count:
        raise InputError(
            f"layout.server.copies = {settings.copies}, but there is {settings.count} server; set layout.server.count=2"
        )
    if settings.listen is not None:
        address_of(settings.listen, "layout.server.listen")


def owners_of(servers: list[int], settings: ServerSettings) -> tuple[Owners, ...]:
    """Of pieces whose first server is given."""
    return tuple(
        Owners(tuple(f"s{(first + copy) % settings.count}" for copy in range(settings.copies))) for first in servers
    )


def address_of(text: str, what: str) -> tuple[str, int]:
    """Of HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise InputError(f"{what} = {text!r} is not of the form HOST:PORT, such as 10.0.0.1:4000")
    return host.strip("[]"), int(port)
