"""`motet checkpoint inspect`: the tensors of a checkpoint, its files, and who saved it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from motet.cli.output import OutputLine, print_lines, table_lines
from motet.core.errors import convert_os_errors, names_matching
from motet.core.units import format_bytes
from motet.monitor.stdout_stderr import print_json

if TYPE_CHECKING:
    from motet.checkpoint.tools.inspection import CheckpointContent, StoredTensor


def inspect_command(
    *,
    path: Annotated[Path, Argument(help="A checkpoint, or a run for its newest one.")],
    match: Annotated[str, Option(help="Show tensors whose names match this pattern alone, as `*.attention.*`.")] = "*",
    json: Annotated[bool, Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Print the step, the tensors by kind, the files, and who saved a checkpoint. Data files are not read."""
    from motet.checkpoint.tools.inspection import checkpoint_content

    with convert_os_errors(f"read {path}", "make it readable for this user"):
        content = checkpoint_content(path)
    names = {*names_matching([match], [tensor.name for tensor in content.tensors], "--match {!r} matches no tensor")}
    if json:
        tree = content.to_json()
        print_json(tree | {"tensors": {name: each for name, each in tree["tensors"].items() if name in names}})
        return
    print_lines(*_head(content))
    tensors = [tensor for tensor in content.tensors if tensor.name in names]
    by_kind = {kind: list(each) for kind, each in groupby(sorted(tensors, key=lambda t: t.kind), lambda t: t.kind)}
    for kind, each in by_kind.items():
        count = f"{len(each)} tensor{'s' * (len(each) != 1)}"
        print_lines("", f"{kind}: {count}, {format_bytes(sum(tensor.size_bytes for tensor in each))}")
        print_lines(*table_lines((_row(tensor) for tensor in each), right=(3,), indent=2))


def _head(content: CheckpointContent) -> Iterator[OutputLine]:
    saved_by = content.saved_by
    yield f"{content.path}: step {content.step}, format {content.format}, {format_bytes(content.size_bytes)}"
    ranks = (
        f"{saved_by.ranks} rank{'s' * (saved_by.ranks != 1)}, {saved_by.threads} thread{'s' * (saved_by.threads != 1)}"
    )
    yield f"saved by {ranks}, torch {saved_by.torch}" + (
        f", reproducible = {saved_by.reproducible}" if saved_by.reproducible else ""
    )
    if saved_by.outer:
        yield "independent replicas: " + ", ".join(f"{key} = {value}" for key, value in saved_by.outer.items())
    if saved_by.loss_scaling:
        yield f"loss scale {saved_by.loss_scaling.scale}"
    yield f"data {content.data_fingerprint}"
    files = ((name, format_bytes(size_bytes)) for name, size_bytes in content.files.items())
    yield from table_lines(files, right=(1,), indent=2)


def _row(tensor: StoredTensor) -> tuple[str, str, str, str, str]:
    shape = " x ".join(map(str, tensor.shape)) or "one number"
    boxes = f"{tensor.boxes} boxes" if tensor.boxes > 1 else ""
    return tensor.name, shape, tensor.dtype, format_bytes(tensor.size_bytes), boxes
