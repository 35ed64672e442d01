"""Files of published measurements, each with the columns of those who collected them, as rows of the planner.

`steps.csv` has a row for each published run, `a100_single_node.csv` iteration times on one host, and
`memory_small_models.csv` peak memory of Megatron-core's tests. The readers interpret their words.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from planner import memory_rows, published_rows, single_node_rows
from pydantic import ValidationError

from motet.collectives.cost.published_curves import Row, read_rows
from motet.core.errors import InputError
from motet.plan.validation.step_rows import NEEDED_COLUMNS, MeasuredStep, SkippedRow, read_measured_steps

KINDS: tuple[tuple[tuple[str, ...], Callable[[Row], MeasuredStep]], ...] = (
    (published_rows.NEEDED_STEP_COLUMNS, published_rows.measured_step),
    (single_node_rows.COLUMNS, single_node_rows.measured_step),
    (memory_rows.COLUMNS, memory_rows.measured_step),
)


class PublishedFile(NamedTuple):
    """The rows of a file, and rows that cannot be expressed."""

    rows: list[MeasuredStep]
    skipped: list[SkippedRow]
    has_times: bool  # False: the times are those of debug builds, and only memory is compared


def read_published_file(path: Path) -> PublishedFile:
    """The rows of a file of any kind, which its columns tell."""
    rows = read_rows(path)
    columns = set(rows[0])
    if set(NEEDED_COLUMNS) <= columns:
        return PublishedFile(*read_measured_steps(path), has_times=True)
    measured_step = next((read for needed, read in KINDS if set(needed) <= columns), None)
    if measured_step is None:
        raise InputError(f"{path} has the columns of no known kind of file")
    steps, skipped = list[MeasuredStep](), list[SkippedRow]()
    for row in rows:
        name = f"row {row['id']}: "
        try:
            steps.append(measured_step(row))
        except ValidationError as error:  # A model that cannot exist
            skipped.append(SkippedRow(row.line, name + "; ".join(map(_problem_of_model, error.errors()))))
        except InputError as error:
            skipped.append(SkippedRow(row.line, name + str(error).removeprefix(name)))
    return PublishedFile(steps, skipped, has_times=measured_step is not memory_rows.measured_step)


def _problem_of_model(detail: Mapping[str, Any]) -> str:
    """The problem with a size of a model, with its name and value."""
    name, message = ".".join(map(str, detail["loc"])), detail["msg"]
    if detail["type"] == "value_error":
        return str(message).removeprefix("Value error, ")
    return f"{name} = {detail['input']}: {message[:1].lower()}{message[1:]}"
