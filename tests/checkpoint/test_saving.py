"""Checkpoints are whole or not there."""

import math
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoint.forged import load_state, save_state, some_state
from motet.checkpoint import background_writer
from motet.checkpoint.background_writer import CheckpointSaver, ShardToWrite, save_checkpoint
from motet.checkpoint.checkpoint_folders import complete_checkpoints
from motet.checkpoint.data_files import CheckpointShard, DataFileWriter
from motet.checkpoint.manifest import CheckpointManifest, SavedBy
from motet.checkpoint.publication import RankRecord, Retention, wait_for_records, write_record
from motet.core.errors import CheckpointSaveError
from motet.parallel.process.process_group import RankGroup
from motet.parallel.shard_spec import ShardSpec
from ranks import Ranks
from refusals import refused


def test_what_is_saved_comes_back_in_place(tmp_path: Path) -> None:
    where = save_state(tmp_path / "checkpoints", 7, some_state(2.5))
    state = some_state(0.0)
    assert load_state(where, state).step == 7
    assert state["a/weight"].eq(2.5).all() and state["b"].eq(2.5) and state["c/half"].eq(2.5).all()


def test_only_the_newest_stay_and_the_same_step_is_replaced(tmp_path: Path) -> None:
    for step in (1, 2, 3, 3):
        save_state(tmp_path, step, some_state(float(step)))
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_remains_of_a_killed_save_are_ignored_and_cleared(tmp_path: Path) -> None:
    save_state(tmp_path, 1, some_state())
    remains = tmp_path / "step-00000002.partial"
    shutil.copytree(tmp_path / "step-00000001", remains)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [1]
    save_state(tmp_path, 3, some_state())
    assert not remains.exists()


def _save_with_a_slow_removal_of_remains(group: RankGroup, folder: Path) -> None:
    def remove_slowly(path: Path) -> None:
        remove(path)
        time.sleep(0.3)

    remove, shutil.rmtree = shutil.rmtree, remove_slowly
    try:
        save_state(folder, 2, some_state(2.0), group=group)
    finally:
        shutil.rmtree = remove


def test_the_others_wait_until_the_leader_has_cleared_the_folder(ranks: Ranks, tmp_path: Path) -> None:
    remains = tmp_path / "step-00000002.partial"
    remains.mkdir()
    (remains / "rank-00001.safetensors").write_text("of another world")
    ranks.run(3, _save_with_a_slow_removal_of_remains, tmp_path)
    state = some_state(0.0)
    load_state(tmp_path / "step-00000002", state)
    assert state["a/weight"].eq(2.0).all()


def test_another_model_is_refused_by_the_first_tensor_that_differs(tmp_path: Path) -> None:
    where = save_state(tmp_path, 1, some_state())
    without_b = {n: t for n, t in some_state().items() if n != "b"}
    for state, sentence in (
        (some_state(size=8), r"another model.*'a/weight' is \[6, 2\] there and \[8, 2\] in this job"),
        (some_state() | {"extra": torch.ones(1)}, r"'extra' is not in it"),
        (without_b, r"it holds 'b', which this job does not have"),
    ):
        refused(sentence, load_state, where, state)


STRANGE = {
    "strides": torch.arange(240.0).view(2, 5, 3, 8).permute(0, 3, 1, 2),
    "a view of a larger tensor": torch.arange(100.0)[10:20],
    "no dimensions": torch.tensor(7),
    "no elements": torch.zeros(0, 4),
    "flags": torch.tensor([True, False, True]),
    "halves": torch.arange(7).bfloat16(),
    "eight bits": torch.arange(7.0).to(torch.float8_e4m3fn),
    "complex": torch.arange(6.0).view(3, 2).to(torch.complex64) * (1 + 2j),
    "a/name/with.slashes": torch.ones(2, 2, dtype=torch.float64),
}


class _Copies(TorchDispatchMode):
    """The shapes of tensors that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation.overloadpacket in (torch.ops.aten.clone, torch.ops.aten._to_copy):  # Not into pieces of a file
            self.shapes.append(args[0].shape)
        return operation(*args, **(kwargs or {}))


class _HereAndNow:
    """Runs the target of a thread when it starts, in the thread that starts it."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.start = target


def test_ranks_are_given_up_when_they_have_written_nothing_for_a_while(tmp_path: Path) -> None:
    """The time counts from the moment at which the run ends, and from each write of any rank."""
    patience, begin_s = [math.inf], time.monotonic()
    data = tmp_path / "rank-00001.safetensors"

    def write() -> None:
        time.sleep(0.4)
        patience[0] = 0.3
        for _ in range(4):
            time.sleep(0.15)
            data.write_bytes(b"part")
        write_record(tmp_path, 1, RankRecord(data.name, 4, {}))

    thread = threading.Thread(target=write)
    thread.start()
    assert [record.file for record in wait_for_records(tmp_path, 2, lambda: patience[0])] == [data.name]
    thread.join()
    assert time.monotonic() - begin_s > 0.9 and [*tmp_path.iterdir()] == [data]
    for patience_s in (0.1, 0.0):
        start_s = time.monotonic()
        with pytest.raises(CheckpointSaveError, match="rank 1 has not written its part, and no rank has written"):
            wait_for_records(tmp_path, 2, lambda s=patience_s: s)  # type: ignore[misc]  # mypy infers no default
        assert patience_s <= time.monotonic() - start_s < 10 * patience_s + 0.1


def test_a_run_that_ends_gives_up_a_lost_rank_and_leaves_nothing(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, None, Retention(1), device=torch.device("cpu"))
    saver.ranks = 2  # Of which the other one never writes
    manifest = CheckpointManifest(1, "", {"b": [8]}, {"b": "float32"}, SavedBy(1, 1, "", None))
    saver.start(manifest, {"b": ShardToWrite(CheckpointShard.from_tensor(torch.ones(8)))})
    thread = threading.Thread(target=saver.close, kwargs={"patience_s": 0.1}, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and not saver.has_failed and [*tmp_path.iterdir()] == []


def test_what_no_slice_changes_is_copied_box_by_box_when_the_save_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, began = torch.arange(32.0), threading.Event()
    shard = CheckpointShard.from_values(values, ShardSpec.full((32,)), parts=[(4, 8), (16, 24)])
    monkeypatch.setattr(DataFileWriter, "__init__", lambda *_: began.wait() and None)
    manifest = CheckpointManifest(1, "", {"b": [32]}, {"b": "float32"}, SavedBy(1, 1, "", None))
    saver = CheckpointSaver(tmp_path, None, Retention(1), device=torch.device("cpu"))
    saver.start(manifest, {"b": ShardToWrite(shard, is_copied=True)})
    boxes = saver._save.barrier.boxes if saver._save else ()
    values.fill_(-1.0)
    assert [each.values.tolist() for each in boxes] == [[*range(4, 8)], [*range(16, 24)]]
    assert sum(each.values.untyped_storage().nbytes() for each in boxes) == 12 * 4
    began.set()
    saver.close(patience_s=0.0)


def test_tensors_of_any_kind_come_back_and_none_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving needs no memory for a second copy, but for the part of a tensor with other strides."""
    monkeypatch.setattr(background_writer, "Thread", _HereAndNow)  # The mode is one of this thread
    with _Copies() as copies:
        where = save_state(tmp_path, 1, STRANGE)
    assert copies.shapes == [STRANGE["strides"].shape]
    loaded = {name: torch.empty_like(tensor).zero_() for name, tensor in STRANGE.items()}
    load_state(where, loaded)
    for name, tensor in STRANGE.items():
        assert tensor.equal(loaded[name]) and loaded[name].dtype == tensor.dtype, name
    assert loaded["strides"].stride() == STRANGE["strides"].stride()


def test_parts_of_a_tensor_with_other_strides_are_its_rows() -> None:
    tensor = torch.arange(24.0).view(4, 6).T
    shard = CheckpointShard.from_values(tensor, ShardSpec.full((6, 4)), parts=[(0, 8), (8, 12), (12, 24)])
    found = [shard.box_values(offsets) for offsets in shard.boxes]
    assert [part.tolist() for part in found] == [tensor[:2].tolist(), tensor[2:3].tolist(), tensor[3:].tolist()]


def test_a_tensor_that_nobody_writes_is_no_checkpoint(tmp_path: Path) -> None:
    manifest = CheckpointManifest(1, "", {"a": [2], "b": [3]}, {"a": "float32", "b": "float32"}, SavedBy(1, 1, ""))
    half = CheckpointShard.from_values(torch.ones(3), ShardSpec.full((3,)), parts=[(0, 2)])
    for shards, sentence in (
        ({"a": CheckpointShard.from_tensor(torch.ones(2))}, r"b: 0 elements of \[3\] are there, and must be 3"),
        ({"a": CheckpointShard.from_tensor(torch.ones(2)), "b": half}, r"b: 2 elements of \[3\] are there"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            save_checkpoint(tmp_path, shards, manifest, keep=1, group=None)
        assert not complete_checkpoints(tmp_path)
