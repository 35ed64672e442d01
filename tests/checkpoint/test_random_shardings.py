"""Any sharding is written and read by any other: each element by one rank, and back at its place."""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from random import Random

import pytest
import torch

from checkpoint.random_shardings import PADDING, HeldElements, local_indices, random_shape, random_sharding
from motet.checkpoint.background_writer import save_checkpoint
from motet.checkpoint.data_files import CheckpointShard
from motet.checkpoint.loading import load_checkpoint
from motet.checkpoint.manifest import CheckpointManifest, SavedBy
from motet.checkpoint.writers import parts_to_write
from motet.core.units import dtype_name
from motet.parallel.process.process_group import RankGroup
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.step_plan.plan import HeldRun
from ranks import Ranks

Sharding = list[HeldElements | None]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]
UNTOUCHED = 77.0


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values that differ, as far as the dtype has so many."""
    return ((torch.arange(prod(shape)) * 5 + 3) % 251).view(shape).to(dtype)


def held_values(held: HeldElements, values: torch.Tensor) -> torch.Tensor:
    """The elements of a rank, by the definition; zeros in padding."""
    indices = local_indices(held.spec)[held.start : held.stop]
    return torch.where(indices == PADDING, torch.zeros((), dtype=values.dtype), values.flatten()[indices])


def written_shards(
    shardings: dict[str, Sharding], values: dict[str, torch.Tensor], rank: int, max_numel: int
) -> dict[str, CheckpointShard]:
    """The parts of all tensors that a rank writes; padding holds numbers that must not be written."""
    runs = {}
    for name, sharding in shardings.items():
        if (mine := sharding[rank]) is not None:
            holders = tuple(other for other, held in enumerate(sharding) if held == mine)
            runs[name] = (HeldRun(*mine, holders), values[name].itemsize)
    shards = {}
    for name, (run, parts) in parts_to_write(runs, rank, max_numel=max_numel).items():
        held = held_values(HeldElements(*run[:3]), values[name])
        held[local_indices(run.spec)[run.start : run.stop] == PADDING] = True if held.dtype == torch.bool else 99
        shards[name] = CheckpointShard.from_values(held, run.spec, run.start, parts=parts)
    return shards


def empty_shards(
    shardings: dict[str, Sharding], values: dict[str, torch.Tensor], rank: int
) -> dict[str, CheckpointShard]:
    """Shards that a rank reads into."""
    held = {name: mine for name, sharding in shardings.items() if (mine := sharding[rank]) is not None}
    return {
        name: CheckpointShard.from_values(
            torch.full((mine.stop - mine.start,), UNTOUCHED).to(values[name].dtype), mine.spec, mine.start
        )
        for name, mine in held.items()
    }


def check_read(
    shards: dict[str, CheckpointShard], shardings: dict[str, Sharding], values: dict[str, torch.Tensor], rank: int
) -> None:
    for name, shard in shards.items():
        mine = shardings[name][rank]
        assert mine is not None
        assert torch.equal(shard.values, held_values(mine, values[name])), (name, mine)


def random_case(seed: int, ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, Sharding]]:
    """Some tensors and a sharding of each; cases of one seed have the same tensors, whatever the ranks."""
    draw = Random(seed)
    values = {f"t{i}": whole(random_shape(draw), draw.choice(DTYPES)) for i in range(4)}
    draw = Random(f"{seed} {ranks}")
    return values, {name: random_sharding(draw, tuple(tensor.shape), ranks) for name, tensor in values.items()}


def boxes_of(shard: CheckpointShard) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    """The place of each box in the whole tensor, and the memory that it is written from or read into."""
    for offsets, (lengths, _) in shard.boxes.items():
        place = tuple(slice(first, first + length) for first, length in zip(offsets, lengths, strict=True))
        yield place, shard.box_values(offsets)


@pytest.mark.parametrize("seed", range(150))
def test_each_element_is_written_once_and_read_back(seed: int) -> None:
    """A store of whole tensors stands for the files, with the boxes that ranks write and read."""
    draw = Random(f"ranks {seed}")
    writers, readers, max_numel = draw.randint(1, 9), draw.randint(1, 9), draw.choice([1, 4, 10**9])
    values, shardings = random_case(seed, writers)
    stored = {name: torch.zeros_like(tensor) for name, tensor in values.items()}
    times = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in values.items()}
    for rank in range(writers):
        for name, shard in written_shards(shardings, values, rank, max_numel).items():
            for place, written in boxes_of(shard):
                stored[name][place] = written
                times[name][place] += 1
    for name, count in times.items():
        assert (count == 1).all(), f"{name}: elements are written {count.unique().tolist()} times"
        assert torch.equal(stored[name], values[name])
    _, shardings = random_case(seed, readers)
    for rank in range(readers):
        shards = empty_shards(shardings, values, rank)
        for name, shard in shards.items():
            for place, target in boxes_of(shard):
                target.copy_(stored[name][place])
            shard.zero_padding()
        check_read(shards, shardings, values, rank)


def save_cases(group: RankGroup, folder: str, seeds: range) -> None:
    for seed in seeds:
        values, shardings = random_case(seed, group.world)
        shapes = {name: list(tensor.shape) for name, tensor in values.items()}
        dtypes = {name: dtype_name(tensor.dtype) for name, tensor in values.items()}
        manifest = CheckpointManifest(1, "", shapes, dtypes, SavedBy(group.world, 1, ""))
        shards = written_shards(shardings, values, group.rank, 5)
        save_checkpoint(Path(folder) / f"{seed}", shards, manifest, keep=1, group=group.process_group)


def load_cases(group: RankGroup, folder: str, seeds: range) -> None:
    for seed in seeds:
        values, shardings = random_case(seed, group.world)
        shards, shapes = empty_shards(shardings, values, group.rank), {n: list(v.shape) for n, v in values.items()}
        load_checkpoint(Path(folder) / f"{seed}" / "step-00000001", shards, group.process_group, shapes=shapes)
        check_read(shards, shardings, values, group.rank)


def test_so_it_is_through_files(ranks: Ranks, tmp_path: Path) -> None:
    seeds = range(12)
    ranks.run(4, save_cases, str(tmp_path), seeds)
    for world in (1, 3, 4):
        ranks.run(world, load_cases, str(tmp_path), seeds)


@pytest.mark.parametrize("sizes", [[1] * 40, [1000, 1, 1, 999, 3, 500, 500], [10**6, 7], [5, 4, 3, 2, 1]])
def test_ranks_with_the_same_copies_divide_the_bytes(sizes: list[int]) -> None:
    """The bound is that of any list scheduling: no rank has more than its share and one part."""
    runs = {f"t{i}": (HeldRun(ShardSpec.full((n,)), 0, n, (0, 1, 2)), 4) for i, n in enumerate(sizes)}
    written = [parts_to_write(runs, rank, max_numel=2000) for rank in range(3)]
    loads = [sum(4 * (stop - first) for _, parts in each.values() for first, stop in parts) for each in written]
    assert sum(loads) == 4 * sum(sizes) and max(loads) <= 4 * sum(sizes) / 3 + 4 * min(max(sizes), 2000)
