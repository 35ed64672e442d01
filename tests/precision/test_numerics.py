"""The numerics that a recipe sets for a process, and what a run says where it computes in another way."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import motet
from motet.core.errors import InputError
from motet.parallel.process.launch_environment import SINGLE_RANK
from motet.parallel.process.process_group import RankGroup
from motet.precision.numerics import numerics_remark, precision_numerics
from motet.precision.recipe import PrecisionSettings
from motet.train.build import build_components, precision_context
from precision.test_matmul_emulation import MultipliedDtypes
from ranks import Ranks
from train.runs import run_job, small_job

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TF32, EMULATED = PrecisionSettings(recipe="tf32"), PrecisionSettings(recipe="bf16", emulate=True)


def capability(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))


def test_tf32_sets_the_precision_of_float32_products_on_gpus_for_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    capability(9, monkeypatch)
    before = torch.get_float32_matmul_precision()
    with pytest.raises(KeyError), precision_numerics(TF32, GPU):
        assert torch.get_float32_matmul_precision() == "high"
        raise KeyError
    assert torch.get_float32_matmul_precision() == before and numerics_remark(TF32, GPU) is None
    with precision_numerics(PrecisionSettings(), GPU):
        assert torch.get_float32_matmul_precision() == before


def test_tf32_elsewhere_computes_in_float32_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    capability(7, monkeypatch)
    before = torch.get_float32_matmul_precision()
    for device, words in ((CPU, "only NVIDIA GPUs have TF32"), (GPU, "compute capability is below 8.0")):
        with precision_numerics(TF32, device):
            assert torch.get_float32_matmul_precision() == before
        remark = numerics_remark(TF32, device)
        assert remark is not None and "computes in float32" in remark and words in remark
    assert numerics_remark(PrecisionSettings(), CPU) is None


def test_a_gpu_is_not_emulated() -> None:
    with pytest.raises(InputError, match=r"run.device = cuda.*; leave precision.emulate out, or set run.device=cpu"):
        precision_numerics(EMULATED, GPU).__enter__()


@pytest.mark.parametrize("precision", ["tf32", {"recipe": "bf16", "emulate": True}])
def test_a_custom_loop_decides_itself(precision: Any) -> None:
    with pytest.raises(InputError, match="has no effect in a custom loop; "):
        motet.parallelize(nn.Linear(2, 2), precision=precision)


def run_texts(folder: Path, *overrides: str) -> tuple[list[float], list[str]]:
    """The losses and the warnings of a run."""
    size = ["model.layers=1", "data.batch_sequences=2", "run.steps=3", "monitor.evaluate_batches=1"]
    assert run_job(SINGLE_RANK, small_job(folder, *size, *overrides), folder / "run") == 3
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    warnings = [event["text"] for event in events if event["event"] == "warned"]
    return [event["loss"] for event in events if event["event"] == "step_done"], warnings


def test_a_run_says_that_tf32_and_emulated_products_are_in_float32(tmp_path: Path) -> None:
    plain, _ = run_texts(tmp_path / "plain", "precision.recipe=fp32")
    tf32, warnings = run_texts(tmp_path / "tf32", "precision.recipe=tf32")
    assert tf32 == plain and sum("computes in float32 on this device (cpu)" in text for text in warnings) == 1
    emulated, warnings = run_texts(tmp_path / "emulated", "precision.recipe=bf16", "precision.emulate=true")
    assert emulated == pytest.approx(plain, rel=0.02) and emulated != plain
    assert [text for text in warnings if "matrices" in text or "precision" in text] == [numerics_remark(EMULATED, CPU)]


def multiplied(group: RankGroup, folder: Path, emulate: str, layout: list[str]) -> tuple[list[float], set[str]]:
    """The losses of a bf16 job, and the dtypes in which its matrices are multiplied."""
    job = small_job(folder, "precision.recipe=bf16", f"precision.emulate={emulate}", *layout)
    with MultipliedDtypes() as counted, precision_context(job):
        stepper = build_components(job, group, folder).make_train_step(job)
        losses = [stepper.step(step, 0.001).loss for step in range(2)]
    return losses, {str(dtype) for dtype in counted.dtypes if dtype.is_floating_point}


@pytest.mark.parametrize("layout", [["layout.zero=1"], ["layout.zero=3"], ["layout.tp=2"], ["layout.pp=2"]])
def test_layouts_emulate_all_products_and_train_the_same_model(ranks: Ranks, tmp_path: Path, layout: list[str]) -> None:
    (expected, dtypes), *_ = ranks.run(1, multiplied, tmp_path, "false", [])
    assert "torch.bfloat16" in dtypes
    for losses, emulated_dtypes in ranks.run(2, multiplied, tmp_path, "true", layout):
        assert "torch.bfloat16" not in emulated_dtypes and losses == pytest.approx(expected, rel=0.005)
