"""`precision.attention`: the kernels that attention may use, where, and what is refused before ranks start."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import motet
from motet.cluster import host_limits
from motet.core.errors import InputError
from motet.models import generation
from motet.precision.attention_kernels import attention_problem
from motet.precision.numerics import numerics_remark, precision_numerics
from motet.precision.recipe import PrecisionSettings
from motet.train.launch.preflight import check_job
from train.runs import small_job

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ENABLED = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}


def enabled() -> list[SDPBackend]:
    """The kernels that torch may use, in its order."""
    order = torch._C._get_sdp_priority_order()
    return sorted((kernel for kernel, is_on in ENABLED.items() if is_on()), key=lambda kernel: order.index(int(kernel)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("auto", None),
        ("cudnn", [SDPBackend.CUDNN_ATTENTION]),
        ("flash", [SDPBackend.FLASH_ATTENTION]),
        ("efficient", [SDPBackend.EFFICIENT_ATTENTION]),
        ("plain", [SDPBackend.MATH]),
    ],
)
def test_a_gpu_uses_the_named_kernel_alone_or_what_torch_chooses(name: Any, expected: list[SDPBackend] | None) -> None:
    before = enabled()
    with precision_numerics(PrecisionSettings(recipe="bf16", attention=name), GPU):
        assert enabled() == (before if expected is None else expected)
    assert enabled() == before


@pytest.mark.parametrize("name", ["auto", "cudnn", "efficient"])
def test_a_cpu_leaves_the_choice_to_torch_where_it_has_no_such_kernel(name: Any) -> None:
    before, settings = enabled(), PrecisionSettings(attention=name)
    with precision_numerics(settings, CPU):
        assert enabled() == before
    remark = numerics_remark(settings, CPU)
    assert (remark is None) is (name == "auto")
    assert remark is None or remark.startswith(f"precision.attention = {name!r} has no effect on this device (cpu)")
    assert numerics_remark(settings, GPU) is None


def saved_shapes() -> set[tuple[int, ...]]:
    """The shapes of the tensors that torch's attention keeps for its backward."""
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    shapes = set[tuple[int, ...]]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (shapes.add(tuple(x.shape)), x)[1], lambda x: x):
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return shapes


@pytest.mark.parametrize(("name", "keeps_pairs"), [("flash", False), ("plain", True)])
def test_a_cpu_has_flash_attention_and_the_plain_formula(name: Any, keeps_pairs: bool) -> None:
    with precision_numerics(PrecisionSettings(attention=name), CPU):
        shapes = saved_shapes()
    assert any(shape[-2:] == (5, 5) for shape in shapes) is keeps_pairs  # Probabilities of pairs of tokens


@dataclass
class Heads:
    key_dim: int
    value_dim: int


PROBLEMS: dict[str, tuple[PrecisionSettings, Heads, bool, str]] = {
    "wide flash": (PrecisionSettings(attention="flash"), Heads(64, 64), False, "no kernel for float32 on a GPU"),
    "wide cudnn": (PrecisionSettings(attention="cudnn", recipe="tf32"), Heads(64, 64), False, "recipe=bf16 or fp16"),
    "float64": (PrecisionSettings(attention="efficient", recipe="fp64"), Heads(64, 64), False, "kernel for float64"),
    "large": (PrecisionSettings(attention="flash", recipe="bf16"), Heads(512, 512), False, "and the model has 512"),
    "large cudnn": (PrecisionSettings(attention="cudnn", recipe="bf16"), Heads(136, 136), False, "128 components, and"),
    "odd values": (PrecisionSettings(attention="cudnn", recipe="bf16"), Heads(64, 60), False, "and the model has 60"),
    "odd": (PrecisionSettings(attention="cudnn", recipe="bf16"), Heads(20, 20), False, "and the model has 20"),
    "latent": (PrecisionSettings(attention="flash", recipe="bf16"), Heads(192, 128), False, "keys and values of one"),
    "bias": (PrecisionSettings(attention="flash", recipe="fp16"), Heads(64, 64), True, "scores of relative positions"),
    "cudnn bias": (PrecisionSettings(attention="cudnn", recipe="fp16"), Heads(64, 64), True, "which the model learns"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_kernel_that_a_gpu_does_not_have_is_named_with_the_remedy(name: str) -> None:
    settings, heads, adds_bias, words = PROBLEMS[name]
    problem = attention_problem(settings, [heads], adds_bias=adds_bias)
    assert words in problem and "write precision.attention=auto" in problem
    assert problem.startswith(f"precision.attention = {settings.attention!r}")


@pytest.mark.parametrize(
    ("name", "recipe", "heads"),
    [
        ("auto", "fp32", Heads(20, 12)),
        ("plain", "fp64", Heads(20, 12)),
        ("efficient", "fp32", Heads(20, 12)),
        ("cudnn", "bf16", Heads(192, 128)),
        ("cudnn", "bf16", Heads(128, 128)),
        ("flash", "fp16", Heads(256, 256)),
    ],
)
def test_what_a_gpu_has_is_taken(name: Any, recipe: Any, heads: Heads) -> None:
    assert not attention_problem(PrecisionSettings(attention=name, recipe=recipe), [heads])


def test_a_cpu_has_no_flash_for_scores_that_a_model_learns(tmp_path: Path) -> None:
    flash = "precision.attention=flash"
    with pytest.raises(InputError, match=r"^precision.attention = 'flash' cannot add the scores of relative positions"):
        check_job(small_job(tmp_path, flash, model="t5"), 1)
    check_job(small_job(tmp_path, flash), 1)
    check_job(small_job(tmp_path, "precision.attention=cudnn", model="t5"), 1)  # Without effect on a CPU


def test_a_job_is_refused_before_its_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job(tmp_path, "run.device=cuda", "precision.attention=flash", "precision.recipe=fp32")
    with pytest.raises(InputError, match=r"precision.attention = 'flash' has no kernel for float32"):
        check_job(job, 1)
    with pytest.raises(InputError, match=r"precision.attention = 'flash' has no kernel for float32"):
        precision_numerics(job.precision, GPU).__enter__()
    narrow = ["run.device=cuda", "precision.attention=flash", "precision.recipe=bf16"]
    job = small_job(tmp_path, *narrow, "model.head_dim=20")
    with pytest.raises(InputError, match=r"takes heads of 8, 16, ... 256 components, and the model has 20"):
        check_job(job, 1)
    monkeypatch.setattr(host_limits, "_GPU_DEVICE_FILES", ())
    check_job(small_job(tmp_path, "precision.attention=flash"), 1)  # A machine without GPUs


def test_generation_has_kernels_for_masks_whichever_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module, before = torch.nn.Linear(1, 1), enabled()
    with generation._evaluation_mode(module):
        assert enabled() == before  # A CPU
    monkeypatch.setattr(generation, "_device", lambda module: GPU)
    with precision_numerics(PrecisionSettings(recipe="bf16", attention="flash"), GPU):
        with generation._evaluation_mode(module):
            assert enabled() == [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        assert enabled() == [SDPBackend.FLASH_ATTENTION]


def test_ranks_that_share_rows_do_not_have_the_choice(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"precision.attention = 'plain' has no effect with layout.cp = 2"):
        check_job(small_job(tmp_path, "precision.attention=plain", "layout.cp=2"), 2)


def test_a_custom_loop_chooses_itself() -> None:
    with pytest.raises(InputError, match=r"has no effect in a custom loop; leave it out, and train inside of torch"):
        motet.parallelize(torch.nn.Linear(2, 2), precision={"attention": "plain"})
