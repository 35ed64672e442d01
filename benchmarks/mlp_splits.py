"""The two ways to split the first linear layer of y = W2 gelu(W1 x) over ranks: by its outputs, or by its inputs.

Split by output columns, W1 gives each rank a part of the inner width. `gelu` works on each part alone, W2 reads
it as it is, and the sum over the ranks comes last, where the width is the hidden size. Split by input columns, W1 gives
each rank a part of a sum, and `gelu` needs the sum itself: the reduction comes before it, where the width is four times
as large. Both are rules of `[layout.rules]`, which are proven before they run. Forward and backward of both run in turn
in the same rank processes; a round gives one ratio. Bytes are counted while a step runs.

    python benchmarks/mlp_splits.py [--ranks 4 --threads 1] [--rounds 15] [--steps 3] [--hidden 256] [--page]

--page writes docs/benchmarks/mlp-splits.md.
"""

import argparse
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

from parts.arguments import parse_arguments
from parts.rank_processes import rank_group, rank_parser, run_on_ranks
from parts.report.pages import DOCS, fill, load_of_machine, table
from parts.rounds import interleave, mean_over_ranks, quartiles, ratios

if TYPE_CHECKING:
    from parts.tensor_parallel_stacks import Stack, StackSize

    from motet.parallel.model_sharding import ModelSharding

PAGE = DOCS / "mlp-splits.md"
WARM_UP = 1
RULES = {"output columns": {"up": "columns"}, "input columns": {"up": "rows", "down": "rows"}}
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""The number of times that (ranks - 1) / ranks of a tensor leave a rank in a ring."""


def main() -> None:
    parser = rank_parser(__doc__, rounds=15)
    parser.set_defaults(ranks=4)
    parser.add_argument("--steps", type=int, default=3, help="timed in a round, after one that is not")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    run_on_ranks(measure, parse_arguments(parser, ranks=2, rounds=1, steps=1, hidden=[64], length=64))


def measure(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from parts.tensor_parallel_stacks import FeedForward, StackSize, sent_and_saved_bytes, split_module, stack_of

    parts = [
        f"{options.ranks} ranks x {options.threads} threads on the backend `motet`; {options.rounds} rounds of "
        f"{options.steps} steps of {options.rows} x {options.length} tokens, float32. {load_of_machine()}"
    ]
    with rank_group(options.threads) as group:
        assert group.process_group is not None
        for hidden in options.hidden:
            size, stacks, shardings = StackSize(1, hidden, options.rows, options.length), {}, {}
            for name, rules in RULES.items():
                module = FeedForward(hidden, 4 * hidden)
                shardings[name] = split_module(module, size, group.process_group, rules=rules)
                stacks[name] = stack_of(module, list(module.parameters()))
            x = torch.ones(size.rows, size.length, hidden, requires_grad=True)
            sent = {name: sent_and_saved_bytes(stack, x, ())[0] for name, stack in stacks.items()}
            times = take_turns(stacks, size, options)
            rows = [row_of(name, times, sent[name], shardings[name], size, options.ranks) for name in RULES]
            parts += [f"## Hidden size {hidden}, inner width {4 * hidden}", table(HEAD, rows)]
        if dist.get_rank() == 0:
            print("\n\n".join(parts), flush=True)
            if options.page:
                fill(PAGE, parts)


def ring_bytes(sharding: "ModelSharding", size: "StackSize", ranks: int) -> int:
    """The bytes of the sharding's collectives, by rings."""
    collectives = {"sum": "all_reduce", "gather": "all_gather", "replicate": "all_gather", "scatter": "reduce_scatter"}
    total = 0
    for comm in sharding.boundary_comms:
        width = size.hidden * (4 if (comm.module, comm.side) in {("up", "output"), ("down", "input")} else 1)
        passes = sum(PASSES[collectives[o]] for o in (comm.operation, comm.conjugate) if o in collectives)
        total += passes * (ranks - 1) * size.tokens * width * 4 // ranks
    return total


def take_turns(stacks: "dict[str, Stack]", size: "StackSize", options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of forward and backward in each round, as the mean over the ranks."""
    import torch
    import torch.distributed as dist

    x = torch.randn(size.rows, size.length, size.hidden, generator=torch.Generator().manual_seed(7))

    def one_round(name: str) -> list[float]:
        seconds = []
        dist.barrier()
        for _ in range(WARM_UP + options.steps):
            start = time.perf_counter()
            stacks[name](x.detach().requires_grad_())
            seconds.append(time.perf_counter() - start)
        return mean_over_ranks([statistics.median(seconds[WARM_UP:])])

    results = interleave({name: partial(one_round, name) for name in stacks}, options.rounds + 1)
    return {name: [seconds for (seconds,) in rounds[1:]] for name, rounds in results.items()}


HEAD = ["W1 is split by", "communication", "bytes counted", "bytes by rings", "step (us)", "time", "quartiles"]


def row_of(
    name: str, times: dict[str, list[float]], sent: int, sharding: "ModelSharding", size: "StackSize", ranks: int
) -> list[str]:
    comms = ", ".join(
        f"{comm.operation} / {comm.conjugate} at the {comm.side} of {comm.module}" for comm in sharding.boundary_comms
    )
    low, middle, high = quartiles(ratios(times[name], times["output columns"]))
    ratio = ["", ""] if name == "output columns" else [f"{middle:.2f}x", f"{low:.2f} to {high:.2f}"]
    step = f"{statistics.median(times[name]) * 1e6:,.0f}"
    return [name, comms, f"{sent:,}", f"{ring_bytes(sharding, size, ranks):,}", step, *ratio]


if __name__ == "__main__":
    main()
