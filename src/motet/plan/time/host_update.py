"""The update of optimizer states that lie on the host or on disk.

Sums of gradients travel to the host when they are reduced. When the norm of all gradients is known, the parameters of a
rank are updated part by part, in the order in which the next forward uses them: a part is read from disk, updated by
the cores of the host, written, sent to the device, and gathered from the other ranks. A part is a bucket or a block.
The link, the cores and the disk each do one thing after the other; a disk reads the next part before it writes one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from motet.cluster.cluster_settings import HostSettings
from motet.core.errors import InputError


@dataclass(frozen=True)
class HostRates:
    """Bytes per second that one rank gets while all ranks of its host update their states."""

    link_Bps: float  # noqa: N815 - a unit; in one direction
    update_Bps: float  # noqa: N815 - a unit; of masters and moments
    disk_Bps: float | None  # noqa: N815 - a unit; reads and writes together

    @classmethod
    def for_rank(cls, host: HostSettings | None, ranks_per_host: int, *, on_disk: bool) -> "HostRates":
        """The share of a rank in the figures of a cluster file."""
        if host is None:
            raise InputError(
                "states that lie on the host or on disk take a time that this cluster does not tell: its file has no "
                "section [host]; add one, or set memory.optimizer=device"
            )
        if on_disk and host.scratch_Bps is None:
            raise InputError(
                "states on disk take a time that this cluster does not tell: its section [host] has no scratch_Bps; "
                "add it, or set memory.optimizer=host"
            )
        disk_Bps = None if host.scratch_Bps is None else host.scratch_Bps.value / ranks_per_host  # noqa: N806 - a unit
        return cls(host.link_Bps.value, host.update_Bps.value / ranks_per_host, disk_Bps)


class PartSeconds(NamedTuple):
    """Seconds of a part of the parameters on each resource."""

    send: float = 0.0  # Sums of gradients to the host
    read: float = 0.0
    update: float = 0.0
    write: float = 0.0
    receive: float = 0.0  # Values to the device
    gather: float = 0.0  # Values to the other ranks


class Span(NamedTuple):
    """The start and the end of a transfer or a computation."""

    start: float
    stop: float


class PartSpans(NamedTuple):
    """The spans of a part, from the moment in which the norm of all gradients is known."""

    read: Span
    update: Span
    write: Span
    receive: Span
    gather: Span


class _Resource:
    """Does one thing after the other."""

    def __init__(self) -> None:
        self._free = 0.0

    def take(self, ready_s: float, seconds: float) -> Span:
        """The span of the next thing, which is ready at a time."""
        start = max(self._free, ready_s)
        self._free = start + seconds
        return Span(start, self._free)


def simulate_sends(parts: Sequence[PartSeconds], ready: Sequence[float]) -> list[Span]:
    """The spans in which sums travel to the host, in the order of backward; `ready` is when each is reduced."""
    link = _Resource()
    return [link.take(at, part.send) for part, at in zip(parts, ready, strict=True)]


def simulate_update(parts: Sequence[PartSeconds]) -> list[PartSpans]:
    """The spans of the parts in the order of the next forward."""
    disk, cores, link, network = (_Resource() for _ in range(4))
    spans, reads = list[PartSpans](), [disk.take(0.0, part.read) for part in parts[:1]]
    for index, part in enumerate(parts):
        reads += [disk.take(0.0, following.read) for following in parts[index + 1 : index + 2]]
        update = cores.take(reads[index].stop, part.update)
        # A part is updated in pieces: its last values exist when nearly all of it is written
        write = disk.take(update.stop, part.write)
        receive = link.take(write.stop, part.receive)
        spans.append(PartSpans(reads[index], update, write, receive, network.take(receive.stop, part.gather)))
    return spans


@dataclass(frozen=True)
class HostUpdate:
    """The update of a rank, and the seconds of it that no computation hides."""

    parts: Sequence[PartSeconds]  # In the order of the next forward
    reduced_s: float  # The last reduction ends, from the start of backward
    sends: Sequence[Span]  # In the order of backward, from its start
    spans: Sequence[PartSpans]
    exposed_send_s: float  # After the last reduction
    exposed_update_s: float
    hides_work: bool = False  # The next step hides all that the host does, and the values that come up are exposed

    @property
    def exposed_s(self) -> float:
        return self.exposed_send_s + self.exposed_update_s

    @property
    def busy_s(self) -> Mapping[str, float]:
        """Seconds of each resource in an update; the largest is the least time of a step that hides all of them."""
        totals = PartSeconds(*map(sum, zip(*self.parts, strict=True)))
        link = max(totals.send, totals.receive)
        return {"host cores": totals.update, "disk": totals.read + totals.write, "host link": link}

    @property
    def seconds_by_resource(self) -> Mapping[str, float]:
        """The exposed seconds; those of the update count for the resource that is busy longest."""
        slowest = "host link" if self.hides_work else max(self.busy_s, key=self.busy_s.__getitem__)
        parts = {"host link": self.exposed_send_s}
        return parts | {slowest: parts.get(slowest, 0.0) + self.exposed_update_s}


def simulate_host_update(
    parts: Sequence[PartSeconds],
    *,
    reduced: Sequence[float],
    needed: Sequence[float],
    norm_s: float,
    delay_s: float | None = None,
) -> HostUpdate:
    """The update of parts, in the order of the next forward.

    `reduced` are the times at which gradients are complete, in the order of backward, and `needed` the times at which
    parts must be there, from the moment in which the norm is known. A delayed update has the seconds `delay_s` of the
    next step for the work of the host; all values travel at its end, or in the forward that follows.
    """
    sends, hides_work = simulate_sends(parts[::-1], reduced), False
    if delay_s is None:
        spans = simulate_update(parts)
    else:
        at_work = simulate_update([part._replace(receive=0.0, gather=0.0) for part in parts])
        end_s = max(delay_s, at_work[-1].write.stop)
        hides_work = end_s <= delay_s
        values = simulate_update([PartSeconds(receive=part.receive, gather=part.gather) for part in parts])
        travel = [PartSpans(*(Span(start + end_s, stop + end_s) for start, stop in each)) for each in values]
        spans = [a._replace(receive=b.receive, gather=b.gather) for a, b in zip(at_work, travel, strict=True)]
        needed = [delay_s + at for at in needed]
    late_s = max(span.gather.stop - at for span, at in zip(spans, needed, strict=True))
    exposed_send_s = max(0.0, sends[-1].stop - reduced[-1] - norm_s)
    return HostUpdate(parts, reduced[-1], sends, spans, exposed_send_s, max(0.0, late_s), hides_work)
