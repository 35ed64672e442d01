"""`precision.attention`: the kernels that attention may use, where, and what is refused before ranks start."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend

import motet
from motet.cluster import host_limits
from motet.core.errors import InputError
from motet.models import generation
from motet.models.arch.attention_core import ScoreOptions, attend
from motet.models.arch.attention_mask import AttentionMask
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
    "odd efficient": (PrecisionSettings(attention="efficient", recipe="bf16"), Heads(12, 12), False, "8, 16, ... comp"),
    "wide efficient": (PrecisionSettings(attention="efficient"), Heads(10, 10), False, "takes heads of 4, 8, ... comp"),
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
        ("efficient", "bf16", Heads(24, 512)),
        ("cudnn", "bf16", Heads(192, 128)),
        ("cudnn", "bf16", Heads(128, 128)),
        ("flash", "fp16", Heads(256, 256)),
    ],
)
def test_what_a_gpu_has_is_taken(name: Any, recipe: Any, heads: Heads) -> None:
    assert not attention_problem(PrecisionSettings(attention=name, recipe=recipe), [heads])


def test_reproducible_sums_have_no_kernel_of_cudnn(tmp_path: Path) -> None:
    settings = ["run.device=cuda", "precision.recipe=bf16", "model.head_dim=8", "run.reproducible=layout"]
    with pytest.raises(
        InputError, match=r"'cudnn' adds in an order that changes, and run.reproducible .*attention=auto"
    ):
        check_job(small_job(tmp_path, *settings, "precision.attention=cudnn"), 1)
    check_job(small_job(tmp_path, *settings, "precision.attention=flash"), 1)
    check_job(small_job(tmp_path, *settings[:-1], "precision.attention=cudnn"), 1)


def test_a_call_that_the_named_kernel_does_not_take_is_named() -> None:
    """Modules of users call torch themselves."""
    q, mask = torch.randn(1, 2, 5, 8), torch.zeros(5, 5, requires_grad=True)
    with (
        pytest.raises(InputError, match=r"^precision.attention = 'flash': a call of attention in this model has"),
        precision_numerics(PrecisionSettings(attention="flash"), CPU),
    ):
        F.scaled_dot_product_attention(q, q, q, mask)
    with (
        pytest.raises(RuntimeError, match=r"^of the model"),
        precision_numerics(PrecisionSettings(attention="flash"), CPU),
    ):
        raise RuntimeError("of the model")


REPEATED = [  # Which kernels, dtype, sizes of keys and values, whether keys and values are repeated
    ("auto", torch.bfloat16, (64, 64), False),
    ("auto", torch.bfloat16, (512, 512), True),
    ("auto", torch.bfloat16, (64, 32), True),
    ("auto", torch.float32, (64, 64), True),
    ("auto", torch.float64, (64, 64), False),  # By the formula
    ("efficient", torch.bfloat16, (64, 64), True),
    ("flash", torch.bfloat16, (64, 64), False),
    ("plain", torch.float32, (64, 64), False),
]


@pytest.mark.parametrize(("name", "dtype", "dims", "is_repeated"), REPEATED)
def test_groups_of_heads_on_a_gpu(
    name: Any, dtype: torch.dtype, dims: tuple[int, int], is_repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory-efficient kernel takes as many keys as queries alone, and the formula would keep all probabilities."""
    calls = list[tuple[int, bool]]()

    def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, enable_gqa: bool, **__: Any) -> Tensor:
        assert k.shape[1] == v.shape[1]
        calls.append((k.shape[1], enable_gqa))
        return q.new_empty(*q.shape[:3], v.shape[3])

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    with precision_numerics(PrecisionSettings(recipe="bf16", attention=name), GPU), FakeTensorMode():
        sizes = ((4, dims[0]), (2, dims[0]), (2, dims[1]))
        q, k, v = (torch.empty(1, heads, 5, dim, dtype=dtype, device="cuda") for heads, dim in sizes)
        attend(q, k, v, mask=AttentionMask(causal=True), options=ScoreOptions(0.1))
    assert calls == [(4, False) if is_repeated else (2, True)]


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
