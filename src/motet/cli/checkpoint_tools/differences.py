"""`motet checkpoint diff`: the tensors in which two checkpoints differ."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from motet.cli.checkpoint_tools.progress import byte_progress
from motet.cli.output import print_lines, table_lines
from motet.core.errors import ReplicaMismatchError, convert_os_errors
from motet.core.units import format_count
from motet.monitor.stdout_stderr import print_json

if TYPE_CHECKING:
    from motet.checkpoint.tools.comparison import StoredDifference


def diff_command(
    *,
    a: Annotated[Path, Argument(help="A checkpoint, or a run for its newest one.")],
    b: Annotated[Path, Argument(help="Another one.")],
    json: Annotated[bool, Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Print the tensors that differ: names, shapes, dtypes, elements. Ends with 0 only if all bits are equal."""
    from motet.checkpoint.reader import open_checkpoint
    from motet.checkpoint.tools.comparison import compare_checkpoints

    with convert_os_errors(f"read {a} and {b}", "make them readable for this user"):
        first, second = open_checkpoint(a), open_checkpoint(b)
        report = byte_progress("comparing", first.size_bytes)
        differences = list(compare_checkpoints(first, second, report))
    tensors = len({*first.names, *second.names})
    if json:
        tree = [_to_json(difference) for difference in differences]
        steps = {"a": first.step, "b": second.step}
        print_json({"steps": steps, "tensors": tensors, "differences": tree})
    else:
        print_lines(*table_lines(map(_row, differences), right=(1, 2)))
    if differences:
        raise ReplicaMismatchError(
            f"{len(differences)} of {tensors} tensors differ between {first.path} and {second.path}"
        )
    if not json:
        print_lines(f"{first.path} and {second.path} have the same {tensors} tensors, bit for bit")


def _to_json(difference: StoredDifference) -> dict[str, Any]:
    """Plain values; JSON has no NaN and no infinity, which are texts."""
    largest = difference.max_abs_difference
    return asdict(difference) | {"max_abs_difference": largest if isfinite(largest) else str(largest)}


def _row(difference: StoredDifference) -> tuple[str, str, str, str]:
    for path, shape in zip("AB", difference.shapes, strict=True):
        if shape is None:
            return difference.name, "", "", f"is not in {path}"
    shapes = [list(shape or ()) for shape in difference.shapes]
    if not difference.is_comparable:
        return difference.name, "", "", f"is {shapes[0]} in A and {shapes[1]} in B"
    dtypes = f"{difference.dtypes[0]} in A and {difference.dtypes[1]} in B" if len({*difference.dtypes}) > 1 else ""
    elements = (
        "1 element differs" if difference.elements == 1 else f"{format_count(difference.elements)} elements differ"
    )
    count = elements if difference.elements else "equal values"
    return (
        difference.name,
        count,
        f"by up to {difference.max_abs_difference:.3g}" if difference.elements else "",
        dtypes,
    )
