"""The commands `motet plan JOB` and `motet plan validate`. None of them needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option, Typer

from motet.cli.parse_sizes import Json

plan_app = Typer(
    no_args_is_help=True,
    help="Predict memory and time of layouts on a cluster that is described, and hold predictions to measurements.",
)


@plan_app.command("validate")
def validate_command(
    *,
    path: Annotated[Path, Argument(metavar="FILE.csv", help="Published measurements, with a header.")],
    by: Annotated[
        Literal["source", "device", "software"], Option(help="What the errors of times are grouped by.")
    ] = "source",
    json: Json = False,
) -> None:
    """Predict published steps, and print how far the predictions are from the measurements."""
    from motet.cli.plan.validate_report import validate_plan

    validate_plan(path, json=json, by=by)
