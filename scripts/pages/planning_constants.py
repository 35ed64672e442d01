"""The page of the planner's fitted constants: values, origins, and the effect of each on sources left out.

`python scripts/docs.py reference/planning-constants.md FILES` measures it from `steps.csv`, `a100_single_node.csv` and
`benchmarks/planner/published_steps.csv`. Each constant is a field of `GenerationShares` or `SoftwareStack`. All are
refitted without the rows of each source in turn.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log
from pathlib import Path

import numpy as np
from planner.published_files import read_published_file

from motet.cluster.device_specs import find_planned_device
from motet.collectives.cost.cluster_fabric import VendorCosts
from motet.plan.frameworks import SoftwareStack
from motet.plan.planned_cluster import GenerationShares, rates_of, shares_of
from motet.plan.time.step_time import StepTimes
from motet.plan.validation.calibration import FitSettings, LinearModel, Vector, fit_constants
from motet.plan.validation.predictions import fabric_of_row
from motet.plan.validation.step_rows import MeasuredStep
from pages import DOCS, commit, markdown_table

PAGE = "reference/planning-constants.md"
_MOST_ROWS_OF_A_FILE = 500
_DIFFERENCE = 0.08
_QUALITY_WEIGHTS = {"A": 1.0, "B": 0.7, "C": 0.3}


@dataclass(frozen=True)
class Kind:
    """A constant that each generation or framework has, or all share."""

    field: str
    key: str  # The key in a mapping, or empty
    guess: float  # Value before a fit, from benchmarks of kernels or counted bytes; `_GUESSES` has those of some owners
    spread: float  # Standard deviation of its logarithm around the guess
    without: float  # The value that leaves the effect out
    meaning: str
    is_hidden_share: bool = False  # The fit is of its complement


_BY_GENERATION = (
    Kind("products", "16", 0.75, 0.12, 1, "share of the peak that very large products of 16 bits reach"),
    Kind("products", "8", 0.75, 0.12, 1, "the same of 8 bits"),
    Kind("products", "4", 0.6, 0.2, 1, "the same of 4 bits"),
    Kind("attention", "flash-1", 0.3, 0.15, 1, "share of the peak of 16 bits that FlashAttention 1 reaches"),
    Kind("attention", "flash-2", 0.5, 0.15, 1, "share of the peak of 16 bits that FlashAttention 2 reaches"),
    Kind("attention", "flash-3", 0.55, 0.15, 1, "the same of cuDNN's kernels"),
    Kind("attention_ramp", "", 1000, 0.4, 0, "tokens at which fused attention reaches half of its rate"),
    Kind("launch_s", "", 8e-06, 0.35, 0, "seconds of the host for each kernel"),
)
_SHARED_BY_GENERATIONS = (
    Kind("memory", "", 0.88, 0.08, 1, "share of the memory bandwidth that streaming kernels reach"),
    Kind("early_attention_ramp", "", 450, 0.4, 0, "tokens at which FlashAttention 1 reaches half of its rate"),
    Kind("attention_backward", "", 0.82, 0.1, 1, "rate of fused attention in a backward over that in a forward"),
    Kind("head_overhead", "", 64, 0.5, 0, "features of a head whose FLOPs take as long as the exponential of a score"),
    Kind("tile_overhead", "", 160, 0.5, 0, "prologue and epilogue of a tile, in elements of the inner dimension"),
    Kind("exposed_memory", "", 0.5, 0.5, 0, "part of reads and writes of products that arithmetic does not hide"),
)
_BY_STACK = (
    Kind("elementwise_passes", "", 2, 0.4, 0, "times that kernels bound by memory move what a forward saves"),
    Kind("kernels_per_block", "", 40, 0.4, 0, "kernels that a forward of a block launches"),
    Kind("tensor_parallel_hidden", "", 0.5, 0.3, 0, "part of collectives on activations that products hide", True),
    Kind("sharded_efficiency", "", 1, 0.2, 1, "share of the bandwidth that gathers of stage 3 reach"),
)
_SHARED_BY_STACKS = (
    Kind("bytes_per_score", "", 12, 0.3, 0, "bytes that unfused attention moves for a pair of query and key"),
    Kind("bytes_per_logit", "", 14, 0.4, 0, "bytes that the loss moves for each logit"),
    Kind("cast_passes", "", 2, 0.4, 0, "times that casts to float8 read or write an input"),
    Kind("block_cast_passes", "", 3, 0.4, 0, "the same of formats with scales of blocks"),
    Kind("expert_efficiency", "", 0.8, 0.2, 1, "rate of products of experts over that of others"),
    Kind("kernels_of_experts", "", 150, 0.5, 0, "further kernels of a block with experts"),
    Kind("kernels_per_expert", "", 25, 0.5, 0, "further kernels for each expert of a rank"),
    Kind("expert_parallel_hidden", "", 0.5, 0.3, 0, "part of all-to-all that other work hides", True),
    Kind("context_parallel_hidden", "", 0.5, 0.3, 0, "part of the exchange of keys that attention hides", True),
    Kind("contention", "", 0.2, 0.5, 0, "seconds by which a second of hidden collectives slows kernels down"),
    Kind("step_overhead_s", "", 0.01, 0.7, 0, "seconds of the host for each step"),
)
# Stacks and generations have these defaults, which count as shared by all.
_STACK_DEFAULTS = {field.name: field.default for field in fields(SoftwareStack)}


_GUESSES = {
    ("Volta", "products 16"): 0.8,
    ("Ampere", "products 16"): 0.9,
    ("Hopper at 500 W", "products 16"): 0.6,
    ("Hopper at 500 W", "products 8"): 0.65,
    ("Ampere", "attention flash-2"): 0.66,
    ("Ampere", "attention flash-3"): 0.66,
    ("Ampere", "attention flash-1"): 0.35,
    ("Hopper", "attention flash-1"): 0.2,
    ("Ampere", "attention_ramp"): 450,
    ("Hopper", "attention flash-2"): 0.38,
    ("Hopper at 500 W", "attention flash-2"): 0.34,
    ("Blackwell", "attention flash-2"): 0.17,  # Kernels of Hopper
    ("Blackwell at 1400 W", "attention flash-2"): 0.17,
    ("torchtitan-eager", "elementwise_passes"): 4,
    ("torchtitan-compiled", "elementwise_passes"): 1.5,
    ("torchtitan-async-tp", "elementwise_passes"): 1.5,
    ("megatron", "elementwise_passes"): 1.3,
    ("megatron-unfused", "elementwise_passes"): 1.5,
    ("megatron-2021", "elementwise_passes"): 1.5,
    ("megatron-deepspeed", "elementwise_passes"): 2.5,
    ("megatron-deepspeed-blocking", "elementwise_passes"): 2.5,
    ("deepspeed", "elementwise_passes"): 2.5,
    ("megatron-deepspeed", "kernels_per_block"): 80,
    ("megatron-deepspeed-blocking", "kernels_per_block"): 80,
    ("torchtitan-eager", "kernels_per_block"): 60,
    ("torchtitan-compiled", "kernels_per_block"): 20,
    ("torchtitan-async-tp", "kernels_per_block"): 20,
    ("deepspeed", "sharded_efficiency"): 0.1,
}


@dataclass(frozen=True)
class PlanConstant:
    """One constant. `owner` is a generation, a framework, or empty."""

    owner: str
    kind: Kind
    value: float

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.kind.field, self.kind.key)))

    @property
    def guess(self) -> float:
        return _GUESSES.get((self.owner, self.name), self.kind.guess)

    def logarithm_of(self, value: float) -> float:
        """The logarithm whose `changed` value this is."""
        return log((1 - value) / (1 - self.value) if self.kind.is_hidden_share else value / self.value)

    def changed(self, logarithm: float) -> float:
        """The value, or its complement, times the exponential of a logarithm."""
        if self.kind.is_hidden_share:
            return 1 - (1 - self.value) * exp(logarithm)
        return self.value * exp(logarithm)


_Values = Mapping[PlanConstant, float]


def predict_seconds(row: MeasuredStep, values: _Values) -> float:
    """The time of a row with other values of some constants."""
    device = find_planned_device(row.hardware.device)
    shares, stack = shares_of(device.generation), row.step.stack
    generation = shares.generation
    for constant, value in values.items():
        kind = constant.kind
        if kind in _BY_GENERATION + _SHARED_BY_GENERATIONS and constant.owner in ("", generation):
            shares = replace(shares, **{kind.field: _new_value(shares, kind, value)})
        elif kind in _BY_STACK + _SHARED_BY_STACKS and constant.owner in ("", stack.name):
            stack = replace(stack, **{kind.field: value})
    fabric = fabric_of_row(row.hardware)
    times = StepTimes(rates_of(device, shares), fabric.devices_per_host, VendorCosts(fabric))
    return times.predict(replace(row.step, stack=stack)).seconds


def _new_value(shares: GenerationShares, kind: Kind, value: float) -> object:
    old = getattr(shares, kind.field)
    return {**old, kind.key: value} if kind.key else value


def find_constants(rows: Sequence[MeasuredStep]) -> list[PlanConstant]:
    """All constants of the generations and frameworks of the rows."""
    row_shares = [shares_of(find_planned_device(row.hardware.device).generation) for row in rows]
    generations = {shares.generation: shares for shares in row_shares}
    stacks = {row.step.stack.name: row.step.stack for row in rows}
    result = list[PlanConstant]()
    for name, shares in sorted(generations.items()):
        for kind in _BY_GENERATION:
            value = getattr(shares, kind.field)
            result.append(PlanConstant(name, kind, value[kind.key] if kind.key else value))
    for name, stack in sorted(stacks.items()):
        for kind in _BY_STACK:
            value = getattr(stack, kind.field)
            if value != _STACK_DEFAULTS[kind.field]:
                result.append(PlanConstant(name, kind, value))
    result += [PlanConstant("", kind, getattr(row_shares[0], kind.field)) for kind in _SHARED_BY_GENERATIONS]
    result += [PlanConstant("", kind, float(str(_STACK_DEFAULTS[kind.field]))) for kind in _SHARED_BY_STACKS]
    return result


class HeldOutErrors:
    """Errors of sources that constants were not fitted on."""

    def __init__(self, rows: Sequence[MeasuredStep]) -> None:
        self.rows = [row for row in rows if row.seconds]
        self.measured: Vector = np.array([log(row.seconds) for row in self.rows if row.seconds])
        self.sources = np.array([_publisher(row.source) for row in self.rows])
        self._weights = np.array([_QUALITY_WEIGHTS.get(row.quality, 1.0) for row in self.rows])
        for source in set(self.sources):
            self._weights[self.sources == source] *= 3 / np.sqrt(np.sum(self.sources == source))
        candidates = find_constants(self.rows)
        base, columns = self._logs({}), list[Vector]()
        self.constants = list[PlanConstant]()
        for constant in candidates:
            column = (self._logs({constant: constant.changed(_DIFFERENCE)}) - base) / _DIFFERENCE
            if np.any(np.abs(column) > 1e-6):
                self.constants.append(constant)
                columns.append(column)
        self._model = LinearModel(np.zeros(len(columns)), base, np.stack(columns, axis=1))
        self._spreads = np.array([constant.kind.spread for constant in self.constants])
        self._centers = np.array([constant.logarithm_of(constant.guess) for constant in self.constants])

    def fitted(self) -> dict[PlanConstant, float]:
        """The values that fit all rows best, near the present ones."""
        logs = self._fit(self._model, np.arange(len(self.rows)))
        return {constant: constant.changed(x) for constant, x in zip(self.constants, logs, strict=True)}

    def present(self) -> Vector:
        """Errors with the present values."""
        return self._errors(self._model.base)

    def by(self, groups: Sequence[str]) -> list[tuple[str, str, str, str]]:
        """Rows of each group, error with the present values, and with constants fitted on all other sources."""
        held_out, present, result = self.errors(), self.present(), []
        for group in sorted(set(groups)):
            members = np.array(groups) == group
            errors = (f"{each[members].mean():.1%}" for each in (present, held_out))
            result.append((group, str(members.sum()), *errors))
        return result

    def classes(self) -> list[str]:
        """The class of each row: the generation of its devices, and whether the model has experts."""
        devices = (find_planned_device(row.hardware.device) for row in self.rows)
        return [
            f"{device.generation}, {'with' if row.step.has_experts else 'without'} experts"
            for device, row in zip(devices, self.rows, strict=True)
        ]

    def errors(self) -> Vector:
        """The error of each row, with constants that were fitted to all other sources."""
        return self._held_out(self._model)

    def without(self, constant: PlanConstant) -> float:
        """The mean error if a constant has the value without effect, and all others are refitted."""
        jacobian = self._model.jacobian.copy()
        jacobian[:, self.constants.index(constant)] = 0
        base = self._logs({constant: constant.kind.without or 1e-9})
        return float(self._held_out(LinearModel(self._model.point, base, jacobian)).mean())

    def _logs(self, values: _Values) -> Vector:
        return np.array([log(predict_seconds(row, values)) for row in self.rows])

    def _errors(self, logs: Vector) -> Vector:
        result: Vector = np.abs(np.exp(logs - self.measured) - 1)
        return result

    def _held_out(self, model: LinearModel) -> Vector:
        errors: Vector = np.zeros(len(self.rows))
        for source in set(self.sources):
            members = self.sources == source
            others, chosen = np.where(~members)[0], np.where(members)[0]
            logs = self._fit(model, others)
            errors[chosen] = self._errors(model.predict(logs))[chosen]
        return errors

    def _fit(self, model: LinearModel, rows: np.ndarray) -> Vector:
        settings = FitSettings(self._weights[rows], self._centers, self._spreads)
        return fit_constants(model.select_rows(rows), self.measured[rows], settings)


_PUBLISHERS = ("torchtitan", "mosaic", "kwai", "bigscience", "calculon", "korthikanti", "deepseek", "herd", "vtrain")


def _publisher(source: str) -> str:
    """The publication of a row, which files and tables of it share."""
    lowered = source.lower()
    known = next((name for name in _PUBLISHERS if name in lowered), None)
    publisher = known or re.sub(r"[@\[(].*", "", lowered.split(" table ")[0]).strip()[:50]
    return {"korthikanti": "calculon"}.get(
        publisher, "/".join(publisher.split("/")[:2]) if "functional_tests" in lowered else publisher
    )


def read_rows(paths: Sequence[str]) -> Iterator[MeasuredStep]:
    """The rows of files; a sample of large files."""
    for path in paths:
        rows = [row for row in read_published_file(Path(path)).rows if row.seconds]
        yield from rows if len(rows) <= _MOST_ROWS_OF_A_FILE else random.Random(1).sample(rows, 60)


def measure(words: list[str]) -> tuple[str, bool]:
    """The page, from files of published steps."""
    errors = HeldOutErrors([*read_rows(words)])
    base, fitted = float(errors.errors().mean()), errors.fitted()
    rows = list[tuple[str, ...]]()
    for constant in errors.constants:
        numbers = (f"{number:.3g}" for number in (constant.guess, constant.value, fitted[constant]))
        without = f"{errors.without(constant):.1%}"
        rows.append((f"`{constant.name}`", constant.owner or "all", *numbers, constant.kind.meaning, without))
    text = _TEXT.format(
        page=PAGE,
        commit=commit(),
        rows=len(errors.rows),
        present=f"{errors.present().mean():.1%}",
        held_out=f"{base:.1%}",
        classes=markdown_table(("class", *_ERRORS_HEAD), errors.by(errors.classes())),
        sources=markdown_table(("source", *_ERRORS_HEAD), errors.by(errors.sources.tolist())),
        constants=markdown_table(_CONSTANT_HEAD, rows),
    )
    return text, True


def held_out_table() -> str:
    """The table of errors by class, from the page."""
    page = (DOCS / PAGE).read_text(encoding="utf-8")
    return page.partition(_CLASSES)[2].partition(_SOURCES)[0]


def held_out_error() -> str:
    """The mean error of sources that a fit has not seen, from the page."""
    page = (DOCS / PAGE).read_text(encoding="utf-8")
    return page.partition("and predict them. The mean error is ")[2].partition("%")[0]


_CLASSES, _SOURCES = "By devices and models:", "By source:"
_ERRORS_HEAD = "rows", "error", "error if its source is left out of the fit"
_CONSTANT_HEAD = "constant", "of", "guess", "value", "refitted", "meaning", "held-out error without it"
_TEXT = """# Constants of the planner

The planner predicts the time of a step with the constants of this page, the datasheets of devices, and the constants
of [vendor libraries](../guide/collectives.md#vendor-libraries). None belongs to a model or to a measured run. A
constant of a generation stands in `plan/planned_cluster.py`, one of a framework in `plan/frameworks.py`. Tile sizes
and the rates that they reach (`plan/time/kernel_times.py`) are assumed.

All constants were fitted together to {rows} published steps: with the least absolute deviations of logarithms, a
weight for each source, and a penalty for leaving a guess. A guess comes from published benchmarks of kernels, or from
counting the bytes that kernels move. The mean error of these rows is {present}; the next section has the errors of rows
that a fit has not seen.
`python scripts/docs.py {page} FILES` made this page at commit {commit}, from `steps.csv`, `a100_single_node.csv` and
`benchmarks/planner/published_steps.csv`.

## Sources that a fit has not seen

All constants are fitted without the rows of a source, from the guesses, and predict them. The mean error is {held_out}.
A framework that only one source used then keeps its guesses. This is the figure that other pages cite.

By devices and models:

{classes}
By source:

{sources}
## Constants

`refitted` is the value that fits all rows best near the values in use. The last column is the mean error of sources
left out if the effect of the constant is left out (shares are 1, overheads 0) and all others are fitted again; with all
constants it is {held_out}. A constant that improves nothing there is kept where benchmarks of kernels show its effect.

{constants}"""
