"""Steps of small models on CPU ranks of this machine: predicted by `motet plan` from a cluster file, and measured.

A cluster file is calibrated before, between and after the steps: rates of single kernels, times of single collectives,
and how ranks slow each other down while all cores compute. 20 layouts of three models train on 1, 2 and 4 ranks with
one thread each. Layouts of as many ranks take turns in rounds. The peak of the bytes of live tensors is measured in a
further step.

    python benchmarks/planned_steps.py [--rounds 15] [--cluster FILE] [--cases 0 4 11] [--no-memory] [--stack] [--page]

--cluster reads a file that an earlier call has written instead of calibrating. --stack profiles one-rank steps of a
fourth model and prints the constants of the software stack with which its kernels take the measured times. --page
writes docs/benchmarks/planned-steps.md.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parts.arguments import parse_arguments
from parts.cpu_cluster import CollectiveTime, cluster_description, measure_busy_factors, measure_collectives
from parts.planned_layouts import CASES, PlannedCase, stack_variants
from parts.rank_processes import launch, rank_group
from parts.report.pages import DOCS, collected_results, fill, load_of_machine, store_result, table
from parts.rounds import interleave

from motet.core.text_files import to_toml
from motet.parallel.layout import layout_of_sizes
from motet.plan.planned_cluster import load_planned_cluster
from motet.plan.search.layout_space import with_layout
from motet.plan.search.ranking import LayoutRanking, RankedPlan
from motet.train.forecast.planned_job import planned_step
from motet.train.job import Job, load_job

if TYPE_CHECKING:
    from motet.parallel.process.process_group import RankGroup
    from motet.train.step import TrainStep

PAGE = DOCS / "planned-steps.md"
FILE = Path(tempfile.gettempdir(), "motet-cpu-cluster.toml")
RANKS = (1, 2, 4)
TIME_TARGET, MEMORY_TARGET = 0.15, 0.03


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cluster", type=Path)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--stack", action="store_true")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--phase", choices=["calibrate", "stack", "study"], help=argparse.SUPPRESS)
    options = parse_arguments(parser, rounds=1, cases=[0], cluster=Path("cpu"), no_memory=True)
    if "RANK" in os.environ:
        warnings.filterwarnings("ignore")
        {"calibrate": calibrate_rank, "stack": measure_stack, "study": measure_cases}[options.phase](options)
        return
    if options.stack:
        fit_stack()
        return
    parts, path, results = [load_of_machine()], options.cluster or FILE, list[Any]()
    calibrations = [] if options.cluster else [run_phase("calibrate", RANKS)]
    for count in (n for n in RANKS if any(CASES[i].ranks == n for i in options.cases)):
        results += run_phase("study", [count])
        if not options.cluster:
            calibrations.append(run_phase("calibrate", RANKS))
    if calibrations:
        write_cluster(calibrations)
    parts += report(options, path, results)
    print(*parts, sep="\n\n", flush=True)
    if options.page:
        fill(PAGE, parts)


def run_phase(phase: str, ranks: Sequence[int]) -> list[Any]:
    """The stored results of the rank processes of a phase."""
    with collected_results() as results:
        codes = [launch(count, threads=1, arguments=["--phase", phase]) for count in ranks]
    if any(codes):
        sys.exit(1)
    return results


# --- calibration ------------------------------------------------------------------------------------


def write_cluster(calibrations: Sequence[Sequence[Any]]) -> None:
    """Write a cluster file of this machine from the medians of calibrations before, between and after the layouts."""
    times, rates = dict[tuple[str, int, int], list[float]](), list[dict[str, Any]]()
    for results in calibrations:
        rates.append({})
        for kind, value in results:
            if kind == "rates":
                rates[-1] |= value
                continue
            for each in map(CollectiveTime._make, value):
                times.setdefault(each[:3], []).append(each.seconds)
    medians = [CollectiveTime(*key, statistics.median(seconds)) for key, seconds in times.items()]
    FILE.write_text(to_toml(cluster_description(median_rates(rates), medians)), encoding="utf-8")


def median_rates(rates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each number."""

    def median(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: median([value[key] for value in values]) for key in values[0]}
        return values[0] if isinstance(values[0], (str, int)) else statistics.median(values)

    return {name: median([each[name] for each in rates]) for name in rates[0]}


def calibrate_rank(options: argparse.Namespace) -> None:
    with rank_group(threads=1) as group:
        if group.world == 1:
            from motet.cluster.local_device import measure_rates

            store_result(["rates", measure_rates(repeats=15)])
            return
        from motet.cluster.host_limits import usable_cores

        times = measure_collectives(group)
        busy = measure_busy_factors(group) if group.world == usable_cores() else None
        if group.rank == 0:
            store_result(["collectives", times])
            if busy is not None:
                store_result(["rates", busy])


# --- rank processes ---------------------------------------------------------------------------------


@contextmanager
def built_steps(cases: Sequence[tuple[int, Job]], group: "RankGroup") -> "Iterator[dict[int, TrainStep]]":
    """The steps of jobs on the ranks of a group."""
    from motet.train.build import build_components, precision_context

    with tempfile.TemporaryDirectory() as folder, precision_context(cases[0][1], group.device):
        built = {}
        for index, job in cases:
            built[index] = build_components(job, group, Path(folder, str(index))).make_train_step(job)
        yield built


def measure_cases(options: argparse.Namespace) -> None:
    """Seconds of each step in all rounds but the first, and the peaks of the bytes of all ranks."""
    with rank_group(threads=1) as group:
        chosen = [(i, job_of(CASES[i])) for i in options.cases if CASES[i].ranks == group.world]
        with built_steps(chosen, group) as steps:
            seconds = take_turns(steps, options.rounds)
        for index, job in chosen:
            peaks = None if options.no_memory else peaks_of_ranks(job, group)
            if group.rank == 0:
                store_result([index, seconds[index], peaks])


def take_turns(
    steps: "dict[int, TrainStep]", rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[int, list[float]]:
    import torch.distributed as dist

    done = dict.fromkeys(steps, 0)

    def one_round(index: int) -> float:
        dist.barrier()
        start_s = clock()
        steps[index].step(done[index], 1e-4)
        done[index] += 1
        dist.barrier()
        return clock() - start_s

    turns = {index: partial(one_round, index) for index in steps}
    return {index: seconds[2:] for index, seconds in interleave(turns, rounds + 2, stride=3).items()}


def peaks_of_ranks(job: Job, group: "RankGroup") -> list[int]:
    """The most bytes of live tensors of each rank in a step."""
    import torch.distributed as dist

    from motet.train.memory_check.step_memory import measure_on_group

    with tempfile.TemporaryDirectory() as folder:
        memory = measure_on_group(job, group, Path(folder))
    assert memory.measured is not None
    peaks: list[Any] = [None] * group.world
    dist.all_gather_object(peaks, memory.measured.peak)
    return peaks


def measure_stack(options: argparse.Namespace) -> None:
    from parts.profiled_step import profiled_times

    from motet.cluster.local_device import measure_rates

    with rank_group(threads=1) as group:
        jobs = [(i, load_job("tiny", list(settings))) for i, settings in enumerate(stack_variants())]
        with built_steps(jobs, group) as steps:
            times = [profiled_times(steps[index], options.rounds)._asdict() for index, _ in jobs]
        store_result(times)
        store_result(measure_rates())


# --- predictions ------------------------------------------------------------------------------------


def job_of(case: PlannedCase) -> Job:
    return load_job("tiny", case.settings())


def predict(case: PlannedCase, path: Path) -> RankedPlan:
    """The prediction of `motet plan JOB --cluster FILE --gpus N --layout LAYOUT`."""
    step = with_layout(planned_step(job_of(case), layout_of_sizes(), stack="motet-cpu"), case.layout, case.ranks)
    return LayoutRanking(step, load_planned_cluster(str(path), case.ranks)).predict(step)[0]


def fit_stack() -> None:
    """Print the constants with which the kernels of one-rank steps of the fourth model take the measured times."""
    import numpy as np

    measured, rates = run_phase("stack", [1])
    path = FILE.with_name("motet-cpu-alone.toml")
    path.write_text(to_toml(cluster_description(rates, [])), encoding="utf-8")
    print(path.read_text())
    times = load_planned_cluster(str(path), 1).step_times
    jobs = [load_job("tiny", list(settings)) for settings in stack_variants()]
    layouts = [layout_of_sizes(microbatches=job.layout.microbatches or 1) for job in jobs]
    steps = [planned_step(*pair, stack="motet-cpu") for pair in zip(jobs, layouts, strict=True)]

    def predicted(**constants: float) -> "np.ndarray[Any, Any]":
        stacks = [replace(step, stack=replace(step.stack, **constants)) for step in steps]
        return np.array([times.predict(step).seconds for step in stacks])

    # Gradients are also set to zero and measured for their norm, outside of the optimizer.
    parts = {
        ("loss",): ["bytes_per_logit"],
        ("optimizer", "others"): ["elementwise_passes", "kernels_per_block", "optimizer_passes"],
    }
    zero = dict.fromkeys([name for names in parts.values() for name in names], 0.0)
    base = predicted(**zero)
    for kinds, names in parts.items():
        columns = np.array([predicted(**zero | {name: 1.0}) - base for name in names]).T
        seconds = np.array([sum(each[kind] for kind in kinds) for each in measured])
        solution, *_ = np.linalg.lstsq(columns / seconds[:, None], np.ones(len(seconds)), rcond=None)
        print(*(f"{name} = {value:.4g}" for name, value in zip(names, solution, strict=True)), sep="\n")
        print(f"  errors of {' and '.join(kinds)}:", *(f"{error:+.0%}" for error in columns @ solution / seconds - 1))
    products = [each["products"] for each in measured]
    errors = (f"{planned / time_s - 1:+.0%}" for planned, time_s in zip(base, products, strict=True))
    print("  errors of products and attention, which are not fitted:", *errors)


def report(options: argparse.Namespace, path: Path, results: Sequence[Any]) -> list[str]:
    """The table of all layouts, and the errors."""
    rows, time_errors, memory_errors = list[list[str]](), list[float](), list[float]()
    for index, seconds, peaks in sorted(results):
        case, plan = CASES[index], predict(CASES[index], path)
        measured_s = statistics.median(seconds)
        time_errors.append(plan.time.seconds / measured_s - 1)
        row = [case.model, str(case.ranks), f"`{case.layout}`" if case.layout else ""]
        row += [f"{measured_s * 1e3:.0f}", f"{plan.time.seconds * 1e3:.0f}", f"{time_errors[-1]:+.1%}"]
        if peaks:
            per_stage = case.ranks // plan.step.layout.pp
            planned = [plan.memory.ranks[rank // per_stage].allocated for rank in range(case.ranks)]
            errors = [p / peak - 1 for p, peak in zip(planned, peaks, strict=True)]
            memory_errors.append(max(errors, key=abs))
            row += [f"{max(peaks) / 1e6:.1f}", f"{max(planned) / 1e6:.1f}", f"{memory_errors[-1]:+.2%}"]
        rows.append(row)
    head = [
        "model",
        "ranks",
        "layout",
        "step (ms)",
        "predicted",
        "error",
        "peak (MB)",
        "predicted",
        "worst rank's error",
    ]
    summary = (
        f"Median error of the step time: {statistics.median(map(abs, time_errors)):.1%} (target {TIME_TARGET:.0%})."
    )
    if memory_errors:
        worst = max(map(abs, memory_errors))
        summary += f" Largest error of the peak of live tensors: {worst:.2%} (target {MEMORY_TARGET:.0%})."
    rounds = f"Milliseconds are medians of {options.rounds} rounds."
    return [
        f"{rounds} {summary}",
        table(head[: len(rows[0])], rows),
        f"```toml\n{path.read_text().strip()}\n```" if path.is_file() else f"Cluster {path}.",
    ]


if __name__ == "__main__":
    main()
