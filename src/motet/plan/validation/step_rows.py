"""Rows of measured steps: columns are settings of a job, a layout as `motet plan --layout` takes it, and measurements.
A row that cannot be read is left out, with the reason; docs/reference/planning-validation.md describes the columns."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from motet.cluster.device_specs import find_planned_device
from motet.collectives.cost.published_curves import CsvRow, check_columns, read_rows
from motet.core.config_loading import FrozenSettings, parse_value, settings_from_dict
from motet.core.errors import InputError, check_input
from motet.data.settings import DataSettings
from motet.models.settings import EncoderSettings
from motet.models.spec.block_costs import PublishedDecoderSettings
from motet.parallel.layout import layout_of_sizes
from motet.plan.frameworks import EXPERT_IMBALANCE, STACKS, MemoryKind
from motet.plan.planned_step import PlannedStep
from motet.plan.search.layout_space import with_layout
from motet.precision.recipe import PrecisionSettings

Outcome = Literal["ok", "OOM"]
MeasuredMemoryKind = Literal["allocated", "allocated last", "reserved", "outside"]
NEEDED_COLUMNS = ("model.layers", "data.sequence_length", "data.batch_sequences", "device", "gpus", "layout")
_Dtype = Literal["float16", "bfloat16", "float32", "float64"]
_Count = Annotated[int, Field(ge=1)]
_Measured = Annotated[float, Field(ge=1e-9)]  # Far below any time or memory


class SoftwareColumns(FrozenSettings):
    """Properties of a framework's run that no setting of a job has."""

    memory: MemoryKind | None = None  # The row of memory constants; that of its stack if None
    reduce_dtype: _Dtype | None = None
    master_dtype: _Dtype | None = None
    moment_dtype: _Dtype | None = None
    has_dropout: bool = False
    extra_outputs: Annotated[int, Field(ge=0)] = 0
    expert_imbalance: Annotated[float, Field(ge=1)] = EXPERT_IMBALANCE
    shards_gradient_sums: bool = False


class StepColumns(FrozenSettings):
    """The columns of a row; a column with a dot is a setting of a section."""

    model: Annotated[PublishedDecoderSettings | EncoderSettings, Field(discriminator="family")]
    data: DataSettings
    precision: PrecisionSettings = PrecisionSettings()
    software: SoftwareColumns = SoftwareColumns()
    layout: str = ""
    device: str
    gpus: _Count
    gpus_per_host: _Count = 8
    inside_Bps: _Measured | None = None  # noqa: N815 - a unit; of a device, in one direction
    between_Bps: _Measured | None = None  # noqa: N815
    stack: str = "motet"
    matmul: Literal["float64", "float32", "bfloat16", "float16", "float8", "mxfloat8", "float4"] | None = None
    id: str
    name: str = ""
    source: str = ""
    quality: str = ""
    step_time_s: _Measured | None = None
    peak_memory_bytes: _Measured | None = None
    memory_kind: MeasuredMemoryKind = "outside"
    outcome: Outcome = "ok"


_VALUES = StepColumns.model_fields.keys() - {"model", "data", "precision", "software"}
_TEXTS = {name for name, field in StepColumns.model_fields.items() if field.annotation is str}


@dataclass(frozen=True)
class MeasuredHardware:
    """The devices and links of a measured run, as far as they were published."""

    device: str
    devices: int
    devices_per_host: int
    inside_Bps: float | None  # noqa: N815 - a unit; of a device, in one direction
    between_Bps: float | None  # noqa: N815


@dataclass(frozen=True)
class MeasuredStep:
    """A published measurement."""

    id: str
    source: str
    model: str
    quality: str
    hardware: MeasuredHardware
    step: PlannedStep
    seconds: float | None
    memory_bytes: float | None
    memory_kind: MeasuredMemoryKind
    outcome: Outcome

    def __post_init__(self) -> None:
        layout, devices = self.step.layout, self.hardware.devices
        product = f"dp = {layout.dp} x tp = {layout.tp} x cp = {layout.cp} x pp = {layout.pp}"
        check_input(
            layout.ranks == devices,
            f"row {self.id}: {product} = {layout.ranks}, but the row has {devices} GPUs; correct one of them",
        )
        _ = self.step.stage_specs  # Refuses layouts that the model cannot have

    @property
    def problem(self) -> tuple[object, ...]:
        """The values that rows share if they differ in their layout alone."""
        hardware, step = self.hardware, self.step
        sizes = hardware.device, hardware.devices, step.global_batch, step.sequence
        return (self.source, self.model, *sizes, step.recipe, step.matmul, step.stack)


class SkippedRow(NamedTuple):
    """A row that cannot be read."""

    line: int
    reason: str


def read_measured_steps(path: Path) -> tuple[list[MeasuredStep], list[SkippedRow]]:
    """(The rows of a file, the rows that cannot be read). A file without any row that can be read is refused."""
    rows = read_rows(path)
    check_columns(path, rows, NEEDED_COLUMNS)
    values = [name for name in rows[0] if "." in name or name in _VALUES]
    for name, other in product(values, rows[0]):
        check_input(
            not other.startswith(f"{name}."), f"{path}: column {other} is a part of {name}; leave one of them out"
        )
    steps, skipped = list[MeasuredStep](), list[SkippedRow]()
    for row in rows:
        try:
            steps.append(measured_step(row))
        except InputError as error:
            text = str(error)
            skipped.append(SkippedRow(row.line, text if text.startswith("row ") else f"row {row['id']}: {text}"))
    if not steps:
        raise InputError(f"{path}, line {skipped[0].line}: {skipped[0].reason}; no row of the file can be read")
    return steps, skipped


def measured_step(row: CsvRow) -> MeasuredStep:
    """A row as a planned step with its measurements."""
    values = settings_from_dict(StepColumns, _sections(row), f"row {row['id']}")
    find_planned_device(values.device)
    per_host = min(values.gpus, values.gpus_per_host)
    return MeasuredStep(
        values.id,
        values.source,
        values.name,
        values.quality,
        MeasuredHardware(values.device, values.gpus, per_host, values.inside_Bps, values.between_Bps),
        _planned_step(values),
        values.step_time_s,
        values.peak_memory_bytes,
        values.memory_kind,
        values.outcome,
    )


def _sections(row: Mapping[str, str]) -> dict[str, Any]:
    """The values of a row as nested sections. Columns without a dot that nothing reads are for people."""
    tree: dict[str, Any] = {"model": {"family": "decoder"}}
    for name, text in row.items():
        *sections, key = name.split(".")
        if text and (sections or key in _VALUES):
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[key] = text if name in _TEXTS else parse_value(text)
    return tree


def _planned_step(values: StepColumns) -> PlannedStep:
    data, software, recipe = values.data, values.software, values.precision.resolved
    recipe = replace(
        recipe,
        reduce=software.reduce_dtype or recipe.reduce,
        master=software.master_dtype or recipe.master,
        state=software.moment_dtype or recipe.state,
    )
    check_input(values.stack in STACKS, f"stack = {values.stack!r}: use one of {', '.join(STACKS)}")
    stack = STACKS[values.stack]
    step = PlannedStep(
        values.model,
        data.sequence_length,
        data.batch_sequences,
        layout_of_sizes(),
        recipe,
        values.matmul or recipe.compute,
        replace(stack, memory=software.memory or stack.memory),
        extra_outputs=software.extra_outputs,
        expert_imbalance=software.expert_imbalance,
        shards_gradient_sums=software.shards_gradient_sums,
        has_dropout=software.has_dropout,
        masked_fraction=data.mask_fraction if data.objective == "masked" else None,
    )
    return with_layout(step, values.layout, values.gpus)
