"""The loads of experts on skewed data: without a balance, with the loss of each row, with moving corrections.

    python benchmarks/expert_balance.py [--steps 500] [--seeds 0 1 2] [--only none row bias] [--page]

A small decoder of mixtures trains on texts of eight kinds. Each kind has other letters; the most frequent one has half
of the texts, the next one a quarter, and so on. So a router that sends each kind to other experts is far from even.
Runs of a seed begin with the same values and see the same batches. All runs are made in this process, on one thread.
--page writes docs/benchmarks/expert-balance.md and its picture.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from parts.arguments import parse_arguments
from parts.report.pages import DOCS, fill, load_of_machine, table
from parts.report.plots import Axis, Line, save_line_plot

from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from motet.train.job import Job, load_job
from motet.train.optimizer.optimizer_settings import learning_rate_factor

PAGE, PLOT = DOCS / "expert-balance.md", DOCS / "expert-balance.svg"
LAST = 50
"""The steps at the end of a run whose mean is its result."""
WINDOW = 10
"""The steps of a point of the picture."""
KINDS, LETTERS, WORDS = 8, 12, 3
"""Kinds of texts, the letters of each, and the words of a text, of which a sequence has several."""
MODEL = (
    "family='decoder', vocab_size=260, context=64, layers=2, hidden=64, heads=4, kv_heads=2, ffn_hidden=128, "
    "experts={count=8, per_token=2, hidden=32, scores='sigmoid'}"
)
BALANCES = {
    "none": "kind='none'",
    "row": "kind='row', weight=0.02",
    "bias": "kind='bias', speed=0.003",
}


@dataclass(frozen=True)
class BalancedRun:
    """A run by its steps."""

    worst: list[float]  # The largest load over the mean, of the worst layer
    losses: list[float]  # Without the terms of the balance

    @property
    def final(self) -> float:
        return fmean(self.worst[-LAST:])

    @property
    def final_loss(self) -> float:
        return fmean(self.losses[-LAST:])


Runs = dict[tuple[str, int], BalancedRun]
"""Runs by balance and seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(BALANCES), choices=list(BALANCES))
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name} and its picture")
    options = parse_arguments(parser, steps=10, seeds=[0])
    torch.set_num_threads(1)
    load, begin, runs = load_of_machine(), time.process_time(), Runs()
    with tempfile.TemporaryDirectory() as folder:
        text = write_skewed_text(Path(folder) / "skewed.txt")
        for seed in options.seeds:
            for kind in options.only:
                runs[kind, seed] = train(job_of(kind, seed, options.steps, text=text), Path(folder))
                print(
                    f"{kind} {seed}: {runs[kind, seed].final:.3f}, loss {runs[kind, seed].final_loss:.4f}", flush=True
                )
    minutes = (time.process_time() - begin) / 60
    parts = [load, conditions(options, minutes), results(runs), f"![Loads of experts on skewed data]({PLOT.name})"]
    print("\n\n".join(parts))
    if options.page:
        fill(PAGE, parts)
        draw(runs)


def write_skewed_text(path: Path, documents: int = 20000) -> Path:
    """Lines of words, each line of one kind."""
    generator = random.Random(0)
    shares = [2.0**-kind for kind in range(KINDS)]
    alphabets = [[chr(33 + kind * LETTERS + letter) for letter in range(LETTERS)] for kind in range(KINDS)]
    lines = []
    for kind in generator.choices(range(KINDS), shares, k=documents):
        words = ["".join(generator.choices(alphabets[kind], k=generator.randint(2, 6))) for _ in range(WORDS)]
        lines.append(" ".join(words))
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


def job_of(kind: str, seed: int, steps: int, *, text: Path) -> Job:
    """The job of a balance."""
    settings = [
        *(f"model={{{MODEL}, balance={{{BALANCES[kind]}}}}}", f"data.source={text}", "data.tokenizer=bytes"),
        *("data.sequence_length=64", "data.batch_sequences=32", "optimizer.learning_rate=3e-3"),
        *("optimizer.schedule.warmup_steps=20", "run.device=cpu", "run.threads=1", f"run.seed={seed}"),
        *("monitor.tensorboard=false", "monitor.sample_tokens=0", f"run.steps={steps}", f"data.cache={text.parent}"),
    ]
    return load_job("tiny", settings)


def train(job: Job, folder: Path) -> BalancedRun:
    group, steps, schedule = RankGroup(0, 1, None, torch.device("cpu")), job.run.steps or 0, job.optimizer.schedule
    worst, losses = list[float](), list[float]()
    with precision_context(job), tempfile.TemporaryDirectory(dir=folder) as run:
        train_step = build_components(job, group, Path(run)).make_train_step(job)
        for step in range(steps):
            rate = learning_rate_factor(schedule, step, steps) * job.optimizer.learning_rate
            result = train_step.step(step, rate, last=step + 1 == steps)
            assert result.is_finite and result.experts is not None, f"step {step} of {job.name}: {result}"
            worst.append(max(layer.max_over_mean for layer in result.experts.layers))
            losses.append(result.loss - result.experts.loss_sum / result.targets)
    return BalancedRun(worst, losses)


def conditions(options: argparse.Namespace, minutes: float) -> str:
    settings, seeds = ", ".join(f"`{settings}`" for settings in BALANCES.values()), len(options.seeds)
    return (
        f"A decoder of 2 layers with 8 experts each, of which a token visits 2, on one thread in float32: "
        f"{options.steps} steps of 32 sequences of 64 tokens, {seeds} seeds, balances {settings}. All runs took "
        f"{minutes:.1f} minutes of processor time. The last columns are means over the last {LAST} steps, of the worst "
        "layer in each step, and of the loss without the terms of the balance."
    )


def results(runs: Runs) -> str:
    head = ["`model.balance.kind`", "seed", "largest load / mean, first step", f"last {LAST} steps", "loss"]
    rows = [
        [f"`{kind}`", str(seed), f"{run.worst[0]:.2f}", f"{run.final:.2f}", f"{run.final_loss:.4f}"]
        for (kind, seed), run in sorted(runs.items(), key=lambda item: (list(BALANCES).index(item[0][0]), item[0][1]))
    ]
    return table(head, rows)


def draw(runs: Runs) -> None:
    lines = []
    for colour, kind in enumerate(BALANCES):
        ratios = [run.worst for (name, _), run in runs.items() if name == kind]
        means = [fmean(values) for values in zip(*ratios, strict=True)]
        lines.append(Line(kind, windowed(means, WINDOW), colour))
    save_line_plot(
        PLOT,
        lines,
        title="Largest load of an expert over the mean, on skewed data",
        note=f"The worst layer of each step; mean over the seeds, of windows of {WINDOW} steps.",
        x=Axis("step", low=0, high=len(next(iter(runs.values())).worst)),
        y=Axis("largest load / mean", low=1),
    )


def windowed(values: Sequence[float], length: int) -> list[tuple[float, float]]:
    """Means of windows of steps, each at its middle."""
    starts = range(0, len(values) - length + 1, length)
    return [(start + length / 2, fmean(values[start : start + length])) for start in starts]


if __name__ == "__main__":
    main()
