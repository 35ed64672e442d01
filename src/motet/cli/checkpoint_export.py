"""`motet checkpoint export`: a checkpoint in the format of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from motet.cli.checkpoint_tools.dcp import export_dcp_folder


def export_checkpoint_command(
    *,
    run: Annotated[Path, Argument(help="The folder of a run, of which the newest checkpoint counts, or a checkpoint.")],
    folder: Annotated[Path, Argument(help="The folder to make.")],
    to: Annotated[Literal["dcp"], Option("--to", help="dcp: what torch.distributed.checkpoint loads.")],
) -> None:
    """Write the model of a checkpoint, and its optimizer, to a new folder."""
    assert to == "dcp"
    export_dcp_folder(run, folder)
