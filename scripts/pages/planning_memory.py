"""The page of the constants of planned memory: their values, origins, and the errors without each of them.

It needs files of published measurements, which are not part of the project: `steps.csv` and `memory_small_models.csv`.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from planner.published_files import read_published_file

from motet.plan.frameworks import CONSTANT_ORIGINS, EXPERT_IMBALANCE, MEMORY_CONSTANTS, MemoryConstants
from motet.plan.validation.predictions import fit_report, memory_comparison
from motet.plan.validation.step_rows import MeasuredStep
from pages import ROOT, commit, markdown_table

PAGE = "reference/planning-memory.md"
_FOLDER = ROOT.parent / "shared/validation"
_IMBALANCE = "expert_imbalance"
_CANDIDATES = [share / 100 for share in range(41)]  # Shares of fragmentation


@dataclass(frozen=True)
class Published:
    """All rows, of steps and of small models."""

    steps: list[MeasuredStep]
    small: list[MeasuredStep]

    def errors(self) -> list[str]:
        """Mean errors of steps by quality, and of small models; wrong predictions that a step fits, or does not."""
        each = [
            _mean_error([row for row in self.steps if row.quality == "A"]),
            _mean_error([row for row in self.steps if row.quality == "B"]),
            _mean_error(self.small),
        ]
        report = fit_report(self.steps)
        return [*(f"{error:.1%}" for error in each), str(report["wrong"])]

    def balanced(self) -> "Published":
        """The same rows with experts that all get as many tokens."""
        return Published(*([_with_imbalance(row) for row in rows] for rows in (self.steps, self.small)))


def measure(words: list[str]) -> tuple[str, bool]:
    """The page, from a folder of measurements."""
    folder = Path(words[0]) if words else _FOLDER
    steps, small = (read_published_file(folder / f"{name}.csv").rows for name in ("steps", "memory_small_models"))
    return _page(Published(steps, small)), True


def _page(rows: Published) -> str:
    head = ("constant", "values", "origin", "from", "steps A", "steps B", "small models", "wrong fits")
    table = markdown_table(head, [["all of them", "", "", "", *rows.errors()], *_without_each(rows)])
    return f"""# Memory of a plan

`motet plan` predicts memory from the tensors that a framework keeps, which its source shows, and from a few constants.
The guide to [planning](../guide/planning.md#how-a-step-is-predicted) names the categories. This page holds the
predictions of commit {commit()} to published measurements. `python scripts/docs.py {PAGE} FOLDER`
writes the page again from a folder with `steps.csv` and `memory_small_models.csv`.

## Constants

The last four columns are errors without the constant, which is then zero. They are the mean absolute error of published
peak memory, and how many of {len(rows.steps)} steps are predicted wrongly to fit, or not to fit, on their device. Steps
of quality A have all inputs published; of steps of quality B one is not.

{table}
One constant is fitted: `fragmentation`, which the allocator of torch reserves beyond tensors. Megatron's value is
smaller, and assumed. Where a step needs more than its device has, at most half of what `fragmentation` adds is assumed
to be given back: an allocator frees what holds no tensor before it fails. 14 published steps of llm-foundry that ran
would otherwise be predicted not to fit.

## Sources left out

{_left_out(rows)}
The table fits the fragmentation on all other sources, and then predicts the source. Sources that publish allocated
bytes do not depend on it.

## Errors by source

{_by_source(rows)}"""


def _without_each(rows: Published) -> Iterator[list[str]]:
    for name, (origin, where) in CONSTANT_ORIGINS.items():
        if name == _IMBALANCE:
            yield [f"`{name}`", str(EXPERT_IMBALANCE), origin, where, *rows.balanced().errors()]
            continue
        with _constants({name: 0.0}):
            errors = rows.errors()
        yield [f"`{name}`", _values(name), origin, where, *errors]


def _values(name: str) -> str:
    kinds = defaultdict[str, list[str]](list)
    for kind, constants in MEMORY_CONSTANTS.items():
        value = getattr(constants, name)
        if value:
            kinds[f"{value:.4g}"].append(kind)
    return "; ".join(f"{value} ({', '.join(members)})" for value, members in kinds.items())


@contextmanager
def _constants(changes: dict[str, float]) -> Iterator[None]:
    """Other constants in all frameworks that have them."""
    before = dict(MEMORY_CONSTANTS)
    try:
        for kind, constants in before.items():
            present = {name: value for name, value in changes.items() if getattr(constants, name)}
            MEMORY_CONSTANTS[kind] = replace(constants, **present)
        yield
    finally:
        MEMORY_CONSTANTS.update(before)


def _with_imbalance(row: MeasuredStep) -> MeasuredStep:
    return replace(row, step=replace(row.step, expert_imbalance=1.0))


def _mean_error(rows: Sequence[MeasuredStep]) -> float:
    errors = [abs(each.error) for each in map(memory_comparison, rows) if each is not None]
    return mean(errors) if errors else 0.0


def _short(source: str) -> str:
    return source.split(" ")[0].removeprefix("docs.")


def _sources(rows: Sequence[MeasuredStep]) -> dict[str, list[MeasuredStep]]:
    sources = defaultdict[str, list[MeasuredStep]](list)
    for row in rows:
        if row.memory_bytes is not None:
            sources[_short(row.source)].append(row)
    return dict(sorted(sources.items()))


def _fit_fragmentation(rows: Sequence[MeasuredStep]) -> float:
    def error(share: float) -> float:
        with _shared_fragmentation(share):
            return _mean_error(rows)

    return min(_CANDIDATES, key=error)


@contextmanager
def _shared_fragmentation(share: float) -> Iterator[None]:
    before, fitted = dict(MEMORY_CONSTANTS), MEMORY_CONSTANTS["fsdp"].fragmentation
    changed = {kind: _replaced(each, share) for kind, each in before.items() if each.fragmentation == fitted}
    try:
        MEMORY_CONSTANTS.update(changed)
        yield
    finally:
        MEMORY_CONSTANTS.update(before)


def _replaced(constants: MemoryConstants, share: float) -> MemoryConstants:
    return replace(constants, fragmentation=share)


def _left_out(rows: Published) -> str:
    reserved = [row for row in rows.steps if row.memory_kind in ("reserved", "outside")]
    sources, lines = _sources(reserved), []
    for name, members in sources.items():
        share = _fit_fragmentation([row for other, each in sources.items() if other != name for row in each])
        with _shared_fragmentation(share):
            error = _mean_error(members)
        lines.append([name, str(len(members)), f"{share:.2f}", f"{error:.1%}", f"{_mean_error(members):.1%}"])
    return markdown_table(("source", "rows", "fragmentation of the others", "error with it", "error"), lines)


def _by_source(rows: Published) -> str:
    groups = {**_sources(rows.steps), "Megatron-core's tests of small models": rows.small}
    lines = [[name, str(len(members)), f"{_mean_error(members):.1%}"] for name, members in groups.items()]
    return markdown_table(("source", "rows", "mean error"), lines)
