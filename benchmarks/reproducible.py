"""The price of `run.reproducible = "layout"`: steps of it and usual steps, in turn.

Three ways train the decoder of the job `tiny` from the same values on the same batches, in the same rank processes: the
usual one, the usual one with micro-batches of one sequence, which shows the cost of computing one by one, and the
reproducible one. A round does some steps of each, and who comes first changes from round to round; it gives one ratio
of the steps' medians. The output has medians with quartiles over the rounds.

    python benchmarks/reproducible.py [--ranks 2] [--rounds 15] [--stages 0 1 2 3] [--lengths 256 64] [--page]

--page writes docs/benchmarks/reproducible.md.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from parts.arguments import parse_arguments
from parts.rank_processes import rank_group, rank_parser, run_on_ranks
from parts.report.pages import DOCS, fill, table
from parts.rounds import interleave, mean_over_ranks, ratio_text

if TYPE_CHECKING:
    from motet.core.batch import Batch
    from motet.parallel.process.process_group import RankGroup

PAGE = DOCS / "reproducible.md"
ROWS, VOCABULARY = 16, 4096
USUAL, ONE_BY_ONE, REPRODUCIBLE = "usual", "usual, one by one", "reproducible"
WAYS = (USUAL, ONE_BY_ONE, REPRODUCIBLE)


def main() -> None:
    parser = rank_parser(__doc__, rounds=15)
    parser.add_argument("--steps", type=int, default=2, help="timed in a round, after one that is not")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 64], help="of sequences, in tokens")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    run_on_ranks(measure, parse_arguments(parser, rounds=1, steps=1, stages=[0], lengths=[64]))


def measure(options: argparse.Namespace) -> None:
    with rank_group(options.threads) as group:
        rows = []
        for length in options.lengths:
            for stage in options.stages:
                steps = {way: stepper(way, stage, length, group) for way in WAYS}
                times = take_turns(steps, options)
                if group.rank == 0:
                    ratios = [ratio_text(times[way], times[USUAL], 3) for way in WAYS[1:]]
                    rows.append([str(length), str(stage), *ratios])
                    print(" | ".join(rows[-1]), flush=True)
        if group.rank == 0:
            told = table(["tokens in a sequence", "stage", "one by one / usual", "reproducible / usual"], rows)
            where = f"{group.world} ranks x {options.threads} threads, {options.rounds} rounds."
            print(f"\n{told}\n{where}")
            if options.page:
                fill(PAGE, [where, told])


def take_turns(steps: dict[str, Callable[[], float]], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a step in each round, as the mean over the ranks; the first round warms up."""
    import torch.distributed as dist

    def one_round(way: str) -> float:
        dist.barrier()
        seconds = [steps[way]() for _ in range(1 + options.steps)][1:]
        return mean_over_ranks([statistics.median(seconds)])[0]

    times = interleave({way: partial(one_round, way) for way in WAYS}, options.rounds + 1)
    return {way: seconds[1:] for way, seconds in times.items()}


def stepper(way: str, stage: int, length: int, group: "RankGroup") -> Callable[[], float]:
    """A function that does one step and returns its seconds."""
    import torch

    from motet import load_job
    from motet.models.build import build_trainable_model
    from motet.train.engine import build_engine
    from motet.train.step import MicroBatchLoop, TrainStep

    settings = {ONE_BY_ONE: [f"layout.microbatches={ROWS // group.world}"], REPRODUCIBLE: ["run.reproducible=layout"]}
    shape = [f"layout.zero={stage}", f"data.batch_sequences={ROWS}", "precision.recipe=fp32"]
    job = load_job("tiny", [*shape, *settings.get(way, [])])
    layout, trainee = job.layout_for(group.world), build_trainable_model(job.model, 0, torch.float32, group.device)
    engine = build_engine(trainee.module, group, layout=layout, settings=job, batch_sequences=ROWS)
    wrapped = engine.optimizer.sharded_parameters.wrap_as_forward(trainee.loss_sum)
    loop = MicroBatchLoop(replace(trainee, loss_sum=wrapped), Tokens(length), engine, layout, ROWS)
    whole = TrainStep(engine, loop)

    def step() -> float:
        start = time.perf_counter()
        whole.step(0, job.optimizer.learning_rate)
        return time.perf_counter() - start

    return step


class Tokens:
    """The same batch in every step."""

    def __init__(self, length: int) -> None:
        import torch

        self._tokens = torch.randint(0, VOCABULARY, (ROWS, length + 1), generator=torch.Generator().manual_seed(7))

    def batch(self, step: int, rows: range) -> "Batch":
        import torch

        from motet.core.batch import Batch

        numbers = torch.arange(rows.start, rows.stop)
        tokens = self._tokens[numbers]
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return Batch(inputs, targets, torch.ones(targets.shape), numbers)


if __name__ == "__main__":
    main()
