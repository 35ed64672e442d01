"""The frame of a benchmark: contenders take turns in rounds, and each round gives one ratio."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name")
Result = TypeVar("Result")


PROGRESS_S = 5.0


def progress(text: str) -> None:
    """Print the next action of the first rank on stderr."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def interleave(
    contenders: Mapping[Name, Callable[[], Result]], rounds: int, stride: int = 1
) -> dict[Name, list[Result]]:
    """Run every contender once in each round; the first one moves on by `stride` from round to round."""
    names = list(contenders)
    results: dict[Name, list[Result]] = {name: [] for name in names}
    told_s = float("-inf")
    for number in range(rounds):
        turn = number * stride % len(names)
        for index, name in enumerate(names[turn:] + names[:turn]):
            if time.monotonic() - told_s > PROGRESS_S:
                progress(f"round {number + 1} of {rounds}, {index + 1} of {len(names)}: {name}")
                told_s = time.monotonic()
            results[name].append(contenders[name]())
    return results


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    """The mean of each value over the ranks of the default group."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    means: list[float] = (total / dist.get_world_size()).tolist()
    return means


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratio_text(numerators: Sequence[float], denominators: Sequence[float], digits: int = 2) -> str:
    """The median of the ratios, and their quartiles: `1.23x (1.20 to 1.25)`."""
    low, middle, high = quartiles(ratios(numerators, denominators))
    return f"{middle:.{digits}f}x ({low:.{digits}f} to {high:.{digits}f})"
