"""Recomputation: its time, and the policies that are chosen for a budget, with their measured memory.

    python benchmarks/recomputation.py [--rounds 15] [--page]

Steps of a decoder without recomputation, with selective and with full recomputation are timed in turn. Then five models
measure their blocks as `memory.recompute = "auto"` does. For eight budgets each, a step is watched for its peak of live
bytes, and the steps of all choices are timed in turn. --page writes docs/benchmarks/recomputation.md and its plot.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from parts.arguments import parse_arguments
from parts.report.pages import DOCS, fill, load_of_machine, table
from parts.report.plots import Axis, Line, save_line_plot

from motet.core.units import format_bytes
from motet.memory.measured_costs import MEASURED_STEPS
from motet.memory.storage_tracker import StorageTracker
from motet.models.spec.layer_specs import BlockPolicy
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from motet.train.job import Job, load_job
from motet.train.memory_check.rank_memory import agree_on_costs, budget_for, usable_bytes

PAGE, PLOT = DOCS / "recomputation.md", DOCS / "recomputation.svg"
BUDGETS = 8
COMMON = [
    *("data.tokenizer=bytes", "data.source=stdlib", "monitor.tensorboard=false", "monitor.sample_tokens=0"),
    *("run.steps=1000", "run.device=cpu", "run.threads=1", "data.batch_sequences=4"),
]
SIZE = "vocab_size=260, context=128, layers=6, hidden=128, heads=4, ffn_hidden=352"
MODELS: dict[str, list[str]] = {
    "decoder, rotary, gated": [f"model={{family='decoder', {SIZE}}}"],
    "decoder, dropout": [f"model={{family='decoder', {SIZE}, dropout=0.1}}"],
    "decoder, learned positions": [
        f"model={{family='decoder', {SIZE}, norm='layer', bias=true, positions='learned', gated=false, "
        "activation='gelu'}"
    ],
    "encoder": [f"model={{family='encoder', {SIZE}}}", "data.objective=masked"],
    "encoder-decoder": [
        f"model={{family='encoder-decoder', {SIZE.replace('260', '359').replace('=6', '=3')}}}",
        "data.objective=spans",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", type=int, default=len(MODELS), help="number of models that are studied")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name} and {PLOT.name}")
    options = parse_arguments(parser, rounds=2, models=1)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        overhead = overhead_table(Path(folder), options.rounds)
        print(overhead)
        studies = {
            name: study(Path(folder), settings, options.rounds)
            for name, settings in islice(MODELS.items(), options.models)
        }
    parts = [load_of_machine(), overhead, summary(studies), budget_table(studies)]
    print("\n\n".join(parts))
    if options.page:
        fill(PAGE, parts)
        draw_plot(studies)


# --- runs -------------------------------------------------------------------------------------------


class Trainer:
    """A job on one rank, step by step."""

    def __init__(self, job: Job, folder: Path) -> None:
        group = RankGroup(0, 1, None, torch.device("cpu"))
        self.parts = build_components(job, group, folder)
        self.recomputed, self._step, self._stepper = self.parts.engine.recomputation, 0, self.parts.make_train_step(job)

    def step(self) -> float:
        """The seconds of a step."""
        begin = time.perf_counter()
        self._stepper.step(self._step, 1e-3)
        self._step += 1
        return time.perf_counter() - begin

    def peak(self) -> int:
        """The most live bytes of a step."""
        watched = StorageTracker(self.recomputed.known_tensors())
        watched.start()
        self.step()
        watched.stop()
        return watched.peak()


@contextmanager
def trainer(folder: Path, settings: Sequence[str]) -> Iterator[Trainer]:
    job = load_job("tiny", [*COMMON, "data.sequence_length=128", f"data.cache={folder}", *settings])
    with precision_context(job), tempfile.TemporaryDirectory(dir=folder) as run:
        yield Trainer(job, Path(run))


def timed_in_turn(contenders: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    for contender in contenders:
        contender()
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, seconds in zip(contenders, times, strict=True):
            seconds.append(contender())
    return times


def overhead_table(folder: Path, rounds: int) -> str:
    size = "vocab_size=260, context=512, layers=4, hidden=512, heads=8, ffn_hidden=1408"
    settings = [f"model={{family='decoder', {size}}}", "data.sequence_length=512", "model.context=512"]
    with trainer(folder, [*settings, "memory.recompute=full"]) as run:
        recomputation = run.recomputed.recomputation
        assert recomputation is not None
        policies: tuple[BlockPolicy, ...] = ("none", "selective", "full")

        def step_with(policy: BlockPolicy) -> float:
            recomputation.policies = [policy] * len(recomputation.policies)
            return run.step()

        times = timed_in_turn([lambda p=policy: step_with(p) for policy in policies], rounds)  # type: ignore[misc]
    ratios = [[seconds / none for seconds, none in zip(each, times[0], strict=True)] for each in times]
    rows = [
        [f"`{policy}`", f"{median(seconds):.3f} s", f"{median(ratio):.3f}", f"{quantiles(ratio)[0]:.3f}"]
        for policy, seconds, ratio in zip(policies, times, ratios, strict=True)
    ]
    return table(["policy of all blocks", "step, median", "to `none`, median of ratios", "lower quartile"], rows)


@dataclass
class Choice:
    budget: int
    counts: str
    predicted: int
    measured: int
    predicted_s: float
    seconds: float = 0.0


def study(folder: Path, settings: Sequence[str], rounds: int) -> list[Choice]:
    """The choices of one model for budgets from the bytes of full recomputation to those of none."""
    with trainer(folder, [*settings, "memory.recompute=auto", "memory.budget=64GiB"]) as run:
        recomputation, group = run.recomputed.recomputation, run.parts.group
        assert recomputation is not None
        measurement = recomputation._measurement
        assert measurement is not None
        for _ in MEASURED_STEPS:
            run.step()
        problem = agree_on_costs(measurement, len(recomputation.policies), group).problem
        ends = [budget_for(problem.peak([policy] * len(problem.blocks))) for policy in ("full", "none")]
        choices, policies = list[Choice](), list[tuple[BlockPolicy, ...]]()
        for index in range(BUDGETS):
            budget = ends[0] + (ends[1] - ends[0]) * index // (BUDGETS - 1)
            chosen = problem.choose(usable_bytes(budget))
            assert chosen is not None
            recomputation.policies = list(chosen.policies)
            counts = " / ".join(str(chosen.policies.count(policy)) for policy in ("none", "selective", "full"))
            measured = max(run.peak(), run.peak())
            choices.append(Choice(budget, counts, chosen.peak_bytes, measured, chosen.seconds))
            policies.append(chosen.policies)

        def step_with(chosen: tuple[BlockPolicy, ...]) -> float:
            recomputation.policies = list(chosen)
            return run.step()

        for choice, seconds in zip(
            choices,
            timed_in_turn([lambda c=chosen: step_with(c) for chosen in policies], rounds),  # type: ignore[misc]
            strict=True,
        ):
            choice.seconds = median(seconds)
        return choices


# --- the page ---------------------------------------------------------------------------------------


def ordered_pairs(choices: Sequence[Choice]) -> tuple[int, int]:
    """(Pairs of different choices whose measured times are in the predicted order, pairs)."""
    pairs = [(a, b) for a, b in combinations(choices, 2) if a.counts != b.counts]
    return sum((a.predicted_s < b.predicted_s) == (a.seconds < b.seconds) for a, b in pairs), len(pairs)


def summary(studies: dict[str, list[Choice]]) -> str:
    cells = [choice for choices in studies.values() for choice in choices]
    right, pairs = map(sum, zip(*(ordered_pairs(choices) for choices in studies.values()), strict=True))
    above = sum(choice.measured > choice.budget for choice in cells)
    off = max(abs(choice.predicted / choice.measured - 1) for choice in cells)
    return (
        f"Of {len(cells)} choices {above} took more than their budget. The predicted peak differs from the measured "
        f"one by at most {off:.2%}. Of {pairs} pairs of different choices of one model, {right} "
        f"({right / pairs:.0%}) take their times in the predicted order."
    )


def budget_table(studies: dict[str, list[Choice]]) -> str:
    head = ["model", "budget", "kept / selective / full", "predicted", "measured", "recomputation", "step, median"]
    rows = [
        [
            *(name, format_bytes(choice.budget), choice.counts, format_bytes(choice.predicted)),
            *(format_bytes(choice.measured), f"{choice.predicted_s * 1e3:.1f} ms", f"{choice.seconds * 1e3:.1f} ms"),
        ]
        for name, choices in studies.items()
        for choice in choices
    ]
    return table(head, rows)


def draw_plot(studies: dict[str, list[Choice]]) -> None:
    lines: list[Any] = []
    for name, choices in studies.items():
        quickest, most = min(choice.seconds for choice in choices), max(choice.measured for choice in choices)
        points = sorted((c.measured / most, c.seconds / quickest) for c in choices)
        lines.append(Line(name, points, colour=len(lines)))
    save_line_plot(
        PLOT,
        lines,
        title="Time against memory",
        note="Steps with the policies chosen for eight budgets, over the quickest one and the one that takes most.",
        x=Axis("peak of live bytes"),
        y=Axis("time of a step"),
    )


if __name__ == "__main__":
    main()
