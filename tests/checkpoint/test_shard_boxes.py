"""Runs of elements as boxes of the whole, and their way through a checkpoint."""

from math import prod
from pathlib import Path

import pytest
import torch

from motet.checkpoint.manifest import CheckpointManifest
from motet.checkpoint.save_and_load import load_checkpoint, save_checkpoint
from motet.checkpoint.shard_boxes import CheckpointShard
from motet.parallel.process.process_group import RankGroup
from motet.parallel.shard_spec import ShardSpec
from ranks import Ranks


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 5, 1), (2, 2, 2, 2), (3, 1, 2)])
def test_boxes_hold_the_elements_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            found = [box for box, _ in ShardSpec.full(shape).boxes(start, stop)]
            cut = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten() for box in found]
            assert torch.cat([*cut, whole.flatten()[:0]]).tolist() == list(range(start, stop))
            assert len(found) <= max(1, 2 * len(shape) - 1)


SAVED = {"a": (5, 7), "b": (3, 2, 4), "c": (11,), "d": (2,)}


def _whole(name: str) -> torch.Tensor:
    return torch.arange(prod(SAVED[name]), dtype=torch.float32).view(SAVED[name]) + ord(name)


def _pieces(group: RankGroup, filled: bool) -> dict[str, torch.Tensor]:
    """Cut into runs of unequal length; of `d` all is on the last rank."""
    made: dict[str, torch.Tensor] = {}
    for name, shape in SAVED.items():
        total = prod(shape)
        cuts = [0 if name == "d" else total * r * r // group.world**2 for r in range(group.world)] + [total]
        run = _whole(name).flatten()[cuts[group.rank] : cuts[group.rank + 1]]
        values = run.clone() if filled else torch.zeros_like(run)
        made[name] = CheckpointShard.from_values(values, shape, cuts[group.rank])
    return made


def save(group: RankGroup, folder: str, in_pieces: bool) -> None:
    state = _pieces(group, filled=True) if in_pieces else {name: _whole(name) for name in SAVED}
    shapes = {name: list(t.size()) for name, t in state.items()}
    manifest = CheckpointManifest(1, 1, 1, torch.__version__, "x", shapes, dict.fromkeys(state, "float32"))
    save_checkpoint(Path(folder), state, manifest, keep=1, group=group.process_group)


def load_pieces(group: RankGroup, where: str) -> None:
    state = _pieces(group, filled=False)
    load_checkpoint(Path(where), state, group.process_group)
    for name, wanted in _pieces(group, filled=True).items():
        assert torch.equal(state[name].as_subclass(torch.Tensor), wanted.as_subclass(torch.Tensor)), name


def load_whole(group: RankGroup, where: str) -> None:
    state = {name: torch.zeros(shape) for name, shape in SAVED.items()}
    load_checkpoint(Path(where), state, group.process_group)
    for name, tensor in state.items():
        assert torch.equal(tensor, _whole(name)), name


def test_pieces_of_one_world_are_read_by_another(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3, save, str(tmp_path), True)
    where = str(tmp_path / "step-00000001")
    assert Path(where).is_dir(), list(tmp_path.iterdir())
    for world in (2, 3):
        ranks.run(world, load_pieces, where)
    ranks.run(1, load_whole, where)
    ranks.run(2, load_whole, where)


def test_a_whole_is_read_in_pieces(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save, str(tmp_path), False)
    ranks.run(3, load_pieces, str(tmp_path / "step-00000001"))
