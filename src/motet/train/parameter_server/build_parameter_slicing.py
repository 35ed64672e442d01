"""The partition of the parameters and its checksum, which all processes of a run compute alike."""

from zlib import crc32

from torch import nn

from motet.collectives.compression.codec_registry import parse_codec
from motet.core.dtypes import DTYPE_BYTES
from motet.data.samples.loader import BatchLoader
from motet.parallel.data_parallel.buckets import build_buckets
from motet.parallel.data_parallel.zero import MIB
from motet.parallel.parameter_server.process.parameter_store import ParameterSlicingPlan, tensor_bytes
from motet.parallel.parameter_server.process.push_pull_compression import PushPullCompression
from motet.parallel.parameter_server.protocol.parameter_slices import partition_buckets
from motet.parallel.process.rank_consistency import module_signature
from motet.train.job import Job
from motet.train.optimizer.parameter_groups import group_parameters


def build_partition(module: nn.Module, job: Job) -> ParameterSlicingPlan:
    """The slices of the module's parameters; the same in every process."""
    server, recipe = job.layout.server, job.precision.resolved
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    groups = group_parameters(named, job.optimizer)
    group_indices = {name: index for index, members in enumerate(groups.values()) for name in members}
    max_numel = max(1, int(server.slice_mib * MIB / DTYPE_BYTES[recipe.compute]))
    buckets = build_buckets({name: (group_indices[name], p.numel()) for name, p in named.items()}, 1, max_numel)
    slices = partition_buckets(buckets, max_numel, server.count)
    codec_texts = server.compress_pushes, server.compress_pulls
    push_codec, pull_codec = (parse_codec(text) if text else None for text in codec_texts)
    compression = PushPullCompression(push_codec, pull_codec, server.error_feedback, job.run.seed)
    return ParameterSlicingPlan(buckets, slices, recipe, tuple(groups), compression, server.delay_compensation)


def build_handshake(
    job: Job, module: nn.Module, partition: ParameterSlicingPlan, *, data: BatchLoader | None = None
) -> dict[str, str]:
    """Checksums of what must be the same in every process."""
    server, p = job.layout.server, partition
    shared = p.buckets, p.slices, p.optimizer_groups, p.compression, p.delay_compensation, p.recipe
    layout = crc32(repr((shared, server.count, server.copies, server.mode, server.staleness)).encode())
    model = crc32(repr(module_signature(module)).encode())
    for parameter in module.parameters():
        if not parameter.requires_grad:
            model = crc32(tensor_bytes(parameter.detach().cpu().contiguous().view(-1)), model)
    return {"model": f"{model:08x}", "layout": f"{layout:08x}"} | ({"data": data.fingerprint} if data else {})
