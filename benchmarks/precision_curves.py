"""Loss curves of precision recipes: a case that fp16 loses without scaling, and every recipe against fp32.

    python benchmarks/precision_curves.py [--steps 1000] [--seeds 0 1 2] [--only fp32 bf16 ...] [--page]

First a small network is trained whose gradients are below the smallest number of float16 (parts/faint_gradients.py): in
fp32, and in fp16 without and with loss scaling. Then each recipe trains a small decoder with the values, batches and
learning rates of the fp32 run of its seed. All runs are made in this process, on one thread. --page writes
docs/benchmarks/precision.md and its pictures.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from parts.arguments import parse_arguments
from parts.faint_gradients import WAYS, FaintRun, train_on_faint_gradients
from parts.report.pages import DOCS, fill, load_of_machine, table
from parts.report.plots import Axis, Line, Row, save_dot_plot, save_line_plot

from motet.cluster.local_device import LocalDevice, discover_device
from motet.core.svg import COLOURS
from motet.parallel.process.process_group import RankGroup
from motet.precision.numerics import numerics_remark
from motet.train.build import build_components, precision_context
from motet.train.job import Job, load_job, training_flops
from motet.train.optimizer.optimizer_settings import learning_rate_factor

PAGE = DOCS / "precision.md"
FAINT_PLOT, GAP_PLOT, LOSS_PLOT = (DOCS / f"precision-{name}.svg" for name in ("underflow", "gaps", "losses"))
FAINT_STEPS = 600
LAST = 50
"""The steps at the end of a run whose mean is its final loss; also the steps of a point of the pictures."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for 95 % of both sides, by the number of seeds."""
SIZE = "vocab_size=260, context=64, layers=2, hidden=64, heads=2, ffn_hidden=176"
COMMON = [
    *(f"model={{family='decoder', {SIZE}}}", "data.source=stdlib", "data.tokenizer=bytes"),
    *("data.sequence_length=64", "data.batch_sequences=4", "optimizer.learning_rate=1e-3"),
    *("optimizer.schedule.warmup_steps=50", "run.device=cpu", "run.threads=1"),
    *("monitor.tensorboard=false", "monitor.sample_tokens=0"),
]
CONTROLS = ("fp32, other order of sums", "fp64")
"""They differ from fp32 by less than any recipe of 16 bits: their gaps show the effect of rounding the last bit."""
FOUR_SUMS = ["layout.microbatches=4"]
"""Gradients of one micro-batch need no sum."""
RECIPES: dict[str, list[str]] = {
    "fp32": [],
    "fp32, other order of sums": ["layout.microbatches=2"],
    "fp64": ["precision.recipe=fp64"],
    "fp32, float64 masters": ["precision.master_dtype=float64"],
    "fp32, bfloat16 gradients": [*FOUR_SUMS, "precision.reduce_dtype=bfloat16"],
    "fp32, bfloat16 moments": ["precision.moment_dtype=bfloat16"],
    "fp32, 8-bit moments": ["precision.moment_dtype=8bit"],
    "bf16": ["precision.recipe=bf16"],
    "bf16, bfloat16 gradients": ["precision.recipe=bf16", *FOUR_SUMS, "precision.reduce_dtype=bfloat16"],
    "bf16, float64 masters": ["precision.recipe=bf16", "precision.master_dtype=float64"],
    "bf16, 8-bit moments": ["precision.recipe=bf16", "precision.moment_dtype=8bit"],
    "fp16": ["precision.recipe=fp16"],
    "fp16, float64 masters": ["precision.recipe=fp16", "precision.master_dtype=float64"],
}


@dataclass(frozen=True)
class RecipeRun:
    """A run of the decoder."""

    losses: list[float]
    overflows: int
    """Steps that updated nothing."""
    scale: int | None
    """The loss scale of the last step."""

    @property
    def final(self) -> float:
        return fmean(self.losses[-LAST:])


FaintRuns = dict[tuple[str, int], FaintRun]
RecipeRuns = dict[tuple[str, int], RecipeRun]
"""Runs by recipe and seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help=f"at most {max(T_95)}")
    parser.add_argument("--faint-steps", type=int, default=FAINT_STEPS, help="steps of the small network")
    parser.add_argument("--only", nargs="+", default=list(RECIPES), choices=list(RECIPES), help="recipes beside fp32")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name} and its pictures")
    options = parse_arguments(parser, steps=20, seeds=[0, 1], only=["bf16"], faint_steps=60)
    torch.set_num_threads(1)
    load = load_of_machine()
    faint = {
        (way, seed): train_on_faint_gradients(precision, seed, options.faint_steps)
        for seed in options.seeds
        for way, precision in WAYS.items()
    }
    print(faint_table(faint), flush=True)
    names = [name for name in RECIPES if name in {"fp32", *options.only}]
    device = discover_device("cpu", ["float32", "bfloat16", "float16"])
    with tempfile.TemporaryDirectory() as folder:
        jobs = {
            (name, seed): job_of(RECIPES[name], seed, options.steps, folder=folder, device=device)
            for seed in options.seeds
            for name in names
        }
        runs = {key: train(*key, jobs[key], folder=Path(folder)) for key in jobs}
    parts = [
        load,
        *(faint_table(faint), f"![Loss of the case with small gradients]({FAINT_PLOT.name})"),
        *(training_conditions(jobs, device), recipe_table(jobs, runs), summary(runs)),
        *(f"![Gaps of the final losses]({GAP_PLOT.name})", f"![Loss less that of fp32]({LOSS_PLOT.name})"),
    ]
    print("\n\n".join(parts))
    if options.page:
        fill(PAGE, parts)
        draw_faint_gradients(faint)
        draw_gaps(runs)
        draw_losses(runs)


# --- runs of the decoder ----------------------------------------------------------------------------


def job_of(settings: Sequence[str], seed: int, steps: int, *, folder: str, device: LocalDevice) -> Job:
    """The job of a recipe; products of matrices are emulated where the processor multiplies slowly."""
    overrides = [*COMMON, *settings, f"run.seed={seed}", f"run.steps={steps}", f"data.cache={folder}"]
    job = load_job("tiny", overrides)
    peaks, compute = device.peak_flops, job.precision.resolved.compute
    is_slow = compute in ("bfloat16", "float16") and peaks[compute].value < peaks["float32"].value
    return load_job("tiny", [*overrides, "precision.emulate=true"]) if is_slow else job


def train(name: str, seed: int, job: Job, *, folder: Path) -> RecipeRun:
    """Train to the end; a run that diverges ends the benchmark with its name."""
    begin, steps, schedule = time.perf_counter(), job.run.steps or 0, job.optimizer.schedule
    group, losses, overflows, scale = RankGroup(0, 1, None, torch.device("cpu")), list[float](), 0, None
    with precision_context(job), tempfile.TemporaryDirectory(dir=folder) as run:
        train_step = build_components(job, group, Path(run)).make_train_step(job)
        for step in range(steps):
            rate = learning_rate_factor(schedule, step, steps) * job.optimizer.learning_rate
            result = train_step.step(step, rate, last=step + 1 == steps)
            overflows, scale = overflows + (result.overflow is not None), result.loss_scale
            if not result.is_finite and result.overflow is None:
                raise SystemExit(f"{name}, seed {seed}: step {step + 1} is not finite")
            losses.append(result.loss)
    done = RecipeRun(losses, overflows, scale)
    print(f"{name}, seed {seed}: {done.final:.4f}, {time.perf_counter() - begin:.0f} s", flush=True)
    return done


# --- the page ---------------------------------------------------------------------------------------


def faint_table(runs: FaintRuns) -> str:
    head = [
        "run", "final loss", "over seeds", "zero gradients of parameters", "zero gradients of activations",
        "steps without update", "loss scale at the end",
    ]  # fmt: skip
    rows = []
    for way in WAYS:
        own = [run for (name, _), run in runs.items() if name == way]
        shares = [f"{fmean(run.shares.share(kind) for run in own):.2%}" for kind in ("parameters", "activations")]
        overflows = sum(stats.is_overflow for run in own for stats in run.stats)
        scales = sorted({run.stats[-1].loss_scale for run in own})
        losses = ranged([fmean(run.losses[-LAST:]) for run in own], ".4f")
        rows.append([way, *losses, *shares, str(overflows), ", ".join(map(str, scales))])
    return table(head, rows)


def training_conditions(jobs: dict[tuple[str, int], Job], device: LocalDevice) -> str:
    job = next(iter(jobs.values()))
    flops = training_flops(job)
    assert flops is not None
    speeds = ", ".join(f"{dtype} {peak.value / 1e9:.3g}" for dtype, peak in device.peak_flops.items())
    emulated = sorted({job.precision.resolved.compute for job in jobs.values() if job.precision.emulate})
    how = f"`precision.emulate = true` for {' and '.join(emulated)}" if emulated else "its own products alone"
    tf32 = numerics_remark(load_job("tiny", ["precision.recipe=tf32"]).precision, torch.device("cpu"))
    return (
        f"The decoder (`{SIZE}`) takes {flops / 1e9:.3g} GFLOP a step, by motet's count, and {job.run.steps} steps. "
        f"One core of this processor reaches, in GFLOP/s of matrix products: {speeds}. So these runs use {how}. "
        f"tf32 is left out: {tf32}."
    )


def recipe_table(jobs: dict[tuple[str, int], Job], runs: RecipeRuns) -> str:
    head = [
        "recipe", "settings", "16-bit products", "final loss", "over seeds", "gap to fp32", "95 %", "over seeds",
        "steps without update", "loss scale at the end",
    ]  # fmt: skip
    rows = []
    for name in names_of(runs):
        seeds = [seed for recipe, seed in runs if recipe == name]
        own, job = [runs[name, seed] for seed in seeds], jobs[name, seeds[0]]
        is_narrow = job.precision.resolved.compute in ("bfloat16", "float16")
        products = ("emulated" if job.precision.emulate else "native") if is_narrow else ""
        gaps = ["", "", ""]
        if name != "fp32":
            mean, spread = ranged(gaps_of(runs, name), "+z.5f")
            gaps = [mean, f"± {half_interval(gaps_of(runs, name)):.5f}", spread]
        scales = sorted({run.scale for run in own if run.scale is not None})
        settings = " ".join(f"`{setting}`" for setting in RECIPES[name])
        overflows = ", ".join(str(run.overflows) for run in own) if scales else ""
        finals = ranged([run.final for run in own], ".4f")
        rows.append([name, settings, products, *finals, *gaps, overflows, ", ".join(map(str, scales))])
    return table(head, rows)


def summary(runs: RecipeRuns) -> str:
    """The spread of seeds and of the controls, and the recipes with larger gaps."""
    finals = [run.final for (name, _), run in runs.items() if name == "fp32"]
    text = f"The final losses of fp32 itself differ by {max(finals) - min(finals):.4f} from seed to seed."
    names = names_of(runs)
    controls = [name for name in CONTROLS if name in names]
    if not controls:
        return text
    largest = max(abs(gap) for name in controls for gap in gaps_of(runs, name))
    beyond = []
    for name in names:
        gaps = gaps_of(runs, name)
        if name not in ("fp32", *controls) and abs(fmean(gaps)) > max(largest, half_interval(gaps)):
            beyond.append(name)
    return (
        f"{text} The gaps of {' and '.join(controls)}, which only round other last bits, are at most {largest:.1e}. "
        f"Recipes whose mean gap is beyond that and whose 95 % interval does not hold 0: {'; '.join(beyond) or 'none'}."
    )


def half_interval(gaps: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of their mean, by Student's t."""
    return T_95[len(gaps)] * stdev(gaps) / sqrt(len(gaps)) if len(gaps) > 1 else inf


def names_of(runs: RecipeRuns) -> list[str]:
    return list(dict.fromkeys(name for name, _ in runs))


def gaps_of(runs: RecipeRuns, name: str) -> list[float]:
    """Final loss less that of fp32, for each seed."""
    return [run.final - runs["fp32", seed].final for (recipe, seed), run in runs.items() if recipe == name]


def ranged(values: Sequence[float], form: str) -> list[str]:
    """The mean, and the smallest and the largest value."""
    return [format(fmean(values), form), f"{min(values):{form}} to {max(values):{form}}"]


def draw_faint_gradients(runs: FaintRuns) -> None:
    lines: list[Any] = []
    for colour, way in enumerate(WAYS):
        for (name, seed), run in runs.items():
            if name == way:
                points = windowed(run.losses, FAINT_STEPS // 60)
                label = f"{way.removesuffix(' loss scale')}, seed {seed}"
                lines.append(Line(label, points, colour, dashed=colour == len(WAYS) - 1))
    save_line_plot(
        FAINT_PLOT,
        lines,
        title="Gradients below the smallest number of float16",
        note="Without a loss scale they become zero, and the loss stops falling; with one it is that of fp32 (dashed).",
        x=Axis("step", low=0, high=FAINT_STEPS),
        y=Axis("loss, of a model that says zero", logarithmic=True),
    )


def draw_gaps(runs: RecipeRuns) -> None:
    finals = [run.final for (name, _), run in runs.items() if name == "fp32"]
    rows = [Row("fp32: seeds, less their mean", [final - fmean(finals) for final in finals], colour=0)]
    for name in names_of(runs):
        if name != "fp32":
            rows.append(Row(name, gaps_of(runs, name), colour=3 if name in CONTROLS else 1))
    save_dot_plot(
        GAP_PLOT,
        rows,
        title="Final loss less that of fp32 with the same seed",
        note="A dot for each seed, and a line at their mean; above them the seeds of fp32 themselves.",
        label="difference of the final losses",
    )


def draw_losses(runs: RecipeRuns) -> None:
    names = [name for name in names_of(runs) if name != "fp32"]
    steps = len(next(iter(runs.values())).losses)
    lines = []
    for colour, name in enumerate(names):
        means = [
            fmean(losses)
            for losses in zip(*(_differences(runs, name, seed) for recipe, seed in runs if recipe == name), strict=True)
        ]
        lines.append(Line(name, windowed(means, LAST), colour, dashed=colour >= len(COLOURS)))
    later = [y for line in lines for _, y in line.points[len(line.points) // 5 :]]
    margin = 0.1 * (max(later) - min(later))
    save_line_plot(
        LOSS_PLOT,
        lines,
        title="Loss less that of fp32 with the same seed",
        note=f"Mean over the seeds, of windows of {LAST} steps; what lies outside in the first fifth is cut off.",
        x=Axis("step", low=0, high=steps),
        y=Axis("loss less that of fp32", low=min(later) - margin, high=max(later) + margin),
    )


def _differences(runs: RecipeRuns, name: str, seed: int) -> list[float]:
    return [own - other for own, other in zip(runs[name, seed].losses, runs["fp32", seed].losses, strict=True)]


def windowed(values: Sequence[float], length: int) -> list[tuple[float, float]]:
    """Means of windows of steps, each at its middle."""
    starts = range(0, len(values) - length + 1, length)
    return [(start + length / 2, fmean(values[start : start + length])) for start in starts]


if __name__ == "__main__":
    main()
