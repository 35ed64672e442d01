"""The reader of checkpoints gives what was saved, reads what it needs, and refuses what is not there."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import motet
from checkpoint.forged import save_state
from checkpoint.random_shardings import random_shape, random_sharding
from checkpoint.test_random_shardings import written_shards
from checkpoint.test_saving import STRANGE
from motet.checkpoint import reader
from motet.checkpoint.background_writer import save_checkpoint
from motet.checkpoint.manifest import CheckpointManifest, SavedBy
from motet.core.units import dtype_name
from refusals import refused


def test_every_tensor_comes_back_with_its_bits(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    where = save_state(tmp_path / "run" / "checkpoints", 7, STRANGE)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints", where, str(where)):
        with motet.open_checkpoint(path) as checkpoint:
            assert checkpoint.step == 7 and {*checkpoint.names} == {*STRANGE} and checkpoint.path == where
            for name, tensor in STRANGE.items():
                value = checkpoint[name]
                assert value.dtype == checkpoint.dtype(name) == tensor.dtype
                assert tuple(value.shape) == checkpoint.shape(name) == tuple(tensor.shape) and value.equal(tensor)
    assert checkpoint.size_bytes == sum(tensor.nbytes for tensor in STRANGE.values())
    assert "flags" in checkpoint and "more" not in checkpoint


def test_the_newest_of_a_run_is_opened(tmp_path: Path) -> None:
    for step in (2, 10):
        save_state(tmp_path / "checkpoints", step, {"w": torch.tensor(step)})
    assert motet.open_checkpoint(tmp_path)["w"] == 10
    assert motet.open_checkpoint(tmp_path / "checkpoints" / "step-00000002")["w"] == 2


def _random_index(draw: Random, length: int) -> Any:
    first, stop = (draw.choice([None, draw.randint(-length - 1, length + 1)]) for _ in range(2))
    indices = [slice(first, stop, draw.choice([None, 1, 2, 3]))]
    return draw.choice([*indices, *([draw.randrange(-length, length)] if length else [])])


@pytest.mark.parametrize("piece_bytes", [8, 64, 2**22])
@pytest.mark.parametrize("seed", range(20))
def test_slices_are_those_of_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, piece_bytes: int
) -> None:
    """Boxes of any form, pieces smaller than a row, and all indices that go forward."""
    draw = Random(seed)
    values = {f"t{i}": torch.randn(random_shape(draw)) for i in range(4)}
    shapes = {name: list(tensor.shape) for name, tensor in values.items()}
    shardings = {name: random_sharding(draw, tuple(shape), 1) for name, shape in shapes.items()}
    stored = CheckpointManifest(
        1, "", shapes, {name: dtype_name(each.dtype) for name, each in values.items()}, SavedBy(1, 1, "")
    )
    where = save_checkpoint(tmp_path, written_shards(shardings, values, 0, 5), stored, keep=1, group=None)
    monkeypatch.setattr(reader, "PIECE_BYTES", piece_bytes)
    checkpoint = motet.open_checkpoint(where)
    for name, tensor in values.items():
        assert checkpoint[name].equal(tensor)
        for _ in range(12):
            first, last = sorted(draw.randint(0, tensor.ndim) for _ in range(2))
            indices = [_random_index(draw, length) for length in tensor.shape]
            indices = draw.choice([indices, indices[:first], [*indices[:first], ..., *indices[last:]]])
            value = checkpoint[(name, *indices)]
            assert value.equal(tensor[tuple(indices)]) and value.shape == tensor[tuple(indices)].shape, indices


def test_only_the_rows_that_are_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = save_state(tmp_path, 1, {"w": torch.arange(80_000.0).view(1000, 80), "v": torch.ones(10**6)})
    counts, read = list[int](), reader._ChunkPart._read_elements
    monkeypatch.setattr(
        reader._ChunkPart, "_read_elements", lambda part, first, n: (counts.append(n), read(part, first, n))[1]
    )
    assert motet.open_checkpoint(where)["w", 10:13, 5].tolist() == [805, 885, 965]
    assert counts == [3 * 80]


def test_a_box_that_is_read_completely_has_its_checksum(tmp_path: Path) -> None:
    where = save_state(tmp_path, 1, {"w": torch.ones(4, 4)})
    file = where / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + bytes(4))
    checkpoint = motet.open_checkpoint(where)
    assert checkpoint["w", :3].eq(1).all()
    refused("is damaged .rank-00000.safetensors has changed", checkpoint.__getitem__, "w")


def test_requests_that_cannot_be_met_are_refused(tmp_path: Path) -> None:
    checkpoint = motet.open_checkpoint(save_state(tmp_path / "run", 1, {"master/w": torch.ones(4, 3)}))
    for key, sentence in (
        ("master/v", "holds no tensor 'master/v'; the nearest names are master/w"),
        (("master/w", 4), "master/w: index 4 must be in the 4 of dimension 0"),
        (("master/w", 0, 0, 0), "master/w has 2 dimensions, not 3"),
        (("master/w", ..., 0, 0, 0), "master/w has 2 dimensions, not 3"),
        (("master/w", slice(None, None, -1)), "must be a number, a slice that goes forward or ..."),
        (("master/w", "a"), "index 'a' must be a number"),
        ((0,), "the name of a tensor must come first"),
    ):
        refused(sentence, checkpoint.__getitem__, key)
    refused("holds no checkpoint; give a run", motet.open_checkpoint, tmp_path / "nothing")
