"""Gives the parameters of a rank their initial values: only the elements that it holds are read."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from motet.collectives.execute.api import broadcast
from motet.models.meta_parameters import set_values
from motet.models.parameter_values import BoxReader, ParameterValues
from motet.models.weight_init import TensorBox
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.process.process_group import RankGroup
from motet.parallel.shard_spec import ShardSpec

READ_NUMEL = 1 << 20  # Elements that are read together, so that a large parameter is never complete in memory


class BroadcastValues:
    """The values of the first rank's module. A rank has one complete parameter at a time."""

    fingerprint = ""

    def __init__(self, module: nn.Module, group: RankGroup) -> None:
        where = None if group.rank == 0 else "meta"  # The values of other ranks need not be kept
        self._tensors, self._group = {n: p.detach().to(where) for n, p in module.named_parameters()}, group

    def open(self, name: str) -> BoxReader:
        tensor, group = self._tensors.pop(name), self._group
        if group.rank != 0:
            tensor = torch.empty_like(tensor, device=group.device)
        tensor = tensor.contiguous()
        broadcast(tensor, group)

        def read(box: TensorBox) -> Tensor:
            offsets, lengths = box
            return tensor[tuple(slice(first, first + n) for first, n in zip(offsets, lengths, strict=True))]

        return read


def fill_parameters(
    module: nn.Module,
    shards: Iterable[tuple[str, LocalShard]],
    specs: Mapping[str, ShardSpec],
    *,
    values: ParameterValues,
    device: torch.device,
) -> None:
    """Fill the shards of parameters, and all other parameters of the module; `specs` says what the rank holds."""
    by_name: dict[str, list[LocalShard]] = {}
    for name, shard in shards:
        by_name.setdefault(name, []).append(shard)
    for name, parameter in module.named_parameters():
        if name not in by_name and name in specs:
            set_values(parameter, torch.zeros(parameter.shape, dtype=parameter.dtype, device=device))
            by_name[name] = [LocalShard(parameter.shape, 0, parameter.detach().view(-1))]
        read = values.open(name)
        if name in specs:
            fill_shards(by_name[name], specs[name], read)


def fill_shards(shards: Sequence[LocalShard], spec: ShardSpec, read: BoxReader) -> None:
    """Fill runs of one local tensor, whose elements are read once for all of them. Padding gets zeros, and a tensor on
    the meta device nothing."""
    if all(shard.values.is_meta for shard in shards):
        return
    bounds = [(shard.start, shard.start + shard.values.numel()) for shard in shards]
    for shard in shards if spec.padding else ():
        shard.values.zero_()
    last = max(stop for _, stop in bounds)
    for start in range(min(start for start, _ in bounds), last, READ_NUMEL):
        for box, local in spec.boxes(start, min(start + READ_NUMEL, last)):
            values = read(box).reshape(-1)
            for shard, (first, stop) in zip(shards, bounds, strict=True):
                low, high = max(first, local.start), min(stop, local.stop)
                if low < high:
                    shard.values[low - first : high - first] = values[low - local.start : high - local.start]
