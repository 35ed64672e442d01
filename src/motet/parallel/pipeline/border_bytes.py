"""Bytes that ranks of a pipeline send over the borders between stages, counted by the messages of a schedule."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from motet.core.units import DTYPE_BYTES
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.pipeline.pipeline_schedule import PipelineSchedule


@dataclass(frozen=True)
class BorderTraffic:
    """The messages of one micro-batch between a rank of a stage and one of the next stage."""

    activation_bytes: int
    gradient_bytes: int


def border_traffic(
    sharding: ModelSharding, sizes: Mapping[str, int], *, compute: str, slices: int = 1
) -> tuple[BorderTraffic, ...]:
    """The traffic of each border, for a micro-batch of these sizes.

    Each of `slices` tensor-parallel ranks sends a slice of a tensor that all of them have.
    """
    borders = []
    for wires in sharding.wires:
        sent = []
        for wire in wires:
            numel, dtype = prod(wire.shape(sizes)), compute if wire.dtype == "compute" else wire.dtype
            parts = slices if wire.is_replicated and numel % slices == 0 else 1
            sent.append((DTYPE_BYTES[dtype] * numel // parts, wire.needs_gradient))
        borders.append(BorderTraffic(sum(n for n, _ in sent), sum(n for n, needs in sent if needs)))
    return tuple(borders)


def sent_bytes_by_place(schedule: PipelineSchedule, borders: tuple[BorderTraffic, ...]) -> tuple[int, ...]:
    """The bytes that each rank of a pipeline sends in a step."""
    totals = []
    for actions in schedule.actions:
        forward = sum(borders[a.stage].activation_bytes for a in actions if a.kind == "send_activation")
        backward = sum(borders[a.stage - 1].gradient_bytes for a in actions if a.kind == "send_gradient")
        totals.append(forward + backward)
    return tuple(totals)


def sends_slices(setting: bool | None, *, degree: int, local_ranks: int, ranks: int) -> bool:
    """Whether `degree` tensor-parallel ranks send activations in slices.

    `setting` is `communication.slice_activations`. By default they do where stages are on several hosts of
    `local_ranks` ranks, and tensor-parallel ranks on one: then their links are the faster ones.
    """
    is_faster = local_ranks < ranks and local_ranks % degree == 0
    return degree > 1 and (is_faster if setting is None else setting)
