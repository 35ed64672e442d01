"""`motet checkpoint inspect`, `diff`, `average` and `cast`: what they print, write and refuse."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import motet
from checkpoint.forged import State, save_state
from motet.checkpoint.tools import boxes, comparison, rewriting
from motet.checkpoint.tools.boxes import cut_box
from motet.checkpoint.verification import checkpoint_verdicts
from motet.cli.main import app
from motet.core.errors import InputError, MotetError, ReplicaMismatchError


def call(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    if isinstance(result.exception, MotetError):
        raise result.exception
    assert result.exception is None, result.exception
    return result.stdout


def call_json(*arguments: str | Path) -> Any:
    return json.loads(call(*arguments, "--json"))


def some_run(folder: Path, seed: int, *, step: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Path, State]:
    """A run with a small job, and its newest checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    shape = (7, 5)
    state = {
        "master/w": torch.randn(shape, generator=generator).to(dtype),
        "exp_avg/w": torch.randn(shape, generator=generator).to(dtype),
        "momentum/w": torch.randn(shape, generator=generator).bfloat16(),
        "frozen/f": torch.randn(3, generator=generator).bfloat16(),
        "buffer/mean": torch.randn(3, generator=generator),
        "buffer/count": torch.tensor(step),
        "buffer/none": torch.zeros(0, 2),
        "step": torch.tensor(float(step)),
    }
    folder.mkdir(exist_ok=True)
    (folder / "job.toml").write_text('name = "small"\n[precision]\nrecipe = "fp32"\n')
    return save_state(folder / "checkpoints", step, state), state


@pytest.mark.parametrize("max_numel", [1, 4, 7, 30, 1000])
def test_a_box_is_cut_into_boxes_that_fill_it(max_numel: int) -> None:
    for offsets, lengths in (((1, 2, 3), (4, 3, 5)), ((0,), (9,)), ((), ()), ((2, 0), (3, 0))):
        counts = torch.zeros([at + n for at, n in zip(offsets, lengths, strict=True)], dtype=torch.int)
        for part in cut_box((offsets, lengths), max_numel):
            assert math.prod(part[1]) <= max_numel
            counts[tuple(slice(at, at + n) for at, n in zip(*part, strict=True))] += 1
        inside = counts[tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))]
        assert inside.eq(1).all() and counts.sum() == math.prod(lengths)


def test_inspect_shows_tensors_files_and_the_run(tmp_path: Path) -> None:
    where, _ = some_run(tmp_path / "run", 0)
    text = call("inspect", tmp_path / "run")
    for words in ("step 4, format 3", "saved by 1 rank, 1 thread", "rank-00000.safetensors", "buffer: 3 tensors"):
        assert words in text
    assert "master/w  7 x 5  float32  140 B" in text and "one number" in text
    tree = call_json("inspect", where, "--match", "*/w")
    assert tree["step"] == 4 and tree["saved_by"]["ranks"] == 1 and tree["path"] == str(where)
    assert tree["tensors"]["momentum/w"] == {
        "kind": "momentum",
        "shape": [7, 5],
        "dtype": "bfloat16",
        "size_bytes": 70,
        "boxes": 1,
    }
    assert len(tree["tensors"]) == 3 and tree["files"].keys() == {p.name for p in where.iterdir()} - {"manifest.json"}
    with pytest.raises(InputError, match="--match 'nothing' matches no tensor; the nearest names are"):
        call("inspect", where, "--match", "nothing")


def test_equal_checkpoints_have_no_difference(tmp_path: Path) -> None:
    some_run(tmp_path / "a", 0)
    some_run(tmp_path / "b", 0)
    assert "have the same 8 tensors, bit for bit" in call("diff", tmp_path / "a", tmp_path / "b")
    assert call_json("diff", tmp_path / "a", tmp_path / "b")["differences"] == []


@pytest.mark.parametrize("max_numel", [3, 10**6])
def test_differences_are_counted_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_numel: int) -> None:
    monkeypatch.setattr(comparison, "cut_box", lambda box: boxes.cut_box(box, max_numel))
    a = {"w": torch.arange(12.0).view(3, 4), "n": torch.tensor([1.0, math.nan, 0.0]), "i": torch.tensor([1, 2**62])}
    a |= {"dtype": torch.ones(2), "shape": torch.ones(2), "only a": torch.ones(1), "same": torch.ones(5)}
    b = {name: tensor.clone() for name, tensor in a.items() if name != "only a"} | {"only b": torch.ones(1)}
    b["w"][1, 2], b["w"][2, 3] = 9.5, -1.0
    b["n"][0], b["n"][2] = math.nan, -0.0
    b["i"][0] = 4
    b["dtype"], b["shape"] = torch.tensor([1.0, 2.0]).bfloat16(), torch.ones(3)
    where = save_state(tmp_path / "a", 1, a), save_state(tmp_path / "b", 1, b)
    readers = [motet.open_checkpoint(path) for path in where]
    found = {each.name: each for each in comparison.compare_checkpoints(readers[0], readers[1], lambda _: None)}
    assert sorted(found) == ["dtype", "i", "n", "only a", "only b", "shape", "w"]
    measured = {name: (each.elements, each.max_abs_difference) for name, each in found.items()}
    assert measured["w"] == (2, 12.0) and measured["i"] == (1, 3.0) and measured["dtype"] == (1, 1.0)
    assert measured["n"][0] == 2 and math.isnan(measured["n"][1])
    assert found["only a"].shapes == ((1,), None) and found["shape"].shapes == ((2,), (3,))
    result = CliRunner().invoke(app, ["checkpoint", "diff", *map(str, where)])
    assert isinstance(result.exception, ReplicaMismatchError) and "7 of 8 tensors differ" in str(result.exception)
    for words in (
        "is not in B",
        "is not in A",
        "is [2] in A and [3] in B",
        "float32 in A and bfloat16 in B",
        "by up to 12",
    ):
        assert words in result.stdout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_file_bytes", [40, 2**34])
def test_the_mean_is_that_of_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, max_file_bytes: int
) -> None:
    """The optimizer, whole numbers and the step are those of the last; a mean of equal values is that value."""
    monkeypatch.setattr(rewriting, "_MAX_FILE_BYTES", max_file_bytes)
    states = [some_run(tmp_path / f"{i}", i, step=step, dtype=dtype)[1] for i, step in enumerate((3, 8, 5))]
    out = tmp_path / "mean"
    tree = call_json("average", *(tmp_path / f"{i}" for i in range(3)), "--output", out)
    assert tree["step"] == 5 and (out / "job.toml").is_file() and not any(v.problem for v in checkpoint_verdicts(out))
    mean = motet.open_checkpoint(out)
    assert mean.names == tuple(states[0]) and mean.dtype("master/w") == dtype
    for name in ("master/w", "frozen/f", "buffer/mean"):
        exact = torch.stack([state[name].double() for state in states]).mean(0)
        assert torch.allclose(mean[name].double(), exact.to(mean.dtype(name)).double(), rtol=1e-15, atol=1e-15), name
    for name in ("exp_avg/w", "momentum/w", "buffer/count", "buffer/none", "step"):
        assert mean[name].equal(states[2][name]), name
    call("average", *[tmp_path / "0"] * 3, "--output", tmp_path / "same")
    assert "same 8 tensors" in call("diff", tmp_path / "0", tmp_path / "same")


def test_what_cannot_be_averaged_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    some_run(tmp_path / "a", 0)
    other, out = save_state(tmp_path / "b", 1, {"master/w": torch.ones(2)}), tmp_path / "out"
    with pytest.raises(
        InputError, match=r"'buffer/count' is of \[\] in .* and missing in .*; checkpoints of one model"
    ):
        call("average", tmp_path / "a", other, "--output", out)
    with pytest.raises(InputError, match="give two checkpoints or more"):
        call("average", tmp_path / "a", "--output", out)
    data = some_run(tmp_path / "damaged", 1)[0] / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"\7")
    with pytest.raises(InputError, match=r"is damaged .rank-00000.safetensors has changed"):
        call("average", tmp_path / "a", tmp_path / "damaged", "--output", out)
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="out is not empty; remove it or give another --output"):
        call("average", tmp_path / "a", tmp_path / "a", "--output", out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_masters_and_their_moments_are_cast(tmp_path: Path) -> None:
    where, state = some_run(tmp_path / "run", 0)
    call("cast", "fp64", where, "--output", tmp_path / "wide")
    wide = motet.open_checkpoint(tmp_path / "wide")
    changed = {name for name in wide.names if wide.dtype(name) != state[name].dtype}
    assert changed == {"master/w", "exp_avg/w"} and wide["master/w"].equal(state["master/w"].double())
    assert 'master_dtype = "float64"' in (tmp_path / "wide/job.toml").read_text()
    call("cast", "fp32", tmp_path / "wide", "--output", tmp_path / "back")
    assert "same 8 tensors" in call("diff", where, tmp_path / "back")
    call("cast", "bf16", where, "--output", tmp_path / "narrow")
    assert motet.open_checkpoint(tmp_path / "narrow")["master/w"].equal(state["master/w"].bfloat16())
    assert "master_dtype" not in (tmp_path / "narrow/job.toml").read_text()


def test_a_value_that_becomes_infinite_is_refused(tmp_path: Path) -> None:
    where = save_state(tmp_path / "a", 1, {"master/w": torch.tensor([1.0, 1e6])})
    with pytest.raises(InputError, match=r"master/w has 1e\+06, more than float16 holds; cast to a wider dtype"):
        call("cast", "fp16", where, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "is in no run, so it has no job" in call("cast", "fp64", where, "--output", tmp_path / "out")
