"""Checkpoints in the format of torch's Distributed Checkpoint: `motet checkpoint export --to dcp`, `import-dcp`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from motet.cli.checkpoint_tools.progress import byte_progress
from motet.cli.checkpoint_tools.rewrite_commands import open_verified, write_run
from motet.cli.output import log, print_lines
from motet.core.errors import convert_os_errors
from motet.core.units import format_bytes

if TYPE_CHECKING:
    from motet.checkpoint.reader import CheckpointReader
    from motet.train.job import Job


def export_dcp_folder(run: Path, folder: Path) -> None:
    """Write a folder that torch's `FileSystemReader` loads."""
    from motet.checkpoint.tools.dcp_export import DcpExport, export_to_dcp
    from motet.core.new_folders import new_folder
    from motet.train.launch.run_folder import JOB_FILE, read_stored_job

    (checkpoint,) = open_verified([run])
    run_folder = checkpoint.path.absolute().parent.parent
    job = read_stored_job(run_folder) if (run_folder / JOB_FILE).is_file() else None
    if job is None:
        log(f"{checkpoint.path} is in no run, so the optimizer gets no groups of parameters")
    export = DcpExport(checkpoint, _param_groups(checkpoint, job), _tied_names(job)) if job else DcpExport(checkpoint)
    with new_folder(folder, export.size_bytes) as unfinished:
        export_to_dcp(export, unfinished, report=byte_progress(f"writing {folder}", export.size_bytes))
    print_lines(f"{folder}: {len(export.names)} tensors at step {checkpoint.step}, {format_bytes(export.size_bytes)}")


def _param_groups(checkpoint: CheckpointReader, job: Job) -> list[dict[str, Any]]:
    """One group of all trained parameters, with the settings of the job."""
    import torch

    from motet.train.optimizer.sharded_optimizer import make_torch_optimizer

    settings, group = job.optimizer, [torch.zeros(1)]
    optimizer = make_torch_optimizer([{"params": group, "weight_decay": settings.weight_decay}], settings)
    names = [name.removeprefix("master/") for name in checkpoint.names if name.startswith("master/")]
    return [{**optimizer.param_groups[0], "fused": None, "params": names}]


def _tied_names(job: Job) -> list[list[str]]:
    """The names of each tensor of the module. Code of the user, which would build the module, is not run."""
    import torch

    from motet.export.hf_module_export import tied_names
    from motet.models.build import build_module
    from motet.models.settings import UserModuleSettings

    if isinstance(job.model, UserModuleSettings) and job.model.hf_path is None:
        return []
    with torch.device("meta"):
        return tied_names(build_module(job.model, on_meta=True))


def _open(path: Path) -> CheckpointReader:
    from motet.checkpoint.reader import open_checkpoint

    with convert_os_errors(f"read {path}", "make it readable for this user"):
        return open_checkpoint(path)


def import_dcp_command(
    *,
    folder: Annotated[Path, Argument(help="A folder that torch.distributed.checkpoint saved.")],
    output: Annotated[Path, Argument(help="The folder to make: a run with one checkpoint.")],
    like: Annotated[
        Path | None, Option(help="A run of the same model, whose job, names and dtypes the new run gets.")
    ] = None,
    step: Annotated[int | None, Option(min=0, help="The step; by default the count of the optimizer, or 0.")] = None,
    model: Annotated[str | None, Option(help="The key of the module in the state dict, such as `model`.")] = None,
    optimizer: Annotated[str | None, Option(help="The key of the optimizer, such as `optimizer`.")] = None,
    json: Annotated[bool, Option("--json", help="Print the new checkpoint as JSON.")] = False,
) -> None:
    """Write a checkpoint with the module and the optimizer of Distributed Checkpoint.

    Nothing in the folder is executed. With --like, `motet train --resume-from` continues from it; moments that the
    folder does not have are zero.
    """
    from motet.checkpoint.tools.dcp_import import DcpBoxReader, manifest_of_dcp, open_dcp
    from motet.checkpoint.tools.rewriting import without_layout

    template = None if like is None else _open(like)
    source = open_dcp(folder, model=model, optimizer=optimizer)
    manifest = manifest_of_dcp(source, step=step, like=without_layout(template.manifest) if template else None)
    read = DcpBoxReader(source, manifest.dtypes)
    write_run(output, template, manifest, read=read, json=json, stored_boxes=source.boxes)
