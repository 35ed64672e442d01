"""Snapshots of a server are data: they come back bit by bit, and anything else is refused with a sentence."""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.parallel.parameter_server.process.server_process import (
    ServerSnapshots,
    deserialize_tensors,
    serialize_tensors,
)
from refusals import refused

STATE = {
    "master": torch.arange(6.0, dtype=torch.float64) / 3,
    "step": torch.tensor(3.0),
    "pull/message": torch.arange(6).to(torch.uint8),
    "published": (torch.arange(6.0) / 7).bfloat16(),
}


@contextmanager
def written_snapshot(folder: Path) -> Iterator[Path]:
    snapshots = ServerSnapshots(folder, 1)
    snapshots.save(4, 17, STATE)
    snapshots._writer.shutdown()
    (path,) = folder.iterdir()
    yield path


def test_a_snapshot_comes_back_bit_by_bit(tmp_path: Path) -> None:
    with written_snapshot(tmp_path):
        ((slice_id, (version, tensors)),) = ServerSnapshots(tmp_path, 1).load_all().items()
    assert (slice_id, version) == (4, 17) and tensors.keys() == STATE.keys()
    assert all(tensors[name].equal(tensor) and tensors[name].dtype == tensor.dtype for name, tensor in STATE.items())


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


def test_a_file_that_is_no_snapshot_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with written_snapshot(tmp_path / "servers") as path:
        whole = path.read_bytes()
        size = (2**62).to_bytes(8, "little")
        for content in (pickle.dumps(_Evil()), b"", whole[:-1], whole + b"x", size + whole[8:], whole[:60]):
            path.write_bytes(content)
            refused("the state of a slice is damaged .*; start the run again", ServerSnapshots(path.parent, 1).load_all)
        for tensors in ({"master": torch.ones(2)}, {"version": torch.ones(2)}, {"version": torch.ones(1)}):
            path.write_bytes(serialize_tensors(tensors))
            refused("snapshot .*4.safetensors is damaged; remove it", ServerSnapshots(path.parent, 1).load_all)
    assert not Path("pwned").exists()


def test_a_serialized_view_is_its_own_values() -> None:
    (loaded,) = deserialize_tensors(serialize_tensors({"view": torch.arange(12.0).view(3, 4).T[1:3]})).values()
    assert loaded.tolist() == [[1, 5, 9], [2, 6, 10]]
