"""Rows of kernels: Triton against torch, the plain definition and its compiled form, and the table that they give."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from gpu_checks.in_place_kernels import IN_PLACE, MASTERS, measure_in_place, measure_update, worst_error
from gpu_checks.rows import LeftOutError, Outcome, Report, Row
from gpu_checks.speed_rows import BANDWIDTH_ROW, compiled, seconds_of_ways

TOKENS = {"cuda": (1024, 32768), "cpu": (3, 5)}  # Few and many
_HIDDEN = {"cuda": 4096, "cpu": 40}  # The width of an 8 B model; the gate has 3.5 times as many columns
_HEADS = {"cuda": (40, 128), "cpu": (3, 8)}
LEAST_SHARE = 0.8  # The share of the measured bandwidth that a kernel reaches with many tokens
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
    not_compiled: str = ""  # A reason


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
    return _Case(
        lambda x: drop(x), (values(1, tokens, hidden),), not_compiled="its plain form draws the mask in a loop"
    )


def measure_kernel(device: str, kernel: str, tokens: int, compiles: bool) -> dict[str, Any]:
    """Seconds of a forward and backward in each way, the bytes of the launches, and the largest error."""
    import torch

    from gpu_checks.kernel_patches import KernelLaunch, kernels_forced, recorded_launches

    case = _case_of(device, kernel, tokens)

    def outputs_of(function: Callable[..., Any]) -> "tuple[torch.Tensor, ...]":
        outputs = function(*case.inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def results(function: Callable[..., Any]) -> "list[torch.Tensor]":
        outputs = outputs_of(function)
        return [*outputs, *torch.autograd.grad(outputs, (*case.inputs, *case.weights), gradients)]

    def run(forced: Any, function: Callable[..., Any]) -> "list[torch.Tensor]":
        with kernels_forced(forced):
            return results(function)

    with kernels_forced("plain"):
        gradients = [torch.randn_like(output) for output in outputs_of(case.function)]
    ways = {"plain": "plain", "torch": WITHOUT_TRITON, "triton": "triton"}
    calls = {name: partial(run, forced, case.function) for name, forced in ways.items()}
    if compiles and not case.not_compiled:
        calls["compiled"] = partial(run, "plain", compiled(case.function, device))
    seconds, problems = seconds_of_ways(calls, device, _CALLS)
    problems |= {"compiled": case.not_compiled} if case.not_compiled else {}
    launches, error = list[KernelLaunch](), math.inf
    if "triton" in seconds:
        with recorded_launches() as launches:
            ours = calls["triton"]()
        error = worst_error(ours, calls["plain"]())
    nbytes, elements = sum(launch.nbytes for launch in launches), case.inputs[0].numel()
    return {"seconds": seconds, "problems": problems, "nbytes": nbytes, "error": error, "elements": elements}


def kernel_rows(device: str) -> list[Row]:
    """Each kernel with few and with many tokens, and the table that follows from them."""
    rows = [
        Row(_name(kernel, tokens), 8 if tokens == max(TOKENS[device]) else 4, partial(_kernel, device, kernel, tokens))
        for kernel in WITHOUT_TRITON
        for tokens in TOKENS[device]
    ]
    update = Row(f"update of {MASTERS[device]} masters", 2, partial(_update, device))
    return [*rows, Row("table of kernels", 0, partial(_table, device)), update]


def _name(kernel: str, tokens: int) -> str:
    return f"kernel {kernel}, {tokens} tokens"


def _kernel(device: str, kernel: str, tokens: int, report: Report) -> Outcome:
    has_aim = tokens == max(TOKENS[device])  # And a compiled form; with few tokens the host is slower than a kernel
    measure = measure_in_place if kernel in IN_PLACE else measure_kernel
    measured = report.call(measure, device, kernel, tokens, has_aim)
    seconds, ours_s = measured["seconds"], measured["seconds"].get("triton")
    times = ", ".join(
        f"{way} {each * 1e6:.4g} us" + (f" ({each / ours_s:.3g} x triton)" if ours_s and way != "triton" else "")
        for way, each in seconds.items()
    )
    texts = [f"{'in place' if kernel in IN_PLACE else 'forward and backward'}: {times}"]
    texts += [f"{way} not measured: {problem}" for way, problem in measured["problems"].items()]
    texts.append(f"error {measured['error']:.2g} of what rounding allows")
    holds, bandwidth = measured["error"] <= 1, report.value(BANDWIDTH_ROW, "Bps")
    if bandwidth and ours_s:
        share = measured["nbytes"] / ours_s / bandwidth
        texts.append(f"{share:.0%} of the measured bandwidth{f' (aim {LEAST_SHARE:.0%})' if has_aim else ''}")
        holds = holds and (device != "cuda" or not has_aim or share >= LEAST_SHARE)
    return Outcome("; ".join(texts), holds, measured)


def _update(device: str, report: Report) -> Outcome:
    """The launches of an update and a CUDA graph of them."""
    measured = report.call(measure_update, device)
    times = ", ".join(f"{way} {seconds * 1e6:.4g} us" for way, seconds in measured["seconds"].items())
    text = f"{times}; {measured['replays']} replays, {'the same' if measured['is_same'] else 'other'} bits"
    return Outcome(text, measured["is_same"] and (device != "cuda" or measured["replays"] > 0), measured)


def _table(device: str, report: Report) -> Outcome:
    """Keep the fastest way without a compiler for each kernel and size, for runs on this device."""
    from gpu_checks.measured_kernels import MeasuredRow, write_measured_rows

    rows, missing = list[MeasuredRow](), list[str]()
    for kernel, without in WITHOUT_TRITON.items():
        if any(not report.value(_name(kernel, tokens), "seconds") for tokens in TOKENS[device]):
            missing.append(kernel)
            continue
        for tokens in TOKENS[device]:
            values = (report.value(_name(kernel, tokens), key) for key in ("seconds", "elements", "error"))
            seconds, elements, error = values
            ways = {"plain": "plain", "torch": without, **({"triton": "triton"} if error <= 1 else {})}
            best = ways[min(ways.keys() & seconds.keys(), key=lambda way: seconds[way])]
            dtype = "float32" if kernel == "adamw" else "bfloat16"  # That of the tensor which `chosen` gets
            least = 0 if tokens == min(TOKENS[device]) else elements  # With fewer elements the same launches count
            rows.append(MeasuredRow(kernel=kernel, dtype=dtype, least_elements=least, implementation=best))
    if not rows:
        raise LeftOutError("no kernel is measured at both sizes")
    chosen = ", ".join(f"{row.kernel} from {row.least_elements}: {row.implementation}" for row in rows)
    chosen += f"; {', '.join(missing)} not measured at both sizes" if missing else ""
    if device != "cuda":
        return Outcome(f"{chosen}; not kept: a CPU runs no kernel in Triton")
    return Outcome(f"{write_measured_rows(report.facts['device'], rows)}: {chosen}")
