"""Data parallelism between two hosts over a slow link: step times of several ways, measured and predicted.

The hosts are those of benchmarks/hosts.py: network namespaces with two ranks each, joined by a link of 200 Mbit/s. All
ways train the decoder of the job `tiny`. The time of a step is predicted from measurements in which no way trains
over the link:

    computing      the same step on the backend `null`, which sends nothing, on all four ranks at once, in turn
                   with the others, since other work on the machine would slow down both
    communication  each message as the Programs that carry it, on a cluster that is calibrated by messages alone
    agreements     a sum of a few numbers over all ranks, measured

and put together in the order of the plan. Then the ways take turns.

    python benchmarks/hosts_training.py [--rounds 5] [--steps 3] [--length 64] [--only ring DiLoCo] [--page]

It needs root and iproute2, as hosts.py does; otherwise it says why it is skipped. --page writes the table into
docs/benchmarks/hosts-training.md, unless ways come out in another order than predicted.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hosts import HOSTS, PREFIX, RANKS_PER_HOST, calibration_text, missing, start_ranks, two_hosts
from parts.arguments import parse_arguments
from parts.report.pages import fill
from parts.rounds import interleave, mean_over_ranks, quartiles

if TYPE_CHECKING:
    from parts.configurations import Batches, TrainingConfiguration
    from parts.step_prediction import Alone, Predicted

    from motet.train.engine import TrainingEngine

WORLD = HOSTS * RANKS_PER_HOST
PAGE = Path(__file__).parents[1] / "docs/benchmarks/hosts-training.md"
EQUAL = 0.05
"""Predictions that differ by less are called equal: about the error of cost.py for one all-reduce (hosts.md)."""
LARGEST_DIFFERENCE = 1e-3
"""Relative difference of two losses at the end, where nothing but the order of additions differs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed in a round, after one that is not")
    parser.add_argument("--length", type=int, default=64, help="tokens of each rank in a step")
    parser.add_argument("--only", nargs="+", help="ways with such a word in the name")
    parser.add_argument("--page", action="store_true", help=f"write the table into {PAGE.name}")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--burst", default="32kb", help="bytes that may pass unshaped after a rest")
    parser.add_argument("--congestion", default="reno", help="TCP's congestion control")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parse_arguments(parser, rounds=1, steps=1)
    if options.rank is not None:
        return measure_as_rank(options)
    reason = missing()
    if reason:
        print(f"skipped: {reason}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are taken down
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder, two_hosts(options) as hosts:
        return start_ranks(hosts, folder)


def measure_as_rank(options: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist
    from parts.configurations import CONFIGURATIONS, batches
    from parts.null_backend import as_world, register_null_backend

    from motet.cluster.host_limits import keep_freed_memory

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()
    register_null_backend()
    chosen = [w for w in CONFIGURATIONS if not options.only or any(word in w.name for word in options.only)]
    store = dist.FileStore(str(Path(options.folder) / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=WORLD)
    predicted = calibrated(options)
    engines = {way.name: way.engine() for way in chosen}
    for way in chosen:
        check_traffic(way, engines[way.name], options.rank)
    with as_world(dist.new_group(backend="cpu:null")):
        quiet = {way.name: way.silent().engine() for way in chosen}
    data = batches(options.rank, options.length)
    alone, times = take_turns(chosen, quiet, engines, data, options)
    code = 0
    if options.rank == 0:
        expected = {way.name: expect(way, engines[way.name], predicted, alone) for way in chosen}
        code = report(expected, times, alone, options)
    dist.barrier()
    dist.destroy_process_group()
    return code


def timed(step: Callable[[], Any], steps: int) -> float:
    """Mean seconds of a step on the slowest rank; all ranks begin together."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    mean = torch.tensor((time.perf_counter() - start) / steps, dtype=torch.float64)
    dist.all_reduce(mean, dist.ReduceOp.MAX)
    return float(mean)


def stepping(engine: "TrainingEngine", data: "Batches") -> Callable[[], float]:
    """A step on this rank's next batch; its loss."""
    at = iter(range(2**31))

    def step() -> float:
        done = engine.step(data(next(at)))
        if not done.is_finite:
            raise SystemExit("a loss or gradient is not finite; such a step is left out, and its time says nothing")
        return done.loss

    return step


def calibrated(options: argparse.Namespace) -> "Predicted":
    """Measure the inputs of predictions, except the time of computing, before anything is trained."""
    import torch.distributed as dist
    from parts.link_measurement import calibrate_cluster
    from parts.step_prediction import Predicted, model_segments

    from motet.cluster.cluster import cluster_from_dict
    from motet.models.spec.model_spec import spec_from_settings
    from motet.train.job import batch_shape, load_job

    group = dist.group.WORLD
    assert group is not None
    tree = calibrate_cluster(group, RANKS_PER_HOST)
    agree_s = time_of_agreements()
    if options.rank == 0:
        calibration_text(tree)
        print(f"agreeing on the loss and the norm: {agree_s * 1e3:.1f} ms\n", flush=True)
    job = load_job("tiny", [])
    segments = model_segments(spec_from_settings(job.model), batch_shape(job, job.data.batch_sequences // WORLD))
    return Predicted(cluster_from_dict(tree, "two hosts in miniature"), segments, agree_s)


@dataclass(frozen=True)
class Expected:
    """The prediction for a configuration, made before it is measured."""

    step_s: float
    crossing_bytes: float
    """Bytes that leave the first host over the link in a step."""


def expect(
    way: "TrainingConfiguration", engine: "TrainingEngine", predicted: "Predicted", alone: "dict[str, Alone]"
) -> Expected:
    from parts.step_prediction import Message, messages_of_step

    sent, own = messages_of_step(engine.plan, way.settings), alone[way.name]
    if way.period > 1:  # replicas communicate once, and send nothing in between
        masters = sum(master.numel() for master in engine.optimizer.sharded_parameters.local_masters)
        sent = [Message("all-reduce", way.settings.all_reduce, (tuple(range(WORLD)),), masters)]
    crossing = sum(message.crossing_bytes(range(RANKS_PER_HOST)) for message in sent) / way.period
    if way.period > 1 or engine.plan.comm_units[0].kind != "bucket":
        return Expected(predicted.one_after_another(sent, own, way.period), crossing)
    base = alone.get(way.base or way.name, own)
    coding_s = max(0.0, own.step_s - base.step_s)
    return Expected(predicted.overlapped(engine.plan, way.settings, base, coding_s=coding_s), crossing)


def time_of_agreements() -> float:
    """Time a step's small all-reduces: the number of micro-batches, then loss, norm and counts."""
    import torch
    import torch.distributed as dist

    most, row = torch.zeros(1, dtype=torch.int64), torch.zeros(4, dtype=torch.float64)

    def both() -> None:
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(row)

    return statistics.median(timed(both, 1) for _ in range(20))


def check_traffic(way: "TrainingConfiguration", engine: "TrainingEngine", rank: int) -> None:
    """Check that the costed bytes are those of motet/parallel/step_plan/traffic.py, to the byte."""
    from parts.step_prediction import messages_of_step

    from motet.parallel.step_plan.traffic import sent_bytes_per_step
    from motet.precision.recipe import RECIPES

    rank %= engine.plan.dims.ranks  # The plan is for the first of independent replicas
    said = sent_bytes_per_step(engine.plan, RECIPES["fp32"], settings=way.settings, rank=rank).total
    costed = sum(message.sent_bytes(rank) for message in messages_of_step(engine.plan, way.settings))
    assert costed == said, (way.name, costed, said)


def take_turns(
    ways: "list[TrainingConfiguration]",
    quiet: "dict[str, TrainingEngine]",
    engines: "dict[str, TrainingEngine]",
    data: "Batches",
    options: argparse.Namespace,
) -> "tuple[dict[str, Alone], dict[str, list[float]]]":
    """Each way without communication, median over the rounds; and with it, in each round. Means over a period."""
    from parts.configurations import SpanTimes
    from parts.step_prediction import Alone

    from motet.core import trace

    silent, loud = ({name: stepping(e, data) for name, e in group.items()} for group in (quiet, engines))

    def one_round(way: "TrainingConfiguration") -> tuple[list[float], float, float]:
        """Seconds without communication, of all and by span; the loss; and seconds with communication."""
        steps = way.period if way.period > 1 else options.steps
        spans = SpanTimes()
        silent[way.name]()
        with trace.install_sink(spans):
            seconds = timed(silent[way.name], steps)
        without = [seconds, *mean_over_ranks([s / steps for s in spans.seconds.values()])]
        return without, mean_over_ranks([loud[way.name]()])[0], timed(loud[way.name], steps)

    results = interleave({way.name: partial(one_round, way) for way in ways}, options.rounds, stride=3)
    check_losses({way.name: results[way.name][-1][1] for way in ways if way.exact})
    alone = {
        name: Alone(*map(statistics.median, zip(*(without for without, _, _ in rounds), strict=True)))
        for name, rounds in results.items()
    }
    return alone, {name: [seconds for _, _, seconds in rounds] for name, rounds in results.items()}


def check_losses(losses: dict[str, float]) -> None:
    """Configurations that differ only in the order of additions have trained the same."""
    if losses and max(losses.values()) - min(losses.values()) > LARGEST_DIFFERENCE * min(losses.values()):
        raise SystemExit(f"not the same training; the losses at the end are {losses}")


# --- the report ----------------------------------------------------------------------------------


def report(
    expected: dict[str, Expected], times: dict[str, list[float]], alone: "dict[str, Alone]", options: argparse.Namespace
) -> int:
    from parts.step_prediction import apart

    spread = {name: quartiles(seconds) for name, seconds in times.items()}
    pairs = apart(
        {name: e.step_s for name, e in expected.items()},
        {n: (low, high) for n, (low, _, high) in spread.items()},
        EQUAL,
    )
    text = f"{table(expected, times, alone)}\n{verdict(pairs)}\n"
    print(text, flush=True)
    if "wrong" in pairs.values() and not options.quick:  # One round says nothing about the order
        print("the order is not the predicted one; nothing is written")
        return 1
    if options.page:
        fill(PAGE, [textwrap.fill(f"{conditions(options)}.", 120), text])
    return 0


def table(expected: dict[str, Expected], times: dict[str, list[float]], alone: "dict[str, Alone]") -> str:
    lines = [
        "| | over the link, each way | computing | predicted | measured | quartiles | predicted / measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted(expected, key=lambda name: -expected[name].step_s):
        low, middle, high = (1e3 * s for s in quartiles(times[name]))
        step = expected[name].step_s * 1e3
        lines.append(
            f"| {name} | {expected[name].crossing_bytes / 1e6:.2f} MB | {alone[name].step_s * 1e3:.0f} ms "
            f"| {step:.0f} ms | {middle:.0f} ms | {low:.0f} - {high:.0f} | {step / middle:.2f} |"
        )
    return "\n".join(lines) + "\n"


def verdict(pairs: dict[str, str]) -> str:
    counts = {kind: [pair for pair, found in pairs.items() if found == kind] for kind in ("right", "equal", "wrong")}
    told = f"Of {len(pairs)} pairs {len(counts['right'])} are in the predicted order"
    for kind, word in (("equal", "are called equal"), ("wrong", "are **in the other order**")):
        if counts[kind]:
            told += f", {len(counts[kind])} {word} ({'; '.join(counts[kind])})"
    return textwrap.fill(f"{told}.", 120, break_on_hyphens=False)


def conditions(options: argparse.Namespace) -> str:
    return (
        f"Gloo; a link of {options.rate}; {HOSTS} hosts x {RANKS_PER_HOST} ranks x 1 thread, "
        f"{options.length} tokens each; {options.rounds} rounds of {options.steps} steps; "
        f"load {os.getloadavg()[0]:.1f} at the end"
    )


if __name__ == "__main__":
    sys.exit(main())
