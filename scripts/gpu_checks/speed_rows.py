"""Rows of speed: rates of the device, blocks and whole models as they run today, waits of the host, and the plan."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from gpu_checks.rows import Outcome, Report, Row

_REPEATS = 5
# Llama 3.2 1B and 3B and Llama 3.1 8B; without tied embeddings the first two have 1.5 and 3.6 billion parameters.
SHAPES = {
    "1 B": "layers=16, hidden=2048, heads=32, kv_heads=8, ffn_hidden=8192",
    "3 B": "layers=28, hidden=3072, heads=24, kv_heads=8, ffn_hidden=8192",
    "8 B": "layers=32, hidden=4096, heads=32, kv_heads=8, ffn_hidden=14336",
}
_TINY = "layers=2, hidden=64, heads=4, kv_heads=2, ffn_hidden=128"  # On a CPU, to see that everything runs
_VOCABULARY = {"cuda": 128256, "cpu": 512}
_TOKENS = {"cuda": 4096, "cpu": 64}
AIM = ("8 B", 4096, 0.6)  # A block of this shape and length reaches this share of the measured peak
PEAK_ROW, BANDWIDTH_ROW = "bf16 matmul, measured peak", "memory bandwidth"


def seconds_of(call: Callable[[], object], device: str, calls: int = 1) -> float:
    """The median time of a call, of several in a row that the host need not wait for, after two rounds of warm-up."""
    import torch

    calls, times = calls if device == "cuda" else 1, []
    for _ in range(_REPEATS + 2):
        start_s = perf_counter()
        for _ in range(calls):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((perf_counter() - start_s) / calls)
    return median(times[2:])


def seconds_of_ways(
    ways: Mapping[str, Callable[[], object]], device: str, calls: int
) -> tuple[dict[str, float], dict[str, str]]:
    """The seconds of a call of each way, and the first line of the error of each way that fails."""
    seconds, problems = dict[str, float](), dict[str, str]()
    for name, call in ways.items():
        try:
            seconds[name] = seconds_of(call, device, calls)
        except Exception as error:  # noqa: BLE001  # A way that fails must not cost the others
            problems[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return seconds, problems


def compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The function as torch.compile makes it with its first call; on a CPU without code of inductor."""
    import torch

    backend = "inductor" if device == "cuda" else "eager"
    result: Callable[..., Any] = torch.compile(function, dynamic=False, backend=backend)
    return result


# --- rates -----------------------------------------------------------------------------------------


def matmul_flops(device: str, rows: int, inner: int, columns: int, is_float8: bool = False) -> float:
    """FLOP/s of a product of random matrices."""
    import torch

    a, b = torch.randn(rows, inner, device=device), torch.randn(columns, inner, device=device)
    if is_float8:
        a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t(), torch.ones((), device=device)
        call = partial(torch._scaled_mm, a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    else:
        a, b = a.bfloat16(), b.bfloat16().t()
        call = partial(torch.mm, a, b)
    return 2.0 * rows * inner * columns / seconds_of(call, device, 20)


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written, of a copy on the device."""
    import torch

    source = torch.randn((1 << 30 if device == "cuda" else 1 << 22) // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device, 20)


def rate_rows(device: str) -> list[Row]:
    """The rows of rates; the peak, to which shares refer, comes first."""
    size = 8192 if device == "cuda" else 256
    return [
        Row(PEAK_ROW, 4, partial(_peak, device, [size, 2 * size] if device == "cuda" else [size])),
        Row(BANDWIDTH_ROW, 2, partial(_bandwidth, device)),
    ]


def more_rate_rows(device: str) -> list[Row]:
    """Products of the shapes of models, and in float8."""
    scale = 1 if device == "cuda" else 32
    shapes = [(4096, 2048, 16384), (4096, 8192, 2048), (4096, 3072, 16384), (4096, 4096, 28672), (1024, 2048, 128256)]
    shapes += [(size, size, size) for size in (1024, 2048, 4096)]
    size = 8192 // scale
    rows = [
        Row(f"bf16 matmul {m} x {k} x {n}", 1, partial(_product, device, m // scale, k // scale, n // scale, False))
        for m, k, n in shapes
    ]
    float8 = Row("float8 matmul 8192 x 8192 x 8192", 2, partial(_product, device, size, size, size, True))
    return [*rows, *([float8] if device == "cuda" else [])]


def _peak(device: str, sizes: list[int], report: Report) -> Outcome:
    best = max(report.call(matmul_flops, device, size, size, size) for size in sizes)
    return Outcome(f"{best / 1e12:.4g} TFLOP/s", values={"flops": best})


def _bandwidth(device: str, report: Report) -> Outcome:
    rate = report.call(copy_bandwidth, device)
    return Outcome(f"{rate / 1e12:.3g} TB/s, read and written", values={"Bps": rate})


def _product(device: str, m: int, k: int, n: int, is_float8: bool, report: Report) -> Outcome:
    rate = report.call(matmul_flops, device, m, k, n, is_float8)
    return Outcome(f"{rate / 1e12:.4g} TFLOP/s{_share(rate, report)}", values={"flops": rate})


# --- blocks ----------------------------------------------------------------------------------------


def block_seconds(device: str, shape: str, tokens: int, layers: int, *, compiles: bool = False) -> tuple[float, float]:
    """Seconds of the forward and backward of one block, and its FLOPs."""
    import torch

    from motet.models.arch.attention_mask import causal_mask
    from motet.models.arch.decoder import CausalDecoder
    from motet.models.compilation.compiled_blocks import compile_blocks
    from motet.train.build import precision_context

    job = job_of_shape(device, shape, 1, 1, 1.0, "none")
    settings = job.model.model_copy(update={"layers": layers})
    with torch.device(device):
        module = CausalDecoder(settings.model_copy(update={"vocab_size": 512})).bfloat16()
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.02)
    positions = torch.arange(tokens, device=device)[None]
    x = torch.randn(1, tokens, settings.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient, mask = torch.randn_like(x), causal_mask(None, None, None)
    assert module.rotary is not None
    rotary = module.rotary.rotations_at(positions, x.dtype)
    if compiles:
        compile_blocks(module, falls_back=False)

    def step() -> None:
        out = x
        for block in module.blocks:
            out = block(out, mask, rotary)
        out.backward(gradient)
        module.zero_grad()

    with precision_context(job, torch.device(device)):
        seconds = seconds_of(step, device) / layers
    return seconds, _flops_of(device, shape, tokens, layers=2) - _flops_of(device, shape, tokens, layers=1)


def compiled_block_seconds(*sizes: Any) -> tuple[float, float]:
    """The same of a compiled block."""
    return block_seconds(*sizes, compiles=True)


def job_of_shape(
    device: str, shape: str, rows: int, microbatches: int, length: float, recompute: str, *, more: Sequence[str] = ()
) -> Any:
    from motet.train.job import load_job

    tokens = int(_TOKENS[device] * length)
    sizes = SHAPES[shape] if device == "cuda" else _TINY
    vocabulary = f"vocab_size={_VOCABULARY[device]}, context={2 * _TOKENS[device]}, tied=false"
    settings = [
        *(f"model={{family='decoder', {sizes}, {vocabulary}}}", "data.tokenizer=bytes", f"run.device={device}"),
        *(f"data.sequence_length={tokens}", f"data.batch_sequences={rows}", f"layout.microbatches={microbatches}"),
        *("precision.recipe=bf16", "run.steps=100", "run.ranks=1", "run.compile=off", "data.restart_documents=false"),
        *([f"memory.recompute={recompute}"] if recompute != "none" else []),
        *more,
    ]
    return load_job("tiny", settings)


def _flops_of(device: str, shape: str, tokens: int, layers: int) -> float:
    from motet.train.job import training_flops

    job = job_of_shape(device, shape, 1, 1, tokens / _TOKENS[device], "none")
    flops = training_flops(job.model_copy(update={"model": job.model.model_copy(update={"layers": layers})}))
    assert flops is not None
    return flops


def block_rows(device: str) -> list[Row]:
    """Blocks of three models, at two lengths of a sequence."""
    lengths = (4096, 8192) if device == "cuda" else (64, 128)
    return [
        Row(f"{shape}: a block at {tokens} tokens", 5, partial(_block, device, shape, tokens))
        for tokens in lengths
        for shape in SHAPES
    ]


def compiled_block_rows(device: str) -> list[Row]:
    """The same blocks as graphs of torch.compile, whose first call takes most of the time of a row; the aim first."""
    tokens = 4096 if device == "cuda" else 64
    return [
        Row(f"{shape}: a compiled block at {tokens} tokens", 30, partial(_compiled_block, device, shape, tokens))
        for shape in reversed(SHAPES)
    ]


def _block(device: str, shape: str, tokens: int, report: Report, *, compiles: bool = False) -> Outcome:
    layers = 4 if device == "cuda" else 1
    measure = compiled_block_seconds if compiles else block_seconds
    seconds, flops = report.call(measure, device, shape, tokens, layers)
    rate = flops / seconds
    result = f"{seconds * 1e3:.3g} ms forward and backward, {rate / 1e12:.4g} TFLOP/s{_share(rate, report)}"
    peak, (*aimed, least) = report.value(PEAK_ROW, "flops"), AIM
    holds = rate / peak >= least if peak and [shape, tokens] == aimed else None
    aim = "" if holds is None else f" (aim {least:.0%})"
    return Outcome(result + aim, holds, {"seconds": seconds, "flops": flops})


def _compiled_block(device: str, shape: str, tokens: int, report: Report) -> Outcome:
    return _block(device, shape, tokens, report, compiles=True)


def _share(rate: float, report: Report) -> str:
    peak = report.value(PEAK_ROW, "flops")
    return f", {rate / peak:.1%} of the measured peak" if peak else ""
