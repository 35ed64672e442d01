"""Rows of kernels: Triton against torch, the plain definition and its compiled form, and the table that they give."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from gpu_checks.in_place_kernels import IN_PLACE, MASTERS, measure_in_place, measure_update
from gpu_checks.rows import LeftOutError, Outcome, Report, Row
from gpu_checks.speed_rows import BANDWIDTH_ROW, seconds_of

TOKENS = {"cuda": (1024, 32768), "cpu": (3, 5)}  # With few the host is slower than a kernel
_HIDDEN = {"cuda": 4096, "cpu": 40}  # The width of an 8 B model; the gate has 3.5 times as many columns
_HEADS = {"cuda": (40, 128), "cpu": (3, 8)}
LEAST_SHARE = 0.8  # The share of the measured bandwidth that a kernel reaches with many tokens
_ROUNDING = 2**-6  # Two roundings of bfloat16, of the largest value
_CALLS = 20
WITHOUT_TRITON = {
    "rms_norm": "torch", "add_rms_norm": "plain", "rotary": "torch", "gated_activation": "cpu", "dropout": "plain",
    "cross_entropy": "plain", "adamw": "torch",
}  # fmt: skip


class _Case(NamedTuple):
    """A function of a kernel, its inputs and its weights."""

    function: Callable[..., Any]
    inputs: "tuple[Any, ...]"
    weights: "tuple[Any, ...]" = ()  # Their gradients are part of a backward
    can_compile: bool = True


def _case_of(device: str, kernel: str, tokens: int) -> _Case:
    import torch

    from motet.models.arch.layers import RMSNorm, RotaryEmbedding, add_norm, apply_rotary, gated_activation
    from motet.models.dropout_mask import apply_mask

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    hidden, (heads, head_dim) = _HIDDEN[device], _HEADS[device]
    if kernel in ("rms_norm", "add_rms_norm"):
        norm = RMSNorm(hidden, 1e-5).to(device, torch.bfloat16)
        if kernel == "rms_norm":
            return _Case(norm, (values(tokens, hidden),), (norm.weight,))
        both = values(tokens, hidden), values(tokens, hidden)
        return _Case(lambda x, y: add_norm(x, y, norm), both, (norm.weight,))
    if kernel == "rotary":
        rotations = RotaryEmbedding(head_dim, 1e4).rotations_at(torch.arange(tokens, device=device), torch.bfloat16)
        return _Case(lambda x: apply_rotary(x, rotations), (values(1, tokens, heads, head_dim),))
    if kernel == "gated_activation":
        return _Case(lambda x: gated_activation(x, "silu"), (values(tokens, 7 * hidden),))
    drop = partial(apply_mask, keys=[2**40 + 3], shape=(tokens, hidden), p=0.1)
    return _Case(lambda x: drop(x), (values(1, tokens, hidden),), can_compile=False)


def measure_kernel(device: str, kernel: str, tokens: int) -> dict[str, Any]:
    """Seconds of a forward and backward in each way, the bytes of the launches, and the largest relative error."""
    import torch

    from gpu_checks.kernel_patches import kernels_forced, recorded_launches

    case = _case_of(device, kernel, tokens)

    def outputs_of(function: Callable[..., Any]) -> "tuple[torch.Tensor, ...]":
        outputs = function(*case.inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def results(function: Callable[..., Any]) -> "list[torch.Tensor]":
        outputs = outputs_of(function)
        return [*outputs, *torch.autograd.grad(outputs, (*case.inputs, *case.weights), gradients)]

    seconds: dict[str, float] = {}
    with kernels_forced("plain"):
        gradients = [torch.randn_like(output) for output in outputs_of(case.function)]
        expected = results(case.function)
        seconds["plain"] = seconds_of(lambda: results(case.function), device, _CALLS)
    with kernels_forced(WITHOUT_TRITON):
        seconds["torch"] = seconds_of(lambda: results(case.function), device, _CALLS)
    if case.can_compile:
        compiled = torch.compile(case.function, dynamic=False, backend="inductor" if device == "cuda" else "eager")
        seconds["compiled"] = seconds_of(lambda: results(compiled), device, _CALLS)
    with kernels_forced("triton"):
        with recorded_launches() as launches:
            ours = results(case.function)
        seconds["triton"] = seconds_of(lambda: results(case.function), device, _CALLS)
    errors = [(a.float() - b.float()).abs().max() / b.float().abs().max() for a, b in zip(ours, expected, strict=True)]
    return {
        "seconds": seconds,
        "nbytes": sum(launch.nbytes for launch in launches),
        "error": max(errors).item(),
        "elements": case.inputs[0].numel(),
    }


def kernel_rows(device: str) -> list[Row]:
    """Each kernel with few and with many tokens, and the table that follows from them."""
    rows = [
        Row(_name(kernel, tokens), 4, partial(_kernel, device, kernel, tokens))
        for kernel in WITHOUT_TRITON
        for tokens in TOKENS[device]
    ]
    update = Row(f"update of {MASTERS[device]} masters", 2, partial(_update, device))
    return [*rows, Row("table of kernels", 0.1, partial(_table, device)), update]


def _name(kernel: str, tokens: int) -> str:
    return f"kernel {kernel}, {tokens} tokens"


def _kernel(device: str, kernel: str, tokens: int, report: Report) -> Outcome:
    measured = report.call(measure_in_place if kernel in IN_PLACE else measure_kernel, device, kernel, tokens)
    times = ", ".join(f"{way} {seconds * 1e6:.4g} us" for way, seconds in measured["seconds"].items())
    what = "in place" if kernel in IN_PLACE else "forward and backward"
    result, holds = f"{what}: {times}; error {measured['error']:.2g}", measured["error"] <= _ROUNDING
    bandwidth = report.value(BANDWIDTH_ROW, "Bps")
    if bandwidth:
        share = measured["nbytes"] / measured["seconds"]["triton"] / bandwidth
        result += f"; {share:.0%} of the measured bandwidth"
        holds = holds and (device != "cuda" or tokens < max(TOKENS[device]) or share >= LEAST_SHARE)
    return Outcome(result, holds, measured)


def _update(device: str, report: Report) -> Outcome:
    """The launches of an update and a CUDA graph of them."""
    measured = report.call(measure_update, device)
    times = ", ".join(f"{way} {seconds * 1e6:.4g} us" for way, seconds in measured["seconds"].items())
    return Outcome(f"{times}; {'the same' if measured['is_same'] else 'other'} bits", measured["is_same"], measured)


def _table(device: str, report: Report) -> Outcome:
    """Keep the fastest way without a compiler for each kernel and size, for runs on this device."""
    from gpu_checks.measured_kernels import MeasuredRow, write_measured_rows

    rows = []
    for kernel, without in WITHOUT_TRITON.items():
        for tokens in TOKENS[device]:
            seconds, elements = (report.value(_name(kernel, tokens), key) for key in ("seconds", "elements"))
            if seconds is None:
                raise LeftOutError(f"no measurement of {_name(kernel, tokens)}")
            ways = {"plain": "plain", "torch": without, "triton": "triton"}
            best = ways[min((way for way in ways if way in seconds), key=lambda way: seconds[way])]
            dtype = "float32" if kernel == "adamw" else "bfloat16"  # That of the tensor which `chosen` gets
            least = 0 if tokens == min(TOKENS[device]) else elements  # With fewer elements the same launches count
            rows.append(MeasuredRow(kernel=kernel, dtype=dtype, least_elements=least, implementation=best))
    if device != "cuda":
        return Outcome(f"{len(rows)} rows, not kept: a CPU runs no kernel in Triton")
    path = write_measured_rows(report.facts["device"], rows)
    return Outcome(
        f"{path}: " + ", ".join(f"{row.kernel} from {row.least_elements}: {row.implementation}" for row in rows)
    )
