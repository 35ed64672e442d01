"""The price of dropout masks that do not depend on the layout, against `F.dropout`.

`F.dropout` draws from one sequential generator; motet's function mode computes each element of a mask from (seed, step,
block, dropout of the block, row, index in the row). Both drop the same tensors, with and without a backward, in turn in
one process; who comes first changes from round to round. A round does some calls of each and gives one ratio of their
medians.

    python benchmarks/dropout.py [--threads 1] [--rounds 25] [--page]

--page writes docs/benchmarks/dropout.md.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from parts.arguments import parse_arguments
from parts.report.pages import DOCS, fill, table
from parts.rounds import interleave, ratio_text

if TYPE_CHECKING:
    import torch

PAGE = DOCS / "dropout.md"
SHAPES = {"activations": (8, 256, 512), "attention probabilities": (4, 8, 256, 256), "one row": (1, 256, 512)}
DTYPES = ("float32", "bfloat16")
P = 0.1
CALLS = 8  # Calls in a round
TORCH, MOTET = "`F.dropout` (ms)", "motet (ms)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parse_arguments(parser, rounds=1)
    measure(options)


def measure(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(options.threads)
    rows = []
    for name, shape in SHAPES.items():
        for dtype in DTYPES:
            for backward in (False, True):
                x = torch.randn(shape).to(getattr(torch, dtype)).requires_grad_(backward)
                contenders = {way: partial(seconds_of_call, way, x, backward) for way in (TORCH, MOTET)}
                times = interleave(contenders, options.rounds + 1)
                torchs, motets = (times[way][1:] for way in (TORCH, MOTET))  # The first round warms up
                medians = [f"{statistics.median(seconds) * 1e3:.2f}" for seconds in (torchs, motets)]
                passes = "forward and backward" if backward else "forward"
                rows.append([f"{name} {list(shape)}", dtype, passes, *medians, ratio_text(motets, torchs)])
                print(" | ".join(rows[-1]), flush=True)
    told = table(["tensor", "dtype", "", TORCH, MOTET, "motet / `F.dropout`"], rows)
    where = f"p = {P}, {options.threads} threads, {options.rounds} rounds of {CALLS} calls. Milliseconds are medians."
    print(f"\n{told}\n{where}")
    if options.page:
        fill(PAGE, [where, told])


def seconds_of_call(way: str, x: "torch.Tensor", backward: bool) -> float:
    """The median of some calls."""
    import torch

    from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode

    def timed(step: Callable[[], None]) -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    def step() -> None:
        y = torch.nn.functional.dropout(x, P)
        if backward:
            y.backward(gradient)

    gradient = x.detach()
    if way == TORCH:
        return statistics.median(timed(step) for _ in range(CALLS))
    with LayoutInvariantDropoutMode(0).for_rows(0, torch.arange(len(x))):
        return statistics.median(timed(step) for _ in range(CALLS))


if __name__ == "__main__":
    main()
