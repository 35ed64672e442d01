"""A data-parallel training step: motet's stages 0 to 3 and DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed.

All of them train the decoder of the job `tiny` from the same values on the same batches with the same loss, clipping
and AdamW, in the same rank processes, a few steps each in turn; who comes first changes from round to round. A round
gives one ratio per contender; the output has medians with quartiles over the rounds. After the first round, which warms
up, all must have the same loss; later, rounding has grown too far.

Peers run on Gloo, their usual backend, and on the backend `motet`. Each also runs on the backend `null`, which sends
nothing: the additional time of a step with communication is the exposed communication, with waits for slower ranks.

    python benchmarks/data_parallel.py [--ranks 2] [--rounds 7] [--rows 16 2] [--dtypes fp32] [--stages 0 1 2 3]
                                       [--only motet peer deepspeed] [--steps 3] [--offload] [--page]

--rows is the batch of all ranks. With --offload the states lie in the memory of the host, at stages 2 and 3: motet's,
FSDP2's with `CPUOffloadPolicy` (its parameters lie there, too) and DeepSpeed's ZeRO-Offload, beside motet's on the
device. --page writes the tables into docs/benchmarks/data-parallel.md, or offload.md. DeepSpeed takes part where it is
installed (`make bench` tries to).
"""

import argparse
import importlib.metadata
import importlib.util
import itertools
import os
import statistics
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from parts.arguments import parse_arguments
from parts.contenders import MAKERS, Contender, Trainer
from parts.rank_processes import launch
from parts.report.pages import fill
from parts.report.ratio_tables import Times, sections, table_of_exposed, table_of_ratios
from parts.rounds import interleave, mean_over_ranks, progress

DOCS = Path(__file__).parents[1] / "docs/benchmarks"
WARM_UP = 1
LENGTH = 256
BATCHES = 4
LARGEST_DIFFERENCE = {"fp32": 1e-3, "bf16": 3e-2}
"""Relative difference of two losses after a few steps. Rounding of 6e-8 (float32) and 4e-3 (bfloat16, in which peers
keep other tensors than motet) grows from step to step; other gradients would show in the second digit."""


def main() -> None:
    options = parse()
    if "RANK" in os.environ:
        measure(options)
    else:
        sys.exit(launch(options.ranks, options.threads))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="timed in a round, after one that is not")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 2], help="of all ranks together")
    parser.add_argument("--dtypes", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--only", nargs="+", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--offload", action="store_true", help="states in the memory of the host")
    parser.add_argument("--page", action="store_true", help="write the tables into a page")
    return parse_arguments(parser, rounds=1, steps=1, rows=[2], stages=[0, 3])


def measure(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from parts.null_backend import register_null_backend

    import motet.collectives.shm_backend  # noqa: F401  (registers it)
    from motet.cluster.host_limits import keep_freed_memory

    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    register_null_backend()
    keep_freed_memory()  # for all contenders, which then differ in data parallelism alone
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=f"cpu:{name}") for name in ("motet", "gloo", "null")}
    leads = dist.get_rank() == 0
    tables = {}
    for dtype in options.dtypes:
        for rows in options.rows:
            if rows % options.ranks:
                raise SystemExit(f"--rows {rows} cannot be cut evenly over {options.ranks} ranks")
            trainers = {}
            for each in contenders(options):
                progress(f"{dtype}, {rows} rows: build {each.name} of stage {each.stage} on {each.backend}")
                trainers[each] = MAKERS[each.who](each, dtype, groups[each.backend])
            times, losses = take_turns(trainers, rows, options)
            check_losses(losses, dtype)
            if leads:
                title = f"{dtype}, {rows} x {LENGTH} tokens"
                tables[title] = [table_of_ratios(times, losses, rows * LENGTH)]
                tables[title] += [] if options.offload else [table_of_exposed(times)]
                print(f"\n{title}\n", *tables[title], conditions(options), sep="\n", flush=True)
    if leads and options.page:
        fill(DOCS / ("offload.md" if options.offload else "data-parallel.md"), [conditions(options), *sections(tables)])
    dist.barrier()
    dist.destroy_process_group()


def contenders(options: argparse.Namespace) -> list[Contender]:
    """List motet, its peer and DeepSpeed for each stage and backend; motet also runs alone with other overlaps."""
    if options.offload:
        return offload_contenders(options)
    found = []
    for stage in options.stages:
        for who in options.only:
            if who == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
                continue
            found += [Contender(stage, who, backend) for backend in ("motet", "gloo", "null")]
            if who == "motet":
                found += [replace(found[-3], overlap=overlap) for overlap in ("none", "forward")]
    return found


def offload_contenders(options: argparse.Namespace) -> list[Contender]:
    """List motet with states on the host and on the device, and the peers that keep them on the host, on one backend
    each."""
    motet = [
        Contender(stage, "motet", "motet", place=place, overlap=overlap)
        for stage in (2, 3)
        for place, overlap in (("host", "backward"), ("host", "forward"), ("device", "backward"))
    ]
    peers = [Contender(3, "peer", backend, place="host") for backend in ("gloo", "motet")]
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    deepspeed = [Contender(2, "deepspeed", "gloo", place="host")] * has_deepspeed
    return [each for each in (*motet, *peers, *deepspeed) if each.who in options.only]


def take_turns(
    trainers: dict[Contender, Trainer], rows: int, options: argparse.Namespace
) -> tuple[Times, dict[Contender, float]]:
    """Seconds of a step in each round, as the mean over the ranks; and the last loss of the first."""
    import torch.distributed as dist

    data = batches(rows)
    steps = {name: itertools.cycle(data) for name in trainers}

    def one_round(name: Contender) -> list[float]:
        seconds = []
        dist.barrier()
        for _ in range(WARM_UP + options.steps):
            start = time.perf_counter()
            loss = trainers[name](next(steps[name]))
            seconds.append(time.perf_counter() - start)
        return mean_over_ranks([statistics.median(seconds[WARM_UP:]), loss])

    results = interleave({name: partial(one_round, name) for name in trainers}, options.rounds + 1, stride=5)
    times = {name: [seconds for seconds, _ in rounds[1:]] for name, rounds in results.items()}
    return times, {name: rounds[0][1] for name, rounds in results.items()}


def batches(rows: int) -> list[Any]:
    """This rank's tokens of each step: a few batches, again and again, so that the loss must fall."""
    import torch
    import torch.distributed as dist

    whole = torch.randint(0, 4096, (BATCHES, rows, LENGTH + 1), generator=torch.Generator().manual_seed(7))
    share = rows // dist.get_world_size()
    first = dist.get_rank() * share
    return list(whole[:, first : first + share])


def check_losses(losses: dict[Contender, float], dtype: str) -> None:
    """Check that all contenders that communicate have the same losses."""
    told = {c: loss for c, loss in losses.items() if c.backend != "null"}
    least, most = min(told, key=lambda c: told[c]), max(told, key=lambda c: told[c])
    if not told[most] - told[least] <= LARGEST_DIFFERENCE[dtype] * told[least]:
        lines = "\n".join(f"  stage {c.stage}  {loss:.6f}  {c.name} on {c.backend}" for c, loss in told.items())
        raise SystemExit(f"not the same training; the losses after the first round are\n{lines}")


def conditions(options: argparse.Namespace) -> str:
    deepspeed = importlib.util.find_spec("deepspeed") is not None
    version = f"; DeepSpeed {importlib.metadata.version('deepspeed')}" if deepspeed else ""
    return (
        f"{options.ranks} ranks x {options.threads} threads; {options.rounds} rounds of {options.steps} steps{version}."
    )


if __name__ == "__main__":
    main()
