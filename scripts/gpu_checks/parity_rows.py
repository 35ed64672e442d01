"""Rows of correctness: the device against the CPU in float64, layouts of several ranks on it, and the same bits."""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gpu_checks.pool import WorkerError
from gpu_checks.rows import Outcome, Report, Row
from gpu_checks.training import MODELS, Trained, same_bits, train, train_with_triton, worst_difference

LIMIT = 1e-9  # Other kernels add in another order
SPREAD = 4.0  # A recipe may be this many times as far from float64 as it is on the CPU
RECIPES = {
    "fp32": ["precision.recipe=fp32"],
    "tf32": ["precision.recipe=tf32"],
    "bf16": ["precision.recipe=bf16"],
    "fp16": ["precision.recipe=fp16", "precision.loss_scale=8"],
    "bf16, moments in bfloat16": ["precision.recipe=bf16", "precision.moment_dtype=bfloat16"],
    "bf16, moments in 8 bits": ["precision.recipe=bf16", "precision.moment_dtype=8bit"],
}
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    **{f"2 ranks, ZeRO {stage}": (2, [f"layout.zero={stage}", "layout.microbatches=2"]) for stage in range(4)},
    "2 ranks, ring all-reduce": (2, ["communication.all_reduce=ring"]),
    "4 ranks, tp=2": (4, ["layout.tp=2"]),
    "4 ranks, tp=2 sp, ZeRO 3": (4, ["layout.tp=2", "layout.sp=true", "layout.zero=3"]),
    "4 ranks, pp=2 1f1b": (4, ["layout.pp=2", "layout.microbatches=4"]),
    "4 ranks, pp=2 zb-v, tp=2": (
        4,
        ["layout.pp=2", "layout.tp=2", "layout.chunks=2", "layout.schedule=zb-v", "layout.microbatches=4"],
    ),
    "2 ranks, ZeRO 1, states on the host": (
        2,
        ["layout.zero=1", "memory.optimizer=host", "communication.overlap=forward"],
    ),
    "2 ranks, ZeRO 3, parameters on the host": (
        2,
        ["layout.zero=3", "layout.min_shard_numel=1", "memory.optimizer=host", "memory.parameters=host"],
    ),
    "2 ranks, gradients in int8": (2, ["communication.compress_gradients=int8", "layout.zero=1"]),
}
_HEADS = "model.head_dim=16"  # A multiple that each kernel takes; two query heads have a key head
ATTENTION = {
    **{
        f"attention by {name}": [_HEADS, f"precision.attention={name}"]
        for name in ("cudnn", "flash", "efficient", "plain")
    },
    "documents and a window by variable length": [_HEADS, "data.restart_documents=true", "model.sliding_window=12"],
}
COMPILED, DROPOUT = "run.compile=blocks", "model.dropout=0.1"
TRITON_RECIPES = "bf16", "fp16", "fp32"
TRITON_KERNELS = {
    "adamw_elements", "cross_entropy_rows", "drop_elements", "gate_backward", "gate_forward", "rms_norm_backward",
    "rms_norm_forward", "rotate_pairs",
}  # fmt: skip
HOST = "memory.optimizer=host"
HOST_PLACES: dict[str, list[str]] = {
    "states on the host": [HOST],
    "states on the host, the update overlaps with the forward": [
        HOST,
        "layout.zero=1",
        "communication.overlap=forward",
        "communication.bucket_mib=0.05",
    ],
    "states on the host, micro-batches, ZeRO 2": [HOST, "layout.zero=2", "layout.microbatches=4"],
    "activations on the host": ["memory.activations=host"],
    "activations on the host, full recomputation": ["memory.activations=host", "memory.recompute=full"],
    "parameters on the host": [HOST, "memory.parameters=host", "layout.zero=3"],
    "parameters on the host, micro-batches": [HOST, "memory.parameters=host", "layout.zero=3", "layout.microbatches=4"],
    "states on disk": ["memory.optimizer=disk", "memory.folder={folder}"],
}
DELAYED = "states on the host, delayed"
DELAYED_UPDATE = [HOST, "memory.update=delayed"]
_references: dict[tuple[str, ...], Trained] = {}


def parity_rows(device: str, folder: str) -> list[Row]:
    """All rows; rows that cover more of the code come first."""
    compare, stages = partial(_against_cpu, device, folder), range(4)
    rows = [Row(f"{model}: float64 against the CPU", 3, partial(compare, [], model)) for model in MODELS]
    policies = {name: [f"memory.recompute={name}"] for name in ("full", "selective")}
    policies["auto"] = ["memory.recompute=auto", "memory.budget=1GiB"]
    recomputed = [("GPT-2", "full"), ("BERT", "selective"), ("T5", "full"), ("decoder", "selective"), ("GPT-2", "auto")]
    rows += [
        Row(f"{model}: {policy} recomputation", 3, partial(compare, policies[policy], model))
        for model, policy in recomputed
    ]
    rows += [Row(f"ZeRO {stage}, micro-batches", 3, partial(_stage, compare, stage)) for stage in stages]
    rows += [
        Row(f"{name}: as far from float64 as on the CPU", 4, partial(_recipe, device, folder, recipe, name))
        for name, recipe in RECIPES.items()
    ]
    rows += [
        Row(f"bf16, {name}: as far from float64 as on the CPU", 3, partial(_attention, device, folder, settings))
        for name, settings in ATTENTION.items()
    ]
    triton_s, compiled_s = (5, 20) if device == "cuda" else (60, 60)  # A CPU interprets kernels
    rows += [
        Row(
            f"{name}, kernels in Triton: as far from float64 as on the CPU",
            triton_s,
            partial(_triton, device, folder, name),
        )
        for name in TRITON_RECIPES
    ]
    compiled = partial(_compiled, device, folder)
    rows.append(Row("bf16, compiled blocks: as far from float64 as on the CPU", compiled_s, compiled))
    rows.append(Row("stopped, saved and resumed: same bits", 4, partial(_resumed, device, folder)))
    return rows


def layout_rows(device: str, folder: str) -> list[Row]:
    """Layouts of 2 and 4 ranks on one device."""
    rows = [
        Row(f"{name}: float64 against one CPU rank", 5, partial(_layout, device, folder, world, settings))
        for name, (world, settings) in LAYOUTS.items()
    ]
    rows.append(Row("motet train, stopped and resumed on the command line", 45, partial(_command, device, folder)))
    return [Row("reproducible: same bits again, and on 2 ranks", 5, partial(_bits, device, folder)), *rows]


def host_rows(device: str, folder: str) -> list[Row]:
    """Memory beyond that of the device, with copies of which every row says the bytes."""
    rows = [
        Row(f"{name}: float64 against the CPU", 3, partial(_on_host, device, folder, settings, []))
        for name, settings in HOST_PLACES.items()
    ]
    delayed = partial(_on_host, device, folder, DELAYED_UPDATE, DELAYED_UPDATE)
    rows.append(Row(f"{DELAYED}: float64 against the CPU with the same settings", 3, delayed))
    recipe = partial(_recipe, device, folder, [*RECIPES["bf16"], HOST], "bf16")
    return [*rows, Row("bf16, states on the host: as far from float64 as on the CPU", 4, recipe)]


def _on_host(device: str, folder: str, settings: Sequence[str], reference: Sequence[str], report: Report) -> Outcome:
    expected = _on_cpu(report, folder, reference, "decoder")
    trained = report.call(train, None, device, folder, [each.format(folder=folder) for each in settings], "decoder")
    outcome = _verdict(worst_difference(trained, expected))
    sent = f"{trained.to_host} bytes to the host and {trained.to_device} to the device"
    has_sent = trained.to_host > 0 < trained.to_device
    return Outcome(f"{outcome.result}, {sent}", bool(outcome.holds) and has_sent)


def _on_cpu(report: Report, folder: str, overrides: Sequence[str], model: str) -> Trained:
    key = (model, *overrides)
    if key not in _references:
        _references[key] = report.call(train, None, "cpu", folder, overrides, model)
    return _references[key]


def _verdict(difference: float, limit: float = LIMIT) -> Outcome:
    return Outcome(f"largest difference {difference:.1e} (limit {limit:.0e})", difference <= limit)


def _against_cpu(device: str, folder: str, overrides: Sequence[str], model: str, report: Report) -> Outcome:
    expected = _on_cpu(report, folder, [], model)
    return _verdict(worst_difference(report.call(train, None, device, folder, overrides, model), expected))


def _stage(compare: partial[Outcome], stage: int, report: Report) -> Outcome:
    return compare([f"layout.zero={stage}", "layout.microbatches=4"], "GPT-2", report)


def _recipe(device: str, folder: str, recipe: Sequence[str], name: str, report: Report) -> Outcome:
    exact = _on_cpu(report, folder, [], "decoder")
    # Processors have no TF32, which keeps 10 bits of a product's inputs, as fp16 does.
    on_cpu = _on_cpu(report, folder, RECIPES["fp16"] if name == "tf32" else recipe, "decoder")
    return _as_far(report.call(train, None, device, folder, recipe, "decoder"), on_cpu, exact)


def _attention(device: str, folder: str, settings: Sequence[str], report: Report) -> Outcome:
    exact = _on_cpu(report, folder, [each for each in settings if not each.startswith("precision.")], "decoder")
    narrow = [*settings, *RECIPES["bf16"]]
    on_cpu = _on_cpu(report, folder, narrow, "decoder")
    return _as_far(report.call(train, None, device, folder, narrow, "decoder"), on_cpu, exact)


def _as_far(trained: Trained, on_cpu: Trained, exact: Trained) -> Outcome:
    ours, theirs = (_scalar_error(each, exact) for each in (trained, on_cpu))
    result = f"losses and norms are {ours:.1e} from float64, on the CPU {theirs:.1e}"
    return Outcome(result, ours <= SPREAD * theirs and theirs < 1, {"device": ours, "cpu": theirs})


def _triton(device: str, folder: str, name: str, report: Report) -> Outcome:
    exact, on_cpu = (_on_cpu(report, folder, [*recipe, DROPOUT], "decoder") for recipe in ([], RECIPES[name]))
    trained = report.call(train_with_triton, None, device, folder, [*RECIPES[name], DROPOUT], "decoder")
    outcome, missing = _as_far(trained, on_cpu, exact), sorted(TRITON_KERNELS - trained.launched)
    ran = f"{len(TRITON_KERNELS) - len(missing)} of {len(TRITON_KERNELS)} kernels ran"
    result = "; ".join([outcome.result, ran, *(f"{kernel} did not" for kernel in missing)])
    if device != "cuda" and name == "bf16":
        return Outcome(f"{result}; the interpreter truncates, where a GPU rounds", None, outcome.values)
    return Outcome(result, outcome.holds and not missing, outcome.values)


def _compiled(device: str, folder: str, report: Report) -> Outcome:
    """The blocks of the CPU are not compiled."""
    exact, on_cpu = (_on_cpu(report, folder, recipe, "decoder") for recipe in ([], RECIPES["bf16"]))
    trained = report.call(train, None, device, folder, [*RECIPES["bf16"], COMPILED], "decoder")
    outcome = _as_far(trained, on_cpu, exact)
    return Outcome(f"{outcome.result}; {trained.graphs} graphs", outcome.holds and trained.graphs > 0, outcome.values)


def _scalar_error(a: Trained, b: Trained) -> float:
    pairs = [*zip(a.losses, b.losses, strict=True), *zip(a.norms, b.norms, strict=True)]
    return max(abs(x - y) / abs(y) for x, y in pairs)


def _resumed(device: str, folder: str, report: Report) -> Outcome:
    settings = ["precision.recipe=bf16"]
    whole = report.call(train, None, device, folder, settings, "GPT-2")
    halves = report.call(train, None, device, folder, settings, "GPT-2", 2)
    return Outcome("yes" if (is_same := same_bits(whole, halves)) else "no", is_same)


def _command(device: str, folder: str, report: Report) -> Outcome:
    """A complete run with evaluation, samples of text and events, by separate processes."""
    run, losses = Path(folder, "run"), list[float]()
    settings = [f"data.source={folder}/text.md", f"data.cache={folder}/cache", "data.tokenizer=bytes"]
    settings += ["data.batch_sequences=8", "precision.recipe=bf16", f"run.device={device}", "run.steps=20"]
    settings += [
        "monitor.evaluate_every=10",
        "monitor.evaluate_batches=2",
        "run.ranks=1",
        "run.stop_at=10",
        "run.compile=off",
    ]
    for words in (["tiny", *settings, "--run-folder", str(run)], ["--resume-from", str(run)]):
        command = [sys.executable, "-m", "motet", "train", "--json", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            raise WorkerError("\n".join(done.stderr.strip().splitlines()[-6:]))
        summary = json.loads(done.stdout)
        losses += [summary["first_loss"], summary["final_loss"]]
    rate = f"{summary['tokens_per_s']:,.0f} tokens/s, {summary['mfu'] or 0:.1%} of the peak that motet assumes"
    result = f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {rate}"
    return Outcome(result, summary["steps"] == 20 and losses[-1] < losses[0], {"summary": summary})


def _bits(device: str, folder: str, report: Report) -> Outcome:
    settings = ["precision.recipe=fp32", "run.reproducible=layout"]
    first, again = (report.call(train, None, device, folder, settings, "decoder") for _ in range(2))
    ranks = report.ranks(2, train, device, folder, settings, "decoder")[0]
    is_same, is_same_on_ranks = same_bits(first, again), same_bits(first, ranks)
    result = f"again: {'yes' if is_same else 'no'}; on 2 ranks: {'yes' if is_same_on_ranks else 'no'}"
    return Outcome(result, is_same and is_same_on_ranks)


def _layout(device: str, folder: str, world: int, settings: Sequence[str], report: Report) -> Outcome:
    trained = report.ranks(world, train, device, folder, settings, "decoder")[0]
    expected = _on_cpu(report, folder, [], "decoder")
    if "communication.compress_gradients=int8" in settings:
        error = _scalar_error(trained, expected)
        return Outcome(f"losses and norms are {error:.1e} from one rank without compression", error < 0.1)
    return _verdict(worst_difference(trained, expected))
