"""Tensor parallelism of a stack of blocks: motet, torch's `parallelize_module`, and a loop written by hand.

All of them split the same blocks with the same values over the same ranks, and do forward and backward on the same
input, a few times each in turn; who comes first changes from round to round. A round gives one ratio per peer. Everyone
runs on the backend `motet` and on Gloo, with and without sequence parallelism. After the first round, which warms up,
all must have the same sum of squares of the output.

Then motet alone communicates activations in 1, 2 and 4 pieces (`communication.tp_pieces`), in turns as well.

    python benchmarks/tensor_parallel.py [--ranks 2 --threads 1] [--rounds 15] [--steps 3] [--layers 4] [--hidden 256]
                                         [--rows 2 --length 256] [--only motet torch hand] [--pieces 1 2 4] [--page]

--page writes docs/benchmarks/tensor-parallel.md.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from parts.arguments import parse_arguments
from parts.rank_processes import rank_group, rank_parser, run_on_ranks
from parts.report.pages import DOCS, fill, load_of_machine, table
from parts.rounds import interleave, mean_over_ranks, progress, quartiles, ratios

if TYPE_CHECKING:
    from parts.tensor_parallel_stacks import Stack, StackSize
    from torch import Tensor

PAGE = DOCS / "tensor-parallel.md"
WARM_UP = 1
BACKENDS = ("motet", "gloo")
NAMES = {"motet": "**motet**", "torch": "`parallelize_module`", "hand": "written by hand"}
TARGETS = {"torch": 1.0, "hand": 0.97}
LARGEST_DIFFERENCE = 1e-4
"""Relative difference of two sums of squares: float32 adds products in another order."""

Contender = tuple[str | int, str, bool]
"""(key of NAMES, or number of pieces; backend; with sequence parallelism)"""


def main() -> None:
    parser = rank_parser(__doc__, rounds=15)
    parser.add_argument("--steps", type=int, default=3, help="timed in a round, after one that is not")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--only", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--pieces", type=int, nargs="*", default=[1, 2, 4], help="the first is compared with")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    run_on_ranks(measure, parse_arguments(parser, rounds=1, steps=1, layers=1, hidden=[128], length=64, pieces=[1, 2]))


def measure(options: argparse.Namespace) -> None:
    import torch.distributed as dist
    from parts.tensor_parallel_stacks import StackSize

    warnings.filterwarnings("ignore")
    parts = [conditions(options)]
    with rank_group(options.threads):
        groups = {name: dist.new_group(backend=f"cpu:{name}") for name in BACKENDS}
        for hidden in options.hidden:
            size = StackSize(options.layers, hidden, options.rows, options.length)
            times = take_turns(options.only, size, options, groups=groups)
            parts += [f"## Hidden size {hidden}", table_of(times, size)]
            if options.pieces:
                times = take_turns(options.pieces, size, options, groups=groups)
                parts += [f"### Pieces of activations, hidden size {hidden}", table_of_pieces(times, size)]
        parts += ["## Bytes of a layer", table_of_bytes(options, groups["motet"])]
        if dist.get_rank() == 0:
            print("\n\n".join(parts), flush=True)
            if options.page:
                fill(PAGE, parts)


def take_turns(
    subjects: Sequence[str | int], size: "StackSize", options: argparse.Namespace, *, groups: Mapping[str, Any]
) -> dict[Contender, list[float]]:
    """Seconds of forward and backward in each round, as the mean over the ranks; for motet also in several pieces."""
    import torch
    import torch.distributed as dist
    from parts.tensor_parallel_stacks import STACKS, motet_stack

    contenders = [(who, name, sp) for sp in (False, True) for name in BACKENDS for who in subjects]
    makers = {who: STACKS[who] if isinstance(who, str) else partial(motet_stack, pieces=who) for who in subjects}
    stacks = {}
    for who, name, sp in contenders:
        progress(f"hidden size {size.hidden}: build {who} on {name}" + ", with sequence parallelism" * sp)
        stacks[who, name, sp] = makers[who](size, groups[name], sp)
    whole = torch.randn(size.rows, size.length, size.hidden, generator=torch.Generator().manual_seed(7))
    part = whole.chunk(options.ranks, 1)[dist.get_rank()]

    def input_of(contender: Contender) -> "Tensor":
        return (part if contender[2] else whole).contiguous().requires_grad_()

    def one_round(contender: Contender) -> list[float]:
        x = input_of(contender)
        seconds, squares = [], 0.0
        dist.barrier()
        for _ in range(WARM_UP + options.steps):
            start = time.perf_counter()
            squares = stacks[contender](x)
            seconds.append(time.perf_counter() - start)
            x.grad = None
        return mean_over_ranks([statistics.median(seconds[WARM_UP:]), squares * (options.ranks if contender[2] else 1)])

    for contender, stack in stacks.items():
        check_backend(contender, stack, input_of(contender))
    results = interleave({name: partial(one_round, name) for name in stacks}, options.rounds + 1, stride=5)
    check_outputs({name: rounds[0][1] for name, rounds in results.items()})
    return {name: [seconds for seconds, _ in rounds[1:]] for name, rounds in results.items()}


def check_backend(contender: Contender, stack: "Stack", x: "Tensor") -> None:
    """Check that a contender communicates on its backend."""
    from parts.tensor_parallel_stacks import sent_bytes

    sent = sent_bytes(stack, x)
    if (sent > 0) != (contender[1] == "motet"):
        raise SystemExit(f"{contender} sends {sent} bytes on the backend motet")


def check_outputs(squares: dict[Contender, float]) -> None:
    """Check that all contenders have computed the same output."""
    least, most = min(squares.values()), max(squares.values())
    if not most - least <= LARGEST_DIFFERENCE * least:
        lines = "\n".join(f"  {value:.6f}  {contender}" for contender, value in squares.items())
        raise SystemExit(f"not the same output; the sums of squares after the first round are\n{lines}")


def table_of_pieces(times: dict[Contender, list[float]], size: "StackSize") -> str:
    first = next(iter(times))[0]
    head = ["sequence parallel", "backend", "pieces", "layer (us)", f"speed relative to {first}", "quartiles"]
    rows: list[list[str]] = []
    for (pieces, backend, sequence), seconds in times.items():
        low, middle, high = quartiles(ratios(times[first, backend, sequence], seconds))
        ratio = ["", ""] if pieces == first else [f"{middle:.2f}x", f"{low:.2f} to {high:.2f}"]
        layer = f"{statistics.median(seconds) / size.layers * 1e6:,.0f}"
        rows.append(["yes" if sequence else "no", backend, str(pieces), layer, *ratio])
    return table(head, rows)


def table_of(times: dict[Contender, list[float]], size: "StackSize") -> str:
    head = ["sequence parallel", "", "backend", "layer (us)", "motet is (median)", "quartiles", "target"]
    rows: list[list[str]] = []
    for (who, backend, sequence), seconds in times.items():
        ours: Any = times.get(("motet", backend, sequence), seconds)
        low, middle, high = quartiles(ratios(seconds, ours))
        target = "" if who == "motet" else f"{TARGETS[who]:.2f}: {'met' if middle >= TARGETS[who] else 'missed'}"
        ratio = ["", ""] if who == "motet" else [f"{middle:.2f}x", f"{low:.2f} to {high:.2f}"]
        layer = f"{statistics.median(seconds) / size.layers * 1e6:,.0f}"
        rows.append(["yes" if sequence else "no", NAMES[who], backend, layer, *ratio, target])
    return table(head, rows)


def table_of_bytes(options: argparse.Namespace, group: Any) -> str:
    """Bytes that motet sends and keeps for a layer: counted in one step, and by the formulas."""
    import torch
    from parts.tensor_parallel_stacks import BlockStack, StackSize, sent_and_saved_bytes, split_module, stack_of

    rows = []
    for hidden in options.hidden:
        size = StackSize(options.layers, hidden, options.rows, options.length)
        for sequence in (False, True):
            split_module(module := BlockStack(size), size, group, sequence=sequence)
            parameters = list(module.parameters())
            length = size.length // options.ranks if sequence else size.length
            x = torch.ones(size.rows, length, hidden, requires_grad=True)
            counted = sent_and_saved_bytes(stack_of(module, parameters), x, parameters)
            theory = size.sent_bytes(options.ranks, sequence), size.saved_bytes(options.ranks, sequence)
            # The stack keeps its output as well, for the sum of squares.
            layer = counted[0] // size.layers, (counted[1] - 4 * x.numel()) // size.layers
            pairs = [f"{n:,}" for pair in zip(layer, theory, strict=True) for n in pair]
            rows.append([str(hidden), "yes" if sequence else "no", *pairs])
    head = ["hidden size", "sequence parallel", "sent, counted", "by rings", "saved, counted", "by `ModelSpec`"]
    return table(head, rows)


def conditions(options: argparse.Namespace) -> str:
    return (
        f"{options.ranks} ranks x {options.threads} threads; {options.layers} layers; {options.rounds} rounds of "
        f"{options.steps} steps. Microseconds are medians of forward and backward of one layer. {load_of_machine()}"
    )


if __name__ == "__main__":
    main()
