"""The `[layout.server]` section: a parameter server instead of all-reduce."""

from typing import Annotated, Literal

from pydantic import Field

from motet.collectives.compression.codecs import BlockwiseCodec, PowerSGDCodec, RandomKCodec, parse_codec
from motet.core.config_loading import FrozenSettings
from motet.core.errors import InputError, check_input
from motet.core.units import DTYPE_BYTES
from motet.parallel.parameter_server.protocol.messages import ConsistencyPolicy


class ParameterServerSettings(FrozenSettings):
    """Servers that hold the parameters, and how far workers may drift from each other."""

    count: Annotated[int, Field(ge=1, le=2**17)] = 1
    """Number of servers. Each holds a part of the parameters."""
    transport: Literal["point-to-point", "collectives"] = "point-to-point"
    """`point-to-point`: workers and servers exchange messages at any time. `collectives`, for `sync` alone: the first
    `count` ranks are the servers; gradients are reduced to them, and parameters are broadcast."""
    placement: Literal["dedicated", "colocated"] = "dedicated"
    """`dedicated`: each server is a process. `colocated`: servers are threads of the first `count` workers."""
    reduce_algorithm: str = "tree"
    """The algorithm of `collectives` that reduces gradients to a server: see `motet collectives list reduce`."""
    broadcast_algorithm: str = "tree"
    """The algorithm of `collectives` that sends parameters to all ranks."""
    mode: Literal["sync", "first-k", "bounded", "async"] = "sync"
    """Work items of an update. `sync`: all of a step. `first-k`: the first `first_k` of them. `bounded` and
    `async`: each work item makes its own. In `bounded` workers are `staleness` steps from each other at most."""
    first_k: Annotated[int, Field(ge=1)] | None = None
    """For `first-k`: the number of work items that make an update; later ones are dropped."""
    staleness: Annotated[int, Field(ge=0)] | None = None
    """For `bounded`: parameters of step t have all steps before t - staleness; 0 is `sync`."""
    copies: Literal[1, 2] = 1
    """Servers that hold each parameter slice. A push is acknowledged when all of them have it."""
    send_order: Literal["priority", "fifo"] = "priority"
    """`priority` sends first the slices that the next forward needs first, even while it sends another; `fifo` keeps
    the order."""
    compress_pushes: str | None = None
    """A codec for pushed gradients, such as `int8` or `topk:keep=0.01`. No compression by default."""
    compress_pulls: str | None = None
    """`int8`, `int4` or `float8` for pulled parameters. No compression by default."""
    error_feedback: bool = True
    """Add the compression error of a message to the next message about the same parameter slice."""
    learning_rate_scaling: Literal["none", "by-staleness"] = "none"
    """For `bounded` and `async`: `by-staleness` divides the learning rate of an update by its staleness in steps, if
    that is above 1."""
    delay_compensation: Annotated[float, Field(ge=0)] = 0.0
    """For `bounded` and `async`: add this times the squared gradient times the change of the parameters since the
    worker's pull (arXiv:1609.08326). 0 turns it off."""
    work_items_per_step: Annotated[int, Field(ge=1)] | None = None
    """Parts that a step is cut into; a free worker takes the next one. By default as many as workers at the start."""
    eviction_timeout_s: Annotated[float, Field(gt=0, le=1e6)] = 30.0
    """Seconds that a process may be unreachable before others take over its work. It can then join again."""
    max_process_restarts: Annotated[int, Field(ge=0)] = 3
    """Number of failed workers and servers that the launcher starts again, while the other processes continue."""
    snapshot_every: Annotated[int, Field(ge=0)] = 1
    """Updates between snapshots on disk, for a server without a second copy. 0: no snapshots."""
    listen: str | None = None
    """HOST:PORT of the coordinator, for workers that join while the run continues (`motet train --join`)."""
    slice_mib: Annotated[float, Field(gt=0, le=2**20)] = 4.0
    """Size of a parameter slice in MiB. Larger parameters are split, and smaller ones share a slice."""

    def slice_numel(self, dtype: str) -> int:
        """The most elements of a slice of parameters of this dtype."""
        return max(1, int(self.slice_mib * 2**20 / DTYPE_BYTES[dtype]))


def extra_process_count(settings: ParameterServerSettings) -> int:
    """Processes other than workers: the coordinator, and dedicated servers."""
    return 1 + (settings.count if settings.placement == "dedicated" else 0)


def consistency_policy(settings: ParameterServerSettings, workers: int, steps: int) -> ConsistencyPolicy:
    """The rules that the protocol applies in this mode."""
    check_server_settings(settings, workers)
    work_items = settings.work_items_per_step or workers
    if has_per_item_updates(settings):
        max_staleness = settings.staleness if settings.mode == "bounded" else None
        return ConsistencyPolicy(work_items, steps, 1, max_staleness, has_per_item_updates=True)
    quorum = settings.first_k if settings.mode == "first-k" else None
    return ConsistencyPolicy(work_items, steps, quorum or work_items, 0)


def has_per_item_updates(settings: ParameterServerSettings) -> bool:
    """Whether each work item makes an update of its gradient alone."""
    return settings.mode == "async" or (settings.mode == "bounded" and settings.staleness != 0)


def check_server_settings(settings: ParameterServerSettings, workers: int) -> None:
    """Raise InputError for settings that contradict each other or need more workers."""
    s, items = settings, settings.work_items_per_step or workers
    problems = {
        "mode = 'first-k' needs a number of work items; set layout.server.first_k": s.mode == "first-k"
        and s.first_k is None,
        "mode = 'bounded' needs a bound; set layout.server.staleness": s.mode == "bounded" and s.staleness is None,
        f"count = {s.count} servers on {workers} workers; with layout.server.placement = 'colocated' set layout.server."
        f"count={workers} at most, or start more workers": s.placement == "colocated" and s.count > workers,
        f"first_k = {s.first_k} of {items} work items; set it to {items} at most": (s.first_k or 0) > items,
        f"copies = {s.copies}, but there is {s.count} server; set layout.server.count=2": s.copies > s.count,
        f"delay_compensation = {s.delay_compensation:g} needs the parameters that each worker pulled, which second "
        "servers do not have; set layout.server.copies=1": s.delay_compensation and s.copies > 1,
    }
    for problem, is_wrong in problems.items():
        check_input(not is_wrong, f"layout.server.{problem}")
    for name, text in (("compress_pushes", s.compress_pushes), ("compress_pulls", s.compress_pulls)):
        if text:
            _check_codec(name, text, s.error_feedback)
    host = parse_address(s.listen, "layout.server.listen")[0] if s.listen is not None else ""
    problem = f"layout.server.listen = {s.listen!r} is not an address that others can connect to"
    check_input(host not in ("0.0.0.0", "::"), f"{problem}; give one of this machine's")


def _check_codec(name: str, text: str, error_feedback: bool) -> None:
    key = f"layout.server.{name} = {text!r}"
    try:
        codec = parse_codec(text)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None
    is_refused_pull = name == "compress_pulls" and not isinstance(codec, BlockwiseCodec)
    check_input(not is_refused_pull, f"{key} would leave most of a parameter out; use int8, int4 or float8")
    problem = "needs unsharded matrices, and servers have slices; use int8, int4, float8 or topk"
    check_input(not isinstance(codec, PowerSGDCodec), f"{key} {problem}")
    is_unbiased = isinstance(codec, RandomKCodec) and codec.unbiased
    remedy = "use randomk:unbiased=false, or layout.server.error_feedback=false"
    check_input(not (is_unbiased and error_feedback), f"{key}: error feedback would make its errors grow; {remedy}")


def parse_address(text: str, setting_name: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    is_address = host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16
    check_input(is_address, f"{setting_name} = {text!r} is not of the form HOST:PORT, such as 10.0.0.1:4000")
    return host.strip("[]"), int(port)
