"""The `[layout.server]` section: a parameter server instead of all-reduce."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from motet.collectives.compression.codec_base import BlockwiseCodec, Codec
from motet.collectives.compression.codec_registry import parse_codec
from motet.collectives.compression.powersgd import PowerSGDCodec
from motet.collectives.compression.random_k import RandomKCodec
from motet.core.base_settings import FrozenSettings
from motet.core.errors import InputError
from motet.parallel.parameter_server.protocol.messages import ConsistencyPolicy, ParameterReplicas


class ParameterServerSettings(FrozenSettings):
    """Servers that keep the parameters, and how far workers may run apart."""

    count: Annotated[int, Field(ge=1)] = 1
    """Servers, each with its part of the parameters."""
    transport: Literal["point-to-point", "collectives"] = "point-to-point"
    """`messages` between workers and servers, any of them at any time; or, for `sync`, `programs` of the library of
    collectives, the first `count` ranks being the servers: gradients are reduced to them, parameters broadcast."""
    placement: Literal["dedicated", "colocated"] = "dedicated"
    """Servers are processes of their own, or threads of the first `count` workers."""
    reduce_algorithm: str = "tree"
    """The algorithm by which `programs` bring the gradients to a server, of `motet collectives list reduce`."""
    broadcast_algorithm: str = "tree"
    """That by which they bring parameters to all, of `motet collectives list broadcast`."""
    mode: Literal["sync", "first-k", "bounded", "async"] = "sync"
    """When an update is made: of all shares of a step (`sync`), of the first `first` of them (`first-k`), or of every
    share by itself, with workers at most `staleness` steps apart (`bounded`) or as far as they come (`async`)."""
    first_k: Annotated[int, Field(ge=1)] | None = None
    """Of `first-k`: how many workers' gradients make a step; those that come later are dropped."""
    staleness: Annotated[int, Field(ge=0)] | None = None
    """Of `bounded`: step t is computed with all of the steps before t - staleness at least; 0 is `sync`."""
    copies: Literal[1, 2] = 1
    """Servers that keep each part; a push is acknowledged when all of them have it."""
    send_order: Literal["priority", "fifo"] = "priority"
    """What is sent first of what waits: what the next forward needs first, which overtakes what is underway; or what
    came first."""
    compress_pushes: str | None = None
    """A codec for gradients that are pushed, such as `int8` or `topk:keep=0.01`; as they are when not given."""
    compress_pulls: str | None = None
    """`int8`, `int4` or `float8`, for parameters that are pulled; as they are when not given."""
    error_feedback: bool = True
    """Give what compression lost of a piece again with the next message about it."""
    learning_rate_scaling: Literal["none", "by-staleness"] = "none"
    """Of `bounded` and `async`: divide the learning rate of an update by its staleness in steps, where that is more
    than 1."""
    delay_compensation: Annotated[float, Field(ge=0)] = 0.0
    """Of `bounded` and `async`: correct a gradient by so much of its square times what has become of the parameters
    since they were pulled (arXiv:1609.08326); 0: not at all."""
    work_items_per_step: Annotated[int, Field(ge=1)] | None = None
    """Parts that the work of a step is cut into, for whoever is free; else as many as workers at the start."""
    eviction_timeout_s: Annotated[float, Field(gt=0, le=1e6)] = 30.0
    """For so long a process may be out of reach, before others do its work and it has to join anew."""
    max_process_restarts: Annotated[int, Field(ge=0)] = 3
    """So many workers and servers that end are started again, by whom they were started; the others go on meanwhile."""
    snapshot_every: Annotated[int, Field(ge=0)] = 1
    """Updates after which a server without a second one keeps on disk what it has, for whoever takes its place;
    0: never."""
    listen: str | None = None
    """HOST:PORT at which the desk can be reached by workers that join while the run goes on (`motet train --join`)."""
    slice_mib: Annotated[float, Field(gt=0, le=2**20)] = 4.0
    """What travels as one, in MiB; larger parameters are cut, and smaller ones go together."""


def extra_process_count(settings: ParameterServerSettings) -> int:
    """Processes beside the workers: the desk, and servers of their own."""
    return 1 + (settings.count if settings.placement == "dedicated" else 0)


def consistency_policy(settings: ParameterServerSettings, workers: int, steps: int) -> ConsistencyPolicy:
    """What the protocol goes by."""
    check_server_settings(settings, workers)
    work_items = settings.work_items_per_step or workers
    if has_per_item_updates(settings):
        return ConsistencyPolicy(
            work_items, steps, 1, settings.staleness if settings.mode == "bounded" else None, has_per_item_updates=True
        )
    return ConsistencyPolicy(
        work_items, steps, settings.first_k if settings.mode == "first-k" and settings.first_k else work_items, 0
    )


def has_per_item_updates(settings: ParameterServerSettings) -> bool:
    """Each share is an update by itself."""
    return settings.mode == "async" or (settings.mode == "bounded" and settings.staleness != 0)


def check_server_settings(settings: ParameterServerSettings, workers: int) -> None:
    """Refuse what so many workers cannot do."""
    if settings.mode == "first-k" and settings.first_k is None:
        raise InputError("layout.server.mode = 'first-k' needs to know how many; set layout.server.first_k")
    if settings.mode == "bounded" and settings.staleness is None:
        raise InputError("layout.server.mode = 'bounded' needs a bound; set layout.server.staleness")
    if settings.placement == "colocated" and settings.count > workers:
        raise InputError(
            f"layout.server.count = {settings.count} servers on {workers} workers; with layout.server.placement = "
            f"'workers' set layout.server.count={workers} at most, or start more workers"
        )
    work_items = settings.work_items_per_step or workers
    if settings.first_k is not None and settings.first_k > work_items:
        raise InputError(
            f"layout.server.first_k = {settings.first_k} of {work_items} shares; set it to {work_items} at most"
        )
    if settings.copies > settings.count:
        raise InputError(
            f"layout.server.copies = {settings.copies}, but there is {settings.count} server; set layout.server.count=2"
        )
    if settings.delay_compensation and settings.copies > 1:
        raise InputError(
            f"layout.server.delay_compensation = {settings.delay_compensation:g} needs what each worker has pulled, "
            "which second servers do not know; set layout.server.copies=1"
        )
    check_compression(settings)
    if settings.listen is not None:
        host, _ = parse_address(settings.listen, "layout.server.listen")
        if host in ("0.0.0.0", "::"):
            raise InputError(
                f"layout.server.listen = {settings.listen!r} is no address that others could be told; give one of this "
                "machine's"
            )


@dataclass(frozen=True)
class PushPullCompression:
    push_codec: Codec | None = None
    pull_codec: Codec | None = None
    has_error_feedback: bool = True
    seed: int = 0


NO_COMPRESSION = PushPullCompression()


def compression_from_settings(settings: ParameterServerSettings, seed: int) -> PushPullCompression:
    push_codec, pull_codec = (
        parse_codec(text) if text else None for text in (settings.compress_pushes, settings.compress_pulls)
    )
    return PushPullCompression(push_codec, pull_codec, settings.error_feedback, seed)


def check_compression(settings: ParameterServerSettings) -> None:
    """Refuse codecs that do not exist, or not for this."""
    for name in ("compress_pushes", "compress_pulls"):
        text = getattr(settings, name)
        key = f"layout.server.{name} = {text!r}"
        try:
            codec = parse_codec(text) if text else None
        except InputError as error:
            raise InputError(f"{key}: {error}") from None
        if name == "compress_pulls" and codec is not None and not isinstance(codec, BlockwiseCodec):
            raise InputError(f"{key} would leave most of a parameter out; use int8, int4 or float8")
        if isinstance(codec, PowerSGDCodec):
            raise InputError(f"{key} takes whole matrices, and servers have pieces; use int8, int4, float8 or topk")
        if isinstance(codec, RandomKCodec) and codec.unbiased and settings.error_feedback:
            raise InputError(
                f"{key}: error feedback would make its errors grow; use randomk:unbiased=false, or "
                "layout.server.error_feedback=false"
            )


def assign_replicas(primary_servers: list[int], settings: ParameterServerSettings) -> tuple[ParameterReplicas, ...]:
    """Of pieces whose first server is given."""
    return tuple(
        ParameterReplicas(tuple(f"s{(first + copy) % settings.count}" for copy in range(settings.copies)))
        for first in primary_servers
    )


def parse_address(text: str, setting_name: str) -> tuple[str, int]:
    """Of HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise InputError(f"{setting_name} = {text!r} is not of the form HOST:PORT, such as 10.0.0.1:4000")
    return host.strip("[]"), int(port)
