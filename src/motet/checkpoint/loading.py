"""Loading a checkpoint in place. No rank reads a tensor before all ranks know that every file is unchanged."""

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from motet.checkpoint.background_writer import on_all_ranks
from motet.checkpoint.data_files import CheckpointShard, read_data_files
from motet.checkpoint.manifest import CheckpointManifest, check_same_model, is_compression_state, read_manifest
from motet.checkpoint.tensor_index import TensorIndex, read_checkpoint
from motet.checkpoint.verification import verify_files


def read_shared_manifest(folder: Path, group: dist.ProcessGroup | None) -> CheckpointManifest:
    """The manifest of a checkpoint; all ranks refuse one that a rank cannot read. Every rank calls it."""
    return on_all_ranks(group, lambda: read_manifest(folder))


def load_checkpoint(
    folder: Path,
    shards: Mapping[str, CheckpointShard],
    group: dist.ProcessGroup | None,
    *,
    shapes: Mapping[str, list[int]] | None = None,
) -> CheckpointManifest:
    """Load shards in place; compression state of another layout is left unchanged.

    `shapes` are the tensors of the job's manifest, of which a rank may hold some; by default these shards.
    """

    def verify() -> tuple[CheckpointManifest, TensorIndex, dict[str, CheckpointShard]]:
        manifest, index = read_checkpoint(folder)
        stored = manifest.all_shapes
        loaded = {
            name: shard
            for name, shard in shards.items()
            if not is_compression_state(name) or stored.get(name) == list(shard.spec.shape)
        }
        own_shapes = {name: list(shard.spec.shape) for name, shard in loaded.items()}
        check_same_model(manifest, own_shapes | dict(shapes or {}), folder)
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        verify_files(folder, manifest, index, share=rank, shares=world)
        return manifest, index, loaded

    manifest, index, loaded = on_all_ranks(group, verify)
    on_all_ranks(group, lambda: read_data_files(folder, manifest, index, shards=loaded))
    for shard in loaded.values():
        shard.zero_padding()
    return manifest
