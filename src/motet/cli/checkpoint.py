"""`motet checkpoint`: look into the checkpoints of a run, and make others of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, Typer

from motet.cli.checkpoint_export import export_checkpoint_command
from motet.cli.checkpoint_tools.content import inspect_command
from motet.cli.checkpoint_tools.dcp import import_dcp_command
from motet.cli.checkpoint_tools.differences import diff_command
from motet.cli.checkpoint_tools.rewrite_commands import average_command, cast_command
from motet.cli.job_arguments import CommandGroup
from motet.cli.output import log, print_lines
from motet.core.errors import check_input, convert_os_errors
from motet.core.trace import log_if_slow
from motet.core.units import format_bytes
from motet.monitor.stdout_stderr import print_json

if TYPE_CHECKING:
    from motet.checkpoint.verification import CheckpointVerdict

checkpoint_app = Typer(cls=CommandGroup, help="Look into checkpoints, and make others of them.", no_args_is_help=True)


@checkpoint_app.callback()
def checkpoint_root() -> None:
    """Look into checkpoints, and make others of them."""


checkpoint_app.command("import-dcp")(import_dcp_command)
checkpoint_app.command("export")(export_checkpoint_command)
checkpoint_app.command("inspect")(inspect_command)
checkpoint_app.command("diff")(diff_command)
checkpoint_app.command("average")(average_command)
checkpoint_app.command("cast")(cast_command)


@checkpoint_app.command("verify")
def verify_checkpoints_command(
    *,
    run: Annotated[Path, Argument(help="The folder of a run, its folder of checkpoints, or one checkpoint.")],
    json: Annotated[bool, Option("--json", help="Print the checkpoints as JSON.")] = False,
) -> None:
    """Read every file of each checkpoint, and print which are complete. Ends with 0 only if all are."""
    from motet.checkpoint.verification import checkpoint_verdicts

    verdicts = []
    with (
        convert_os_errors(f"read {run}", "make it readable for this user"),
        log_if_slow(log, f"reading every file of the checkpoints in {run} ..."),
    ):
        for verdict in checkpoint_verdicts(run):
            verdicts.append(verdict)
            if not json:
                print_lines(_row(verdict))
    if json:
        print_json([asdict(verdict) for verdict in verdicts])
    damaged = [verdict for verdict in verdicts if verdict.problem]
    checkpoints = [verdict for verdict in verdicts if verdict.step is not None]
    check_input(
        not damaged,
        f"{len(damaged)} of {len(checkpoints)} checkpoints in {run} cannot be used; remove damaged ones to use others",
    )


def _row(verdict: CheckpointVerdict) -> str:
    step = "no checkpoint" if verdict.step is None else f"step {verdict.step}"
    size, files = format_bytes(verdict.size_bytes), f"{verdict.files} file{'s' * (verdict.files != 1)}"
    state = verdict.problem or ("whole" if verdict.step is not None else f"{verdict.path} is not read")
    return f"{step:>13}  {files:>9}  {size:>9}  {state}"
