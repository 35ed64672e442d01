"""Data files are safetensors files that follow from the index byte by byte, and are written piece by piece."""

import errno
import os
import tracemalloc
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors import safe_open

from checkpoint.forged import load_state, save_state
from checkpoint.test_saving import STRANGE
from motet.checkpoint import data_files
from motet.checkpoint.data_files import CheckpointShard, DataFileWriter, boxes_of, write_data_file
from motet.checkpoint.safetensors_header import SAFETENSORS_DTYPES, DataBox
from motet.core.direct_io import ALIGNMENT, DirectFile
from motet.core.errors import CheckpointSaveError
from motet.parallel.shard_spec import ShardSpec


def _read(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # It is not a mapping


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
    )


def test_the_library_reads_tensors_of_any_kind(tmp_path: Path) -> None:
    tensors = _read(save_state(tmp_path, 1, STRANGE) / "rank-00000.safetensors")
    assert tensors.keys() == {name for name, tensor in STRANGE.items() if tensor.numel()}
    assert all(_same_bits(tensor, STRANGE[name].contiguous()) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES)
def test_the_library_reads_every_dtype_that_is_saved(tmp_path: Path, dtype: str) -> None:
    bits = torch.randint(2 if dtype == "bool" else 256, (3, 16), dtype=torch.uint8)
    tensor = bits.view(getattr(torch, dtype))
    where = save_state(tmp_path, 1, {"odd": torch.ones(3, dtype=torch.uint8), "x": tensor})
    assert _same_bits(_read(where / "rank-00000.safetensors")["x"], tensor)
    loaded = {"odd": torch.zeros(3, dtype=torch.uint8), "x": torch.zeros_like(tensor)}
    load_state(where, loaded)
    assert _same_bits(loaded["x"], tensor)


def test_other_dtypes_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointSaveError, match="could not save x: a checkpoint cannot hold complex128; give"):
        save_state(tmp_path, 1, {"x": torch.zeros(2, dtype=torch.complex128)})


def test_boxes_are_named_by_their_offsets(tmp_path: Path) -> None:
    tensor = torch.arange(60.0).view(6, 10)
    shards = {
        "a/w": CheckpointShard.from_values(tensor, ShardSpec.full((6, 10)), parts=[(0, 20), (43, 60)]),
        "a/w@0,0": CheckpointShard.from_tensor(torch.ones(2, 2)),
        "__metadata__": CheckpointShard.from_tensor(torch.ones(2)),
        "n@": CheckpointShard.from_tensor(torch.tensor(3)),
    }
    write_data_file(tmp_path / "x.safetensors", shards)
    tensors = _read(tmp_path / "x.safetensors")
    assert tensors.keys() == {"a/w@0,0", "a/w@4,3", "a/w@5,0", "a/w@0,0@0,0", "__metadata__@0", "n@@"}
    assert tensors["a/w@0,0"].equal(tensor[:2]) and tensors["a/w@4,3"].equal(tensor[4:5, 3:])
    assert tensors["a/w@5,0"].equal(tensor[5:])


@pytest.mark.parametrize("piece_bytes", [ALIGNMENT, 3 * ALIGNMENT, 2**22])
@pytest.mark.parametrize("seed", range(6))
def test_pieces_of_any_size_give_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, seed: int
) -> None:
    """The last ends before, at or behind a multiple of a page."""
    draw = Random(seed)
    state = {
        f"t{i}": torch.randn([draw.randint(1, 30) for _ in range(draw.randint(0, 3))]).to(
            draw.choice([torch.float64, torch.bfloat16])
        )
        for i in range(draw.randint(1, 12))
    }
    state["fill"] = torch.zeros(-sum(t.nbytes for t in state.values()) % ALIGNMENT + seed % 3, dtype=torch.uint8)
    monkeypatch.setattr(data_files, "PIECE_BYTES", piece_bytes)
    where = save_state(tmp_path, 1, state)
    loaded = {name: torch.full_like(tensor, 3) for name, tensor in state.items()}
    load_state(where, loaded)
    assert all(_same_bits(loaded[name], tensor) for name, tensor in state.items())
    assert all(_same_bits(tensor, state[name]) for name, tensor in _read(where / "rank-00000.safetensors").items())


def test_a_tensor_may_change_when_its_box_is_written_and_few_pieces_are_allocated(tmp_path: Path) -> None:
    tensor, parts = torch.empty(2**20), 16
    boxes = [DataBox("w", "float32", (parts, 2**20), (i, 0), (1, 2**20)) for i in range(parts)]
    sizes = list[int]()
    with pytest.MonkeyPatch.context() as patch:
        allocate = data_files.aligned_buffer
        patch.setattr(data_files, "aligned_buffer", lambda count: (sizes.append(count), allocate(count))[1])
        tracemalloc.start()
        with DataFileWriter(tmp_path / "x.safetensors", boxes) as writer:
            for i, box in enumerate(writer.boxes):
                tensor.fill_(i)
                writer.write_box(box, tensor.view(1, -1))
            tensor.fill_(-1)
            file = writer.finish()
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert sum(sizes) <= 4 * 2**22 and peak_bytes < 2**20
    tensors = _read(tmp_path / "x.safetensors")
    assert all(tensors[f"w@{i},0"].eq(i).all() for i in range(parts))
    assert file.size_bytes == (tmp_path / "x.safetensors").stat().st_size and len(file.chunks["w"]) == parts


def test_a_file_has_the_mode_of_the_umask_and_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "O_DIRECT", 0, raising=False)  # A filesystem without direct IO
    before = os.umask(0o027)
    try:
        write_data_file(tmp_path / "x.safetensors", {"x": CheckpointShard.from_tensor(torch.ones(2))})
    finally:
        os.umask(before)
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o640
    assert not caplog.records


@pytest.mark.parametrize("moment", [0, 2])
def test_an_error_of_a_thread_is_advised_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """It is raised while boxes are written, or at the end."""
    write, calls = DirectFile.write, list[int]()

    def fail(file: DirectFile, buffer: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > moment:
            raise OSError(errno.EDQUOT, "Disk quota exceeded", str(file.path))
        return write(file, buffer, offset)

    monkeypatch.setattr(data_files, "PIECE_BYTES", ALIGNMENT)
    monkeypatch.setattr(DirectFile, "write", fail)
    sentence = r"step-00000001 \(Disk quota exceeded\): .* the quota of this user is used up"
    with pytest.raises(CheckpointSaveError, match=sentence):
        save_state(tmp_path, 1, {"w": torch.ones(2**14)})
    assert not list(tmp_path.iterdir())


def test_boxes_are_written_in_their_order(tmp_path: Path) -> None:
    shards = {"a": CheckpointShard.from_tensor(torch.ones(2)), "b": CheckpointShard.from_tensor(torch.ones(3).double())}
    with DataFileWriter(tmp_path / "x.safetensors", boxes_of(shards)) as writer:
        assert [box.name for box in writer.boxes] == ["b", "a"]
        with pytest.raises(AssertionError):
            writer.write_box(writer.boxes[1], torch.ones(2))
        with pytest.raises(AssertionError):
            writer.finish()
