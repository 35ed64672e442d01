"""Checkpoints are whole or not there."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

from motet.checkpoint.manifest import CheckpointManifest, SavedBy, complete_checkpoints, read_manifest
from motet.checkpoint.save_and_load import load_checkpoint, save_checkpoint
from motet.checkpoint.shard_boxes import CheckpointShard
from motet.core.dtypes import dtype_name
from motet.core.errors import CheckpointSaveError, InputError
from motet.parallel.process.process_group import RankGroup
from motet.parallel.shard_spec import ShardSpec
from ranks import Ranks
from refusals import refused


def _state(value: float = 1.0, size: int = 6) -> dict[str, torch.Tensor]:
    half = torch.ones(3).bfloat16() * value
    return {"a/weight": torch.full((size, 2), value), "b": torch.tensor(value), "c/half": half}


def _save(folder: Path, step: int, state: dict[str, torch.Tensor], group: RankGroup | None = None) -> Path:
    """The first rank writes everything."""
    shapes, dtypes = {n: list(t.shape) for n, t in state.items()}, {n: dtype_name(t.dtype) for n, t in state.items()}
    manifest = CheckpointManifest(step, "data", shapes, dtypes, SavedBy(1, 1, torch.__version__))
    shards = _shards(state) if group is None or group.rank == 0 else {}
    return save_checkpoint(folder, shards, manifest, keep=2, group=group.process_group if group else None)


def _shards(state: dict[str, torch.Tensor]) -> dict[str, CheckpointShard]:
    return {name: CheckpointShard.from_tensor(tensor) for name, tensor in state.items()}


def _load(where: Path, state: dict[str, torch.Tensor]) -> CheckpointManifest:
    return load_checkpoint(where, _shards(state), None)


def test_what_is_saved_comes_back_in_place(tmp_path: Path) -> None:
    where = _save(tmp_path / "checkpoints", 7, _state(2.5))
    state = _state(0.0)
    assert _load(where, state).step == 7
    assert state["a/weight"].eq(2.5).all() and state["b"].eq(2.5) and state["c/half"].eq(2.5).all()


def test_only_the_newest_stay_and_the_same_step_is_replaced(tmp_path: Path) -> None:
    for step in (1, 2, 3, 3):
        _save(tmp_path, step, _state(float(step)))
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_remains_of_a_killed_save_are_ignored_and_cleared(tmp_path: Path) -> None:
    _save(tmp_path, 1, _state())
    remains = tmp_path / "step-00000002.partial"
    shutil.copytree(tmp_path / "step-00000001", remains)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [1]
    _save(tmp_path, 3, _state())
    assert not remains.exists()


def _save_with_a_slow_removal_of_remains(group: RankGroup, folder: Path) -> None:
    def remove_slowly(path: Path) -> None:
        remove(path)
        time.sleep(0.3)

    remove, shutil.rmtree = shutil.rmtree, remove_slowly
    try:
        _save(folder, 2, _state(2.0), group=group)
    finally:
        shutil.rmtree = remove


def test_the_others_wait_until_the_leader_has_cleared_the_folder(ranks: Ranks, tmp_path: Path) -> None:
    remains = tmp_path / "step-00000002.partial"
    remains.mkdir()
    (remains / "__1_0.distcp").write_text("of another world")
    ranks.run(3, _save_with_a_slow_removal_of_remains, tmp_path)
    state = _state(0.0)
    _load(tmp_path / "step-00000002", state)
    assert state["a/weight"].eq(2.0).all()


def test_another_model_is_refused_by_the_first_tensor_that_differs(tmp_path: Path) -> None:
    where = _save(tmp_path, 1, _state())
    without_b = {n: t for n, t in _state().items() if n != "b"}
    for state, sentence in (
        (_state(size=8), r"another model.*'a/weight' is \[6, 2\] there and \[8, 2\] in this job"),
        (_state() | {"extra": torch.ones(1)}, r"'extra' is not in it"),
        (without_b, r"it holds 'b', which this job does not have"),
    ):
        refused(sentence, _load, where, state)


def test_a_damaged_manifest_is_told_with_a_remedy(tmp_path: Path) -> None:
    where = _save(tmp_path, 1, _state())
    (where / "manifest.json").write_text(json.dumps({"step": 1}))
    refused(r"not a whole checkpoint.*remove it to use the one before", read_manifest, where)


def test_a_single_flipped_bit_is_noticed(tmp_path: Path) -> None:
    where = _save(tmp_path, 1, _state())
    data = next(where.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(InputError, match=r"is damaged \(.*distcp has changed\); remove it to use the one before it"):
        _load(where, _state())


def test_a_manifest_that_lies_is_refused(tmp_path: Path) -> None:
    """It agrees with the job, and not with the files."""
    where = _save(tmp_path, 1, _state())
    content = json.loads((where / "manifest.json").read_text())
    for name, shape, sentence in (
        ("a/weight", [4, 2], r"is damaged \(Size mismatch between saved .* for a/weight\); remove it to use the one"),
        ("extra", [3], r"is damaged \(Missing key in checkpoint state_dict: extra\); remove it to use the one before"),
    ):
        shapes = {**content["shapes"], name: shape}
        (where / "manifest.json").write_text(json.dumps({**content, "shapes": shapes}))
        refused(sentence, _load, where, {n: torch.zeros(s) for n, s in shapes.items()})


@pytest.mark.parametrize("lacking", ["manifest.json", "saved_by.json"])
def test_a_manifest_that_is_missing_is_told_with_a_remedy(tmp_path: Path, lacking: str) -> None:
    where = _save(tmp_path, 1, _state())
    (where / lacking).unlink()
    refused(rf"not a whole checkpoint \(.*{lacking}.*\); remove it to use the one before", read_manifest, where)


STRANGE = {
    "strides": torch.arange(240.0).view(2, 5, 3, 8).permute(0, 3, 1, 2),
    "a view of a larger tensor": torch.arange(100.0)[10:20],
    "no dimensions": torch.tensor(7),
    "no elements": torch.zeros(0, 4),
    "flags": torch.tensor([True, False, True]),
    "halves": torch.arange(7).bfloat16(),
    "a/name/with.slashes": torch.ones(2, 2, dtype=torch.float64),
}


def test_tensors_of_any_kind_come_back_and_none_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP would clone a view of a larger tensor, and keep the clones until its file is written."""
    cloned: list[torch.Size] = []

    def clone(tensor: torch.Tensor, **options: object) -> torch.Tensor:
        cloned.append(tensor.shape)
        return real_clone(tensor, **options)

    real_clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", clone)
    where = _save(tmp_path, 1, STRANGE)
    assert cloned == []
    loaded = {name: real_clone(tensor).zero_() for name, tensor in STRANGE.items()}
    _load(where, loaded)
    for name, tensor in STRANGE.items():
        assert torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype, name
    assert loaded["strides"].stride() == STRANGE["strides"].stride()


def test_parts_of_a_tensor_with_other_strides_are_its_rows() -> None:
    tensor = torch.arange(24.0).view(4, 6).T
    shard = CheckpointShard.from_values(tensor, ShardSpec.full((6, 4)), parts=[(0, 8), (8, 12), (12, 24)])
    found = [shard.__get_tensor_shard__(item.index) for item in shard.__create_write_items__("t", shard)]
    assert [part.tolist() for part in found] == [tensor[:2].tolist(), tensor[2:3].tolist(), tensor[3:].tolist()]


def test_a_tensor_that_nobody_writes_is_no_checkpoint(tmp_path: Path) -> None:
    manifest = CheckpointManifest(1, "", {"a": [2], "b": [3]}, {"a": "float32", "b": "float32"}, SavedBy(1, 1, ""))
    half = CheckpointShard.from_values(torch.ones(3), ShardSpec.full((3,)), parts=[(0, 2)])
    for shards, sentence in (
        ({"a": CheckpointShard.from_tensor(torch.ones(2))}, r"no rank writes \['b'\]"),
        ({"a": CheckpointShard.from_tensor(torch.ones(2)), "b": half}, r"b: 2 elements of \[3\] are written"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            save_checkpoint(tmp_path, shards, manifest, keep=1, group=None)
        assert not complete_checkpoints(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(where)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_disk_leaves_the_checkpoint_before_whole(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    before = _save(folder, 1, {"w": torch.ones(2**18)})
    sentence = r"step-00000002 \(No space left on device\): it needs 8 MiB and .* free"
    with pytest.raises(CheckpointSaveError, match=sentence):
        _save(folder, 2, {"w": torch.zeros(2**21)})
    assert [path for _, path in complete_checkpoints(folder)] == [before]
    state = {"w": torch.zeros(2**18)}
    _load(before, state)
    assert state["w"].eq(1).all()
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000001"]  # the room is free again


def test_an_unwritable_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointSaveError, match="could not save"):
        _save(tmp_path / "checkpoints", 1, _state())
