"""`motet checkpoint export`: a checkpoint in the format of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from motet.cli.checkpoint_tools.dcp import export_dcp_folder
from motet.cli.job_arguments import parse_bytes
from motet.cli.output import log, print_lines
from motet.core.errors import check_input, convert_os_errors
from motet.core.units import format_bytes

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def export_checkpoint_command(
    *,
    run: Annotated[Path, Argument(help="The folder of a run, of which the newest checkpoint counts, or a checkpoint.")],
    folder: Annotated[Path, Argument(help="The folder to make.")],
    to: Annotated[
        Literal["hf", "dcp"],
        Option("--to", help="hf: a folder that transformers loads; dcp: one that torch.distributed.checkpoint loads."),
    ] = "hf",
    dtype: Annotated[str | None, Option(help="bf16, fp16, fp32 or fp64; by default as in the checkpoint.")] = None,
    shard_size: Annotated[str, Option(help="The largest file, unless one tensor is larger.")] = "5GB",
    adapters: Annotated[
        Literal["merge", "peft", "base"],
        Option(help="Add adapters to the weights, write them alone for PEFT, or leave them out."),
    ] = "merge",
) -> None:
    """Write the model of a checkpoint to a new folder: with its config and its tokenizer, or with its optimizer."""
    if to == "dcp":
        has_options = (dtype, shard_size, adapters) != (None, "5GB", "merge")
        check_input(
            not has_options, "--dtype, --shard-size and --adapters are for --to hf; leave them out with --to dcp"
        )
        export_dcp_folder(run, folder)
        return
    from motet.checkpoint.reader import open_checkpoint
    from motet.export.hf_folder import ExportSettings, export_to_hf
    from motet.train.launch.run_folder import job_of_checkpoint

    settings = ExportSettings(_parse_dtype(dtype), parse_bytes(shard_size), adapters)
    with convert_os_errors(f"read {run}", "make it readable for this user"), open_checkpoint(run) as checkpoint:
        job = job_of_checkpoint(checkpoint.path)
        size_bytes = export_to_hf(job, checkpoint, folder, settings=settings, log=log)
    print_lines(f"{folder} has {format_bytes(size_bytes)} of {job.name} at step {checkpoint.step}")


def _parse_dtype(text: str | None) -> str | None:
    name = None if text is None else _DTYPES.get(text, text)
    check_input(name is None or name in _DTYPES.values(), f"--dtype {text}: give one of {', '.join(_DTYPES)}")
    return name
