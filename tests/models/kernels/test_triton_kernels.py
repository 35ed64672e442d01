"""Each kernel in Triton against its definition: in float64 under Triton's interpreter, and compiled for a GPU."""

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gpu_checks.kernel_patches import kernels_forced, launches_replaced, recorded_launches
from torch import Tensor

from motet.core.seeds import derive_seed
from motet.models.arch import layers
from motet.models.arch.layers import RMSNorm, RotaryEmbedding, add_norm, apply_rotary, gated_activation, rms_norm
from motet.models.dropout_mask import Spans, apply_mask
from motet.models.settings import ActivationName
from triton_interpreter import Interpreted

SIZES = [(1, 1), (3, 5), (7, 129), (33, 1000), (600, 3), (2, 5000)]
ROUNDING = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
NARROW = [torch.float32, torch.bfloat16, torch.float16]

Function = Callable[..., Any]


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def results(function: Function, inputs: Sequence[Tensor], grads: Sequence[Tensor] | None) -> list[Tensor]:
    """The outputs, and the gradients of the inputs from gradients of the outputs."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [grad.to(output.dtype) for grad, output in zip(grads or [], outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads)]


def compare(kernel: Function, definition: Function, *inputs: Tensor, dtype: torch.dtype = torch.float64) -> None:
    """The kernel on inputs in this dtype, and its definition on the same values in float64."""
    rounded = [x.detach().to(dtype).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    shapes = definition(*exact)
    grads = [torch.randn_like(y).to(dtype) for y in (shapes if isinstance(shapes, tuple) else (shapes,))]
    with kernels_forced("triton"), recorded_launches() as launches:
        ours = results(kernel, rounded, grads)
    assert len(launches) >= 2
    for ours_, theirs in zip(ours, results(definition, exact, grads), strict=True):
        assert ours_.dtype == dtype and ours_.shape == theirs.shape
        assert (ours_ - theirs).abs().max() <= ROUNDING[dtype] * max(1.0, theirs.abs().max().item())


# --- norms -------------------------------------------------------------------------------------------
def formula(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight


def check_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    compare(lambda x, w: rms_norm(x, w, 1e-3), formula, doubles(rows, size), doubles(size), dtype=dtype)


def check_added_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    def kernel(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        norm = RMSNorm(size, 1e-3)
        del norm.weight
        norm.weight = weight  # Not a parameter, so that it is an input
        return add_norm(x, y, norm)

    def definition(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        if dtype != torch.float64:  # Others read the rounded sum
            total = total + (total.to(dtype) - total).detach()
        return total, formula(total, weight)

    inputs = doubles(rows, size), doubles(rows, size), doubles(size)
    compare(kernel, definition, *inputs, dtype=dtype)
    rounded = [x.detach().to(dtype) for x in inputs]
    with kernels_forced("triton"):
        total, normed = kernel(*rounded)
        assert torch.equal(normed, rms_norm(total, rounded[-1], 1e-3))


@pytest.mark.parametrize("check", [check_norm, check_added_norm])
@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_norms_of_odd_sizes(interpreted: Interpreted, check: Function, rows: int, size: int) -> None:
    interpreted(check, rows, size, torch.float64)


@pytest.mark.parametrize("check", [check_norm, check_added_norm])
@pytest.mark.parametrize("dtype", NARROW)
def test_norms_in_narrow_dtypes(interpreted: Interpreted, check: Function, dtype: torch.dtype) -> None:
    interpreted(check, 9, 77, dtype)


def check_parts_of_a_norm() -> None:
    """Slices of something larger, a frozen weight, and a sum of which one output is not used."""
    wide, weight = doubles(2, 5, 6, 4), doubles(4).detach()
    compare(lambda x: rms_norm(x[:, :, :3], weight, 1e-3), lambda x: formula(x[:, :, :3], weight), wide)
    norm, x, y = RMSNorm(4, 1e-3).double(), doubles(3, 4), doubles(3, 4)
    for index in (0, 1):
        with kernels_forced("triton"):
            outputs = add_norm(x, y, norm)
        expected = (x + y, formula(x + y, norm.weight))
        grads = [torch.autograd.grad(each[index].sum(), (x, y)) for each in (outputs, expected)]
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(*grads, strict=True))
    for hook in (norm.register_forward_hook, norm.register_forward_pre_hook):
        seen: list[int] = []
        handle = hook(lambda *_, seen=seen: seen.append(1))
        with kernels_forced("triton"):
            add_norm(x, y, norm)
        handle.remove()
        assert seen == [1]


def test_a_norm_of_a_part_and_with_hooks(interpreted: Interpreted) -> None:
    interpreted(check_parts_of_a_norm)


# --- rotary positions --------------------------------------------------------------------------------
def turned(heads: Tensor, positions: Tensor, pairs: int) -> Tensor:
    """Each pair (a, b) -> (a cos - b sin, a sin + b cos), by a loop."""
    out = list(heads.unbind(-1))
    for pair in range(pairs):
        angle = (positions * 100.0 ** -(2 * pair / (2 * pairs)))[..., None].to(heads.dtype)
        a, b = heads[..., 2 * pair], heads[..., 2 * pair + 1]
        out[2 * pair], out[2 * pair + 1] = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(out, -1)


def check_rotary(count: int, size: int, pairs: int, dtype: torch.dtype) -> None:
    for positions in (torch.arange(7).double(), torch.arange(14).double().view(2, 7), torch.ones(1, 7).double()):
        rotations = RotaryEmbedding(2 * pairs, 100.0).rotations_at(positions, dtype)
        compare(
            lambda x, rotations=rotations: apply_rotary(x, rotations),
            lambda x, positions=positions: turned(x, positions, pairs),
            doubles(2, 7, count, size),
            dtype=dtype,
        )


def check_rotary_of_parts() -> None:
    rotations = RotaryEmbedding(6, 100.0).rotations_at(torch.arange(5), torch.float64)
    for cut in (lambda x: x[:, :, 1:4], lambda x: x[..., 1:7], lambda x: x[:, :, ::2], lambda x: x.transpose(0, 1)):
        x = doubles(5, 5, 5, 9)

        def definition(x: Tensor, cut: Function = cut) -> Tensor:
            return turned(cut(x), torch.arange(5).double(), 3)

        compare(lambda x, cut=cut: apply_rotary(cut(x), rotations), definition, x)
    table = RotaryEmbedding(6, 100.0).rotations_at(torch.arange(2).double()[:, None], torch.float64)  # [2, 1, 1, 3, 2]
    compare(
        lambda x: apply_rotary(x, table), lambda x: turned(x, torch.arange(2).double()[:, None], 3), doubles(2, 5, 3, 6)
    )


@pytest.mark.parametrize(("count", "size", "pairs"), [(1, 2, 1), (3, 5, 2), (5, 64, 32), (7, 80, 16), (40, 129, 3)])
def test_rotary_of_odd_sizes(interpreted: Interpreted, count: int, size: int, pairs: int) -> None:
    interpreted(check_rotary, count, size, pairs, torch.float64)


@pytest.mark.parametrize("dtype", NARROW)
def test_rotary_in_narrow_dtypes(interpreted: Interpreted, dtype: torch.dtype) -> None:
    interpreted(check_rotary, 3, 10, 4, dtype)


def test_rotary_of_parts_of_heads(interpreted: Interpreted) -> None:
    interpreted(check_rotary_of_parts)


# --- gates -------------------------------------------------------------------------------------------
ACTIVATIONS: dict[ActivationName, Function] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: x.clamp(min=0),
    "relu_squared": lambda x: x.clamp(min=0) ** 2,
}


def check_gate(name: ActivationName, rows: int, size: int, dtype: torch.dtype) -> None:
    def definition(x: Tensor) -> Tensor:
        return ACTIVATIONS[name](x[..., :size]) * x[..., size:]

    compare(lambda x: gated_activation(x, name), definition, 3 * doubles(rows, 2 * size), dtype=dtype)


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_gates_of_odd_sizes(interpreted: Interpreted, name: ActivationName) -> None:
    assert ACTIVATIONS.keys() == layers.ACTIVATIONS.keys()
    for rows, size in [(1, 1), (3, 5), (7, 129), (4, 2500)]:
        interpreted(check_gate, name, rows, size, torch.float64)


@pytest.mark.parametrize("dtype", NARROW)
def test_gates_in_narrow_dtypes(interpreted: Interpreted, dtype: torch.dtype) -> None:
    for name in ACTIVATIONS:
        interpreted(check_gate, name, 5, 33, dtype)


def check_extreme_gates() -> None:
    """Gates for which exp overflows, and numbers that are none."""
    for name, activation in ACTIVATIONS.items():
        for dtype in (torch.float32, torch.float64):
            gate = torch.tensor([-1e4, -800.0, -90.0, 90.0, 800.0, 1e4, float("nan")], dtype=dtype)
            x = torch.cat((gate, torch.ones_like(gate))).requires_grad_()
            with kernels_forced("triton"):
                y = gated_activation(x, name)
            (grad,) = torch.autograd.grad(y.sum(), x)
            leaf = gate.detach().requires_grad_()
            z = activation(leaf)
            slope = torch.autograd.grad(z.sum(), leaf)[0]
            torch.testing.assert_close(y, z, equal_nan=True)
            torch.testing.assert_close(grad[:6], slope[:6])


def check_measured_gradients(kernel: str) -> None:
    from gpu_checks.kernel_rows import measure_kernel

    shapes, grad = list[list[tuple[int, ...]]](), torch.autograd.grad

    def noted(outputs: Any, inputs: Any, gradients: Any) -> Any:
        shapes.append([tuple(each.shape) for each in inputs])
        return grad(outputs, inputs, gradients)

    with patch.object(torch.autograd, "grad", noted), patch.object(torch, "compile", lambda function, **_: function):
        measured = measure_kernel("cpu", kernel, 3, compiles=True)
    assert measured["error"] <= 1 and not measured["problems"] and all(each[-1] == (40,) for each in shapes)


@pytest.mark.parametrize("kernel", ["rms_norm", "add_rms_norm"])
def test_the_measured_time_of_a_norm_has_the_gradient_of_its_weight(interpreted: Interpreted, kernel: str) -> None:
    interpreted(check_measured_gradients, kernel)


def test_gates_of_extreme_values(interpreted: Interpreted) -> None:
    interpreted(check_extreme_gates)


# --- dropout -----------------------------------------------------------------------------------------
SPANS: list[Spans | None] = [
    None,
    [[(2, 5)], [(0, 11)]],  # one run
    [[(0, 2), (3, 5)], [(0, 11)]],
    [[(0, 5)], [(3, 4), (1, 3), (8, 11)]],
]


def hash_of(key: int, index: int) -> int:
    """The definition in the docstring of `dropout_mask`, in integers without a limit."""
    x = (index * 0x9E3779B1 + key % 2**32) % 2**32
    x = ((x ^ x >> 16) * 0x7FEB352D + (key >> 32)) % 2**32
    x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
    return x - 2**32 if x >= 2**31 else x


def check_dropout(spans: Spans | None, p: float, dtype: torch.dtype) -> None:
    keys = [derive_seed("row", row) for row in range(3)]
    places = [[*range(5)], [*range(11)]]
    if spans is not None:
        places = [[place for start, stop in each for place in range(start, stop)] for each in spans]
    lowest = p * 2**32 - 2**31
    kept = [[[hash_of(key, a * 11 + b) >= lowest for b in places[1]] for a in places[0]] for key in keys]
    x = torch.randn(3, len(places[0]), len(places[1])).to(dtype).requires_grad_()
    gc.freeze()  # A search through all that torch imports takes a third of a second
    with kernels_forced("triton"), recorded_launches() as launches:
        y = apply_mask(x, keys, (5, 11), p=p, spans=spans)
        gc.collect()
        live = [each for each in gc.get_objects() if type(each) is Tensor and each.dtype == torch.int64]
        gc.unfreeze()
        assert all(each.numel() < x[0].numel() for each in live)  # No index of each element waits for backward
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert len(launches) == 2
    expected = torch.where(torch.tensor(kept), x.detach() * (1 / (1 - p)), 0)
    assert torch.equal(y != 0, expected != 0) and torch.equal(grad != 0, torch.tensor(kept))
    with kernels_forced("plain"):
        z = apply_mask(x, keys, (5, 11), p=p, spans=spans)
    pairs = (y, expected), (y, z), (grad, torch.autograd.grad(z, x, torch.ones_like(z))[0])
    if dtype == torch.bfloat16:  # The interpreter truncates where a GPU rounds
        assert all(((a - b).abs() <= 2**-7 * b.abs()).all() for a, b in pairs)
    else:
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("spans", SPANS)
def test_dropout_has_the_bits_of_its_definition(interpreted: Interpreted, spans: Spans | None) -> None:
    for p in (0.1, 0.5, 0.9):
        for dtype in ROUNDING:
            interpreted(check_dropout, spans, p, dtype)


def check_second_derivatives() -> None:
    """Each kernel is a function of one tensor here. A graph of a backward would miss what its kernel computes."""
    weight, keys = torch.ones(8, dtype=torch.float64), [5]
    rotations = RotaryEmbedding(8, 10.0).rotations_at(torch.arange(3), torch.float64)
    functions: dict[str, Function] = {
        "norm": lambda x: rms_norm(x, weight, 1e-3),
        "added norm": lambda x: add_norm(x, x * 2, RMSNorm(8, 1e-3).double())[1],
        "gate": lambda x: gated_activation(x, "silu"),
        "rotary": lambda x: apply_rotary(x.unsqueeze(1), rotations),
        "dropout": lambda x: apply_mask(x.unsqueeze(0), keys, (3, 8), p=0.5, spans=None),
    }
    for name, function in functions.items():
        x = doubles(3, 8)
        with kernels_forced("triton"), recorded_launches() as launches:
            (gradient,) = torch.autograd.grad((function(x) * 2).pow(3).sum(), x, create_graph=True)
            assert launches, name
            with pytest.raises(RuntimeError, match="trying to differentiate twice"):
                gradient.pow(2).sum().backward()


def test_a_second_derivative_is_refused(interpreted: Interpreted) -> None:
    interpreted(check_second_derivatives)


# --- compiled for a GPU, without one -----------------------------------------------------------------
COMPILED = pytest.mark.parametrize(
    "dtype", [dtype if dtype == torch.bfloat16 else pytest.param(dtype, marks=pytest.mark.proof) for dtype in ROUNDING]
)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The code of each launch from now on, which is compiled for Hopper, and not run."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    codes = list[str]()

    def type_of(value: Any) -> str:
        if isinstance(value, Tensor):
            return "*" + {"f": "fp", "b": "bf", "i": "i"}[str(value.dtype)[6]] + str(8 * value.dtype.itemsize)
        return "constexpr" if value is None else "i64" if abs(value) >= 2**31 else "i32"

    def compile_only(_: object, kernel: Any, grid: tuple[int, ...], arguments: Any, constants: Any) -> None:
        assert all(0 < count < 2**31 for count in grid) and all(count < 2**16 for count in grid[1:])
        options = {"num_warps": constants.pop("num_warps", 4)}
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        signature = {name: type_of(value) for name, value in named.items()} | dict.fromkeys(constants, "constexpr")
        values = constants | {name: value for name, value in named.items() if value is None}
        source = ASTSource(fn=kernel, signature={n: signature[n] for n in kernel.arg_names}, constexprs=values)
        codes.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
        assert ".target sm_90" in codes[-1]

    with launches_replaced(compile_only):
        yield codes


@COMPILED
def test_kernels_of_blocks_compile_for_a_gpu(compiled: list[str], dtype: torch.dtype) -> None:
    """The interpreter accepts more than the compiler."""
    x, weight = (torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in ((2, 3, 2, 200), (200,)))
    norm = RMSNorm(200, 1e-5).to(dtype)
    rotations = RotaryEmbedding(64, 100.0).rotations_at(torch.arange(3), dtype)
    with kernels_forced("triton"):
        outputs = [
            rms_norm(x, weight, 1e-5),
            *add_norm(x, x, norm),
            apply_rotary(x, rotations),
            *(gated_activation(x, name) for name in ACTIVATIONS),
            *(
                apply_mask(x, [1, 2], (3, 2, 200), p=0.1, spans=spans)
                for spans in (None, [[(0, 3)], [(1, 2), (0, 1)], [(0, 200)]])
            ),
        ]
        for output in outputs:
            output.sum().backward(retain_graph=True)
    assert len(compiled) >= 2 * (len(outputs) - 1)


@COMPILED
def test_losses_and_updates_compile_for_a_gpu(compiled: list[str], dtype: torch.dtype) -> None:
    from motet.models.kernels.triton_adamw import update_adamw
    from motet.models.kernels.triton_cross_entropy import losses_of_rows, statistics_of_rows, write_errors

    logits, targets = torch.zeros(3, 9000, dtype=dtype), torch.arange(3)  # Wider than a program
    for overwrites in (False, True):
        losses_of_rows(logits, targets, overwrites=overwrites)
        # Threads meet after each has read the logit of the target, which errors overwrite.
        assert "ld.global" not in compiled[-1].rpartition("bar.sync")[2].partition("st.global")[0]
    column, is_here = targets.unsqueeze(1), torch.ones(3, 1, dtype=torch.bool)
    logsumexp, _ = statistics_of_rows(logits, column, is_here)
    for scale in (None, logsumexp):
        write_errors(logits, logsumexp, column, is_here=is_here, output=logits, scale=scale)
    master, numbers, step = torch.zeros(9000).to(logsumexp.dtype), torch.zeros(6, dtype=torch.float64), torch.ones(())
    for compute in (None, logits[0]):
        update_adamw(master, logits[0], (master, master), numbers=numbers, step=step, compute=compute)
    assert len(compiled) == 7
