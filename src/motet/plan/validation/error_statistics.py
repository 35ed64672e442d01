"""How far predictions are from measurements: errors, ranks, and the cost of choosing by prediction."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import mean, median

_DISTINCT = 1.05  # Pairs of measured times count if they differ by more


@dataclass(frozen=True)
class PredictionError:
    """A prediction and a measurement, of which less is better."""

    id: str
    predicted: float
    measured: float
    problem: Hashable = None  # Equal for layouts of the same problem
    layout: Hashable = None  # Rows of a problem with equal layouts count as one
    quality: str = "A"

    @property
    def error(self) -> float:
        """The relative error with its sign."""
        return self.predicted / self.measured - 1


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which a share of the values lies, interpolated; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def error_summary(rows: Sequence[PredictionError]) -> dict[str, float | int | None]:
    """Mean, median, 90th percentile and maximum of the absolute errors."""
    errors = [abs(row.error) for row in rows]
    if not errors:
        return {"rows": 0, "mape": None, "median": None, "p90": None, "max": None}
    return {
        "rows": len(errors),
        "mape": mean(errors),
        "median": median(errors),
        "p90": quantile(errors, 0.9),
        "max": max(errors),
    }


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for index in order[first : last + 1]:
            ranks[index] = (first + last) / 2
        first = last + 1
    return ranks


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """The rank correlation; equal values share their ranks. None for less than three pairs."""
    if len(left) < 3:
        return None
    a, b = _ranks(left), _ranks(right)
    mean_a, mean_b = mean(a), mean(b)
    covariance = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    variances = sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)
    return covariance / variances**0.5 if variances else None


def ranking_summary(rows: Sequence[PredictionError]) -> dict[str, float | int | None]:
    """Per problem with at least two layouts: the regret of taking the layout that is predicted to be the best, and the
    share of pairs in the right order, if they differ by over 5 %."""
    problems = defaultdict[Hashable, list[PredictionError]](list)
    for row in rows:
        problems[row.problem].append(row)
    regrets, right, pairs = list[float](), 0, 0
    for members in problems.values():
        layouts = _means_of_layouts(members)
        if len(layouts) < 2:
            continue
        chosen = min(layouts, key=lambda row: row.predicted)
        regrets.append(chosen.measured / min(row.measured for row in layouts) - 1)
        for a, b in combinations(layouts, 2):
            if max(a.measured, b.measured) > _DISTINCT * min(a.measured, b.measured):
                pairs += 1
                right += (a.measured < b.measured) == (a.predicted < b.predicted) and a.predicted != b.predicted
    return {
        "problems": len(regrets),
        "regret": mean(regrets) if regrets else None,
        "pairs": pairs,
        "pairs_right": right / pairs if pairs else None,
    }


def _means_of_layouts(rows: Sequence[PredictionError]) -> list[PredictionError]:
    """One row for each layout, with the means of its rows."""
    layouts = defaultdict[Hashable, list[PredictionError]](list)
    for row in rows:
        layouts[row.id if row.layout is None else row.layout].append(row)
    return [
        replace(same[0], predicted=mean(row.predicted for row in same), measured=mean(row.measured for row in same))
        for same in layouts.values()
    ]
