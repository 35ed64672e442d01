"""Checkpoints become folders of Distributed Checkpoint, and those become checkpoints, with equal bits."""

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import motet
from checkpoint.forged import Evil, State, save_state
from checkpoint.test_dcp_reader import make_training, state_of
from checkpoint.test_saving import STRANGE
from cli.test_checkpoint_tools import call, call_json
from motet.checkpoint.tools import boxes, dcp_export
from motet.checkpoint.tools.dcp_export import DcpExport, export_to_dcp
from motet.core.errors import InputError
from motet.parallel.process.process_group import RankGroup
from ranks import Ranks
from refusals import refused


@pytest.fixture(autouse=True)
def without_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a single process
        yield


def same_tensors(run: Path, state: State) -> bool:
    checkpoint = motet.open_checkpoint(run)
    assert {*checkpoint.names} == {*state}
    return all(checkpoint[name].equal(t) and checkpoint.dtype(name) == t.dtype for name, t in state.items())


@pytest.mark.parametrize("limits", [(2**28, 10**6), (200, 5)])
def test_torch_loads_an_export_strictly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int]
) -> None:
    """A module and its optimizer, with the groups of parameters; boxes and files may be small."""
    monkeypatch.setattr(dcp_export, "_FILE_BYTES", limits[0])
    monkeypatch.setattr(dcp_export, "cut_box", lambda box: boxes.cut_box(box, limits[1]))
    model, optimizer = make_training()
    trained = state_of(model, optimizer)
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    checkpoint = motet.open_checkpoint(save_state(tmp_path / "run", 3, trained))
    export = DcpExport(
        checkpoint, [{**groups[0], "lr": 0.25}], tied_names=[["0.bias"], ["tied", "0.weight"], ["a", "b"]]
    )
    sizes = list[int]()
    export_to_dcp(export, tmp_path / "out", report=sizes.append)
    assert sum(sizes) == export.size_bytes
    assert (len(list((tmp_path / "out").glob("*.distcp"))) > 1) == (limits[0] == 200)
    model, optimizer = make_training()
    state = {"model": model.state_dict() | {"tied": torch.zeros(4, 6)}}
    state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert all(tensor.equal(trained[name]) for name, tensor in state_of(model, optimizer).items())
    assert optimizer.param_groups[0]["lr"] == 0.25 and state["model"]["tied"].equal(model[0].weight)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "torch.pt")
    nested = torch.load(tmp_path / "torch.pt")
    assert nested["optimizer"]["state"]["0.weight"]["exp_avg"].equal(trained["exp_avg/0.weight"])
    assert nested["optimizer"]["param_groups"][0]["params"] == groups[0]["params"]


def test_tensors_of_any_kind_are_exported_and_imported(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in STRANGE.items() if name != "eight bits"}  # Never masters
    state = {f"{'master' if t.is_floating_point() else 'buffer'}/{name}": t for name, t in tensors.items()}
    where = save_state(tmp_path / "run", 7, state)
    assert "is in no run" not in call("export", where, tmp_path / "out", "--to", "dcp")
    call("import-dcp", tmp_path / "out", tmp_path / "back", "--step", "7")
    assert same_tensors(tmp_path / "back", state)
    with pytest.raises(InputError, match="out is not empty; remove it or give another folder"):
        call("export", where, tmp_path / "out", "--to", "dcp")


@pytest.mark.parametrize("keys", [("model", "optimizer"), ("app.model", "app.optim"), ("net", "opt")])
def test_a_module_and_its_optimizer_are_imported(tmp_path: Path, keys: tuple[str, str]) -> None:
    model, optimizer = make_training()
    nested: dict[str, Any] = {}
    for key, part in zip(keys, (model.state_dict(), get_optimizer_state_dict(model, optimizer)), strict=True):
        *outer, last = key.split(".")
        (nested.setdefault(outer[0], {}) if outer else nested)[last] = part
    dcp.save(nested | {"epoch": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    options = ["--model", "net", "--optimizer", "opt"] if keys[0] == "net" else []
    tree = call_json("import-dcp", tmp_path / "dcp", tmp_path / "run", *options)
    trained = state_of(model, optimizer)
    for name in ("1.running_mean", "1.running_var"):  # The folder does not say that they are buffers
        trained[f"frozen/{name}"] = trained.pop(f"buffer/{name}")
    assert tree["step"] == 3 and same_tensors(tmp_path / "run", trained)
    save_state(tmp_path / "like", 9, {n: torch.zeros_like(t) for n, t in state_of(model, optimizer).items()})
    call("import-dcp", tmp_path / "dcp", tmp_path / "second", "--like", tmp_path / "like", *options)
    assert same_tensors(tmp_path / "second", state_of(model, optimizer))


def test_weights_alone_get_an_optimizer_without_steps(tmp_path: Path) -> None:
    trained = state_of(*make_training())
    weights = {
        name.partition("/")[2]: tensor for name, tensor in trained.items() if name.startswith(("mas", "fro", "buf"))
    }
    dcp.save(weights, checkpoint_id=tmp_path / "dcp", no_dist=True)
    double = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in trained.items()}
    save_state(tmp_path / "like", 9, double)
    call("import-dcp", tmp_path / "dcp", tmp_path / "run", "--like", tmp_path / "like")
    checkpoint = motet.open_checkpoint(tmp_path / "run")
    assert checkpoint.step == 0 and checkpoint["master/0.weight"].equal(trained["master/0.weight"].double())
    assert not checkpoint["exp_avg/0.weight"].any() and not checkpoint["step"].any()
    del weights["0.weight"]
    dcp.save(weights, checkpoint_id=tmp_path / "less", no_dist=True)
    with pytest.raises(InputError, match=r"less has no 0.weight, which the model of --like has"):
        call("import-dcp", tmp_path / "less", tmp_path / "out", "--like", tmp_path / "like")
    assert not (tmp_path / "out").exists()


def _save_sharded(group: RankGroup, folder: str) -> None:
    mesh = init_device_mesh("cpu", (group.world,))
    rows = torch.arange(35.0).view(7, 5)
    state = {
        "a": distribute_tensor(rows, mesh, [Shard(0)]),
        "b": distribute_tensor(rows.T.contiguous(), mesh, [Shard(1)]),
    }
    dcp.save({"model": state}, checkpoint_id=folder)


def test_shards_of_ranks_are_imported(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3, _save_sharded, str(tmp_path / "dcp"))
    call("import-dcp", tmp_path / "dcp", tmp_path / "run")
    rows = torch.arange(35.0).view(7, 5)
    assert same_tensors(tmp_path / "run", {"master/a": rows, "master/b": rows.T.contiguous()})


def _rewrite(change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Change the metadata as torch would write it."""

    def rewrite(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())  # It is ours
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return rewrite


def _move_away(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../x.distcp"


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no metadata": (lambda f: (f / ".metadata").unlink(), ".metadata: No such file or directory"),
    "a pickle": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps(Evil())),
        "not what torch writes|it names posix.mkdir",
    ),
    "a cut file": (lambda f: os.truncate(f / "__0_0.distcp", 99), "__0_0.distcp has 99 bytes, and .metadata speaks of"),
    "no file": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp: No such file"),
    "a pickle as data": (
        lambda f: (f / "__0_0.distcp").write_bytes(pickle.dumps(Evil()).ljust(9999, b"\0")),
        "__0_0.distcp: .* is not a tensor of torch",
    ),
    "another folder": (_rewrite(_move_away), "must be of letters"),
    "a missing chunk": (
        _rewrite(lambda m: m.state_dict_metadata["model.w"].chunks.clear()),
        "not what torch writes|0 elements of",
    ),
    "another shape": (
        _rewrite(lambda m: setattr(m.state_dict_metadata["model.w"], "size", torch.Size([4, 4]))),
        r"model.w: 12 elements of \[4, 4\] are there, and must be 16",
    ),
    "another dtype": (
        _rewrite(lambda m: setattr(m.state_dict_metadata["model.w"].properties, "dtype", torch.int32)),
        "buffer/w is not the tensor of .metadata",
    ),
    "a dtype that no checkpoint holds": (
        _rewrite(lambda m: setattr(m.state_dict_metadata["model.w"].properties, "dtype", torch.complex128)),
        "model.w has dtype complex128, which no checkpoint of motet can hold",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders_are_refused_and_nothing_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(Evil, "folder", tmp_path / "pwned")
    dcp.save({"model": {"w": torch.ones(3, 4)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    change, sentence = BAD[case]
    change(tmp_path / "dcp")
    arguments = ("import-dcp", tmp_path / "dcp", tmp_path / "run")
    refused(
        f"cannot read .*dcp as a folder of torch.distributed.checkpoint .*({sentence}).*; save it again",
        call,
        *arguments,
    )
    assert not Evil.folder.exists() and not (tmp_path / "run").exists()


def test_requests_that_a_folder_cannot_meet_are_refused(tmp_path: Path) -> None:
    model, optimizer = make_training()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    state["optimizer"]["state"]["0.bias"]["step"] = torch.tensor(8.0)
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    arguments = ("import-dcp", tmp_path / "dcp", tmp_path / "run")
    refused(
        "0.bias.step is 8 and .*0.weight.step is 3; all parameters must have taken the same steps", call, *arguments
    )
    refused(
        r"no parameter under 'net': its keys begin with .'model', 'optimizer'.; give",
        call,
        *arguments,
        "--model",
        "net",
    )
    refused("has no moments under 'opt'; leave --optimizer out", call, *arguments, "--optimizer", "opt")
