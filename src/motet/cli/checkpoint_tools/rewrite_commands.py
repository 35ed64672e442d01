"""`motet checkpoint average` and `motet checkpoint cast`: a run folder with a checkpoint that is made of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from motet.cli.checkpoint_tools.progress import byte_progress
from motet.cli.output import log, print_lines
from motet.core.errors import check_input, convert_os_errors
from motet.core.text_files import to_toml, write_file_atomically
from motet.core.trace import log_if_slow
from motet.core.units import format_bytes
from motet.monitor.stdout_stderr import print_json

if TYPE_CHECKING:
    from motet.checkpoint.manifest import CheckpointManifest
    from motet.checkpoint.reader import CheckpointReader
    from motet.checkpoint.tensor_index import Box
    from motet.checkpoint.tools.rewriting import BoxReader

_OUTPUT = Option("--output", "-o", help="The folder to make: a run, which `motet train --resume-from` continues.")
_JSON = Option("--json", help="Print the new checkpoint as JSON.")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def average_command(
    *,
    checkpoints: Annotated[list[Path], Argument(help="Two checkpoints or more, or runs for their newest ones.")],
    output: Annotated[Path, _OUTPUT],
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Write the mean of checkpoints of one model.

    Parameters and floating-point buffers are averaged in float64. The step, the state of the optimizer and other
    buffers are those of the last checkpoint.
    """
    from motet.checkpoint.tools.rewriting import average_reader, check_same_tensors, without_layout

    check_input(len(checkpoints) > 1, "give two checkpoints or more; the mean of one is itself")
    sources = open_verified(checkpoints)
    check_same_tensors(sources)
    manifest = without_layout(sources[-1].manifest)
    write_run(output, sources[-1], manifest, read=average_reader(sources), json=json)


def cast_command(
    *,
    dtype: Annotated[Literal["bf16", "fp16", "fp32", "fp64"], Argument(help="The dtype of the masters.")],
    checkpoint: Annotated[Path, Argument(help="A checkpoint, or a run for its newest one.")],
    output: Annotated[Path, _OUTPUT],
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Write a checkpoint with masters of another dtype.

    Moments that have the dtype of their masters are cast as well. With fp32 and fp64 the job of the new run has
    `precision.master_dtype` set to it.
    """
    from motet.checkpoint.tools.rewriting import cast_dtypes, cast_reader, without_layout

    (source,) = open_verified([checkpoint])
    dtypes = cast_dtypes(source.manifest, _DTYPES[dtype])
    manifest = replace(without_layout(source.manifest), dtypes=dtypes)
    write_run(output, source, manifest, read=cast_reader(source, dtypes), json=json, master_dtype=_DTYPES[dtype])


def open_verified(paths: list[Path]) -> list[CheckpointReader]:
    """Open checkpoints that have no changed byte."""
    from motet.checkpoint.reader import open_checkpoint
    from motet.checkpoint.tools.rewriting import verify_source

    names = ", ".join(map(str, paths))
    with (
        convert_os_errors(f"read {names}", "make it readable for this user"),
        log_if_slow(log, f"reading every file of {names} ..."),
    ):
        sources = [open_checkpoint(path) for path in paths]
        for source in sources:
            verify_source(source)
    return sources


def write_run(
    output: Path,
    source: CheckpointReader | None,
    manifest: CheckpointManifest,
    *,
    read: BoxReader,
    json: bool,
    master_dtype: str | None = None,
    stored_boxes: Callable[[str], Sequence[Box] | None] = lambda _: None,
) -> None:
    """Write a run folder with one checkpoint, and with the job of the source if that is in a run."""
    from motet.checkpoint.tools.rewriting import write_checkpoint
    from motet.core.new_folders import new_folder
    from motet.train.launch.run_folder import CHECKPOINTS_FOLDER, JOB_FILE, read_stored_tree

    run = source.path.absolute().parent.parent if source else None
    job = _with_master_dtype(read_stored_tree(run), master_dtype) if run and (run / JOB_FILE).is_file() else None
    with new_folder(output, manifest.size_bytes, "--output") as unfinished:
        (unfinished / CHECKPOINTS_FOLDER).mkdir()
        report = byte_progress(f"writing {output}", manifest.size_bytes)
        path = write_checkpoint(
            unfinished / CHECKPOINTS_FOLDER, manifest, read, report=report, stored_boxes=stored_boxes
        )
        if job is not None:
            write_file_atomically(unfinished / JOB_FILE, to_toml(job).encode())
    path = output / CHECKPOINTS_FOLDER / path.name
    if json:
        print_json({"path": str(path), "step": manifest.step, "size_bytes": manifest.size_bytes, "has_job": bool(job)})
        return
    use = (
        f"`motet train --resume-from {output}` continues from it"
        if job
        else f"{source.path if source else 'its source'} is in no run, so it has no job"
    )
    print_lines(f"{path}: step {manifest.step}, {format_bytes(manifest.size_bytes)}; {use}")


def _with_master_dtype(job: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """The job with masters of a dtype, if a run can have them."""
    precision: dict[str, Any] = job.get("precision", {})
    if dtype in ("float32", "float64") and precision.get("recipe") != "fp64":
        return job | {"precision": precision | {"master_dtype": dtype}}
    return job
