"""Published measurements in the columns that `motet plan validate` and `motet plan calibrate` read.

    python benchmarks/planner/convert.py steps.csv > rows.csv

A row that these columns cannot express is reported and left out: each is read again and compared.
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1]))

from planner.published_files import read_published_file

from motet.collectives.cost.published_curves import CsvRow, read_rows
from motet.core.errors import InputError, check_input
from motet.core.text_files import to_toml
from motet.models.settings import DecoderSettings
from motet.models.spec.block_costs import PublishedDecoderSettings
from motet.plan.frameworks import STACKS
from motet.plan.validation.step_rows import MeasuredStep, SkippedRow, SoftwareColumns, measured_step
from motet.precision.recipe import RECIPES

_RECIPE_OF_COMPUTE = {"float16": "fp16", "float32": "fp32", "bfloat16": "bf16"}
NOTES = "notes"  # A column that nothing reads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    path = parser.parse_args().path
    rows, skipped = converted_rows(path)
    for each in skipped:
        print(f"{path}, line {each.line} is left out: {each.reason}", file=sys.stderr)
    write_rows(rows, sys.stdout)


def converted_rows(path: Path) -> tuple[list[dict[str, str]], list[SkippedRow]]:
    """The rows of a file in motet's columns, and rows that they cannot express."""
    file, sources = read_published_file(path), {row["id"]: row for row in read_rows(path)}
    rows, skipped = list[dict[str, str]](), [*file.skipped]
    for step in file.rows:
        row, source = dict(columns_of(step)), sources[step.id]
        try:
            check_input(measured_step(CsvRow(row)) == _with_variant(step), "no column says all that the row does")
        except InputError as error:
            skipped.append(SkippedRow(source.line, f"row {step.id}: {error}"))
        else:
            rows.append(row | ({NOTES: source[NOTES]} if source.get(NOTES) else {}))
    return rows, skipped


def _with_variant(row: MeasuredStep) -> MeasuredStep:
    """The row with the class of settings with which it is read."""
    model = PublishedDecoderSettings(**dict(cast(DecoderSettings, row.step.model)))
    return replace(row, step=replace(row.step, model=model))


def write_rows(rows: list[Mapping[str, str]], file: Any) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row if name != NOTES))
    names += [NOTES] * any(NOTES in row for row in rows)
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def columns_of(row: MeasuredStep) -> Iterator[tuple[str, str]]:
    """The columns of a row, without those that have their defaults."""
    step, hardware = row.step, row.hardware
    yield from (("id", row.id), ("source", row.source), ("name", row.model), ("quality", row.quality))
    yield from (("device", hardware.device), ("gpus", str(hardware.devices)))
    yield "gpus_per_host", str(hardware.devices_per_host)
    for name in ("inside_Bps", "between_Bps"):
        if (value := getattr(hardware, name)) is not None:
            yield name, _number(value)
    yield from (("layout", step.layout_text), ("stack", step.stack.name), ("matmul", step.matmul))
    yield from (("data.sequence_length", str(step.sequence)), ("data.batch_sequences", str(step.global_batch)))
    recipe = RECIPES[_RECIPE_OF_COMPUTE[step.recipe.compute]]
    yield "precision.recipe", _RECIPE_OF_COMPUTE[step.recipe.compute]
    yield from _flat(cast(DecoderSettings, step.model).model_dump(exclude_defaults=True), "model")
    dtypes = {"reduce_dtype": "reduce", "master_dtype": "master", "moment_dtype": "state"}
    software = {name: getattr(step.recipe, kind) for name, kind in dtypes.items()}
    software = {name: dtype for name, dtype in software.items() if dtype != getattr(recipe, dtypes[name])}
    if step.stack.memory != STACKS[step.stack.name].memory:
        software["memory"] = step.stack.memory
    others = {name: getattr(step, name, None) for name in SoftwareColumns.model_fields}
    others = {name: value for name, value in others.items() if value is not None}
    yield from _flat(SoftwareColumns(**software, **others).model_dump(exclude_defaults=True), "software")
    measured = {"step_time_s": row.seconds, "peak_memory_bytes": row.memory_bytes}
    yield from ((name, _number(value)) for name, value in measured.items() if value is not None)
    yield from [("memory_kind", row.memory_kind)] if row.memory_kind != "outside" else []
    yield from [("outcome", row.outcome)] if row.outcome != "ok" else []


def _number(value: float) -> str:
    return repr(int(value) if value == int(value) else value)


def _flat(values: Mapping[str, Any], section: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        value = asdict(value) if hasattr(value, "__dataclass_fields__") else value
        if isinstance(value, dict):
            yield from _flat(value, f"{section}.{name}")
        elif isinstance(value, str):
            yield f"{section}.{name}", value
        elif value is not None:
            yield f"{section}.{name}", to_toml({"x": value}).removeprefix("x = ").strip()


if __name__ == "__main__":
    main()
