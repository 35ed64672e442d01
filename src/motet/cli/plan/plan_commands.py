"""The commands `motet plan JOB`, `motet plan validate` and `motet plan calibrate`. None of them needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option, Typer

from motet.cli.job_arguments import CommandGroup, JobCommand, Json, Overrides
from motet.cli.output import rare_garbage_collection

_DEFAULT = "layouts"


class _PlanGroup(CommandGroup):
    """A group whose first word is a job if it is not a subcommand."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        is_job = bool(args) and args[0] not in self.commands and not args[0].startswith("-")
        return super().resolve_command(ctx, [_DEFAULT, *args] if is_job else args)


plan_app = Typer(
    cls=_PlanGroup,
    no_args_is_help=True,
    help="Predict memory and time of the layouts of a JOB on a cluster: `motet plan JOB --cluster h100 --gpus 64` is "
    "short for `motet plan layouts JOB ...`.",
)


@plan_app.command(_DEFAULT, cls=JobCommand)
def layouts_command(  # noqa: PLR0913 - a command's options
    *,
    source: Annotated[str, Argument(metavar="JOB", help="A job file, a built-in job, or hf:FOLDER.")],
    overrides: Overrides = None,
    cluster: Annotated[str, Option(metavar="NAME_OR_FILE", help="A preset, or a TOML file.")],
    gpus: Annotated[int, Option(help="Devices of the cluster.")],
    layout: Annotated[
        str | None, Option(metavar="LAYOUT", help='Predict one layout, such as "tp=8 pp=16 recompute=full".')
    ] = None,
    compare: Annotated[
        list[str] | None,
        Option(metavar="LAYOUT", help='Layouts to set side by side: --compare "dp=8 zero=3" "dp=2 tp=4".'),
    ] = None,
    svg: Annotated[Path | None, Option(metavar="FILE", help="Write the comparison as a picture.")] = None,
    write: Annotated[
        Path | None, Option(metavar="FILE", help="Write the job with the first layout, for `motet train FILE`.")
    ] = None,
    top: Annotated[int, Option(help="Number of layouts to print.")] = 10,
    tokens: Annotated[str | None, Option(help="Tokens of a training, such as 15.6T: adds days and GPU-hours.")] = None,
    stack: Annotated[
        str | None, Option(help="The framework that executes the step; else motet with the settings of the job.")
    ] = None,
    matmul: Annotated[
        Literal["float8", "mxfloat8", "float4"] | None, Option(help="Inputs of products; else those of the recipe.")
    ] = None,
    model: Annotated[
        Path | None, Option(metavar="FILE", help="The model as `motet show model --output` wrote it.")
    ] = None,
    headroom: Annotated[str, Option(metavar="SHARE", help="Share of a device's memory that stays free.")] = "3%",
    all_layouts: Annotated[bool, Option("--all", help="Rank also layouts that this version does not train.")] = False,
    rejected: Annotated[bool, Option("--rejected", help="Print every layout that does not fit.")] = False,
    json: Json = False,
) -> None:
    """Rank all layouts of a job on a cluster by their predicted time, and say why others do not fit."""
    with rare_garbage_collection():
        from motet.cli.plan.plan_report import PlanRequest, plan_layouts, split_layouts

        settings, layouts = split_layouts(tuple(overrides or ()), tuple(compare or ()))
        words = (settings, cluster, gpus, layout, top, tokens, stack, matmul, model, headroom)
        plan_layouts(PlanRequest(source, *words, all_layouts, rejected, json, layouts, svg, write))


@plan_app.command("validate")
def validate_command(
    *,
    path: Annotated[Path, Argument(metavar="FILE.csv", help="Published measurements, with a header.")],
    by: Annotated[
        Literal["source", "device", "software"], Option(help="The property of rows that errors are printed for.")
    ] = "source",
    json: Json = False,
) -> None:
    """Predict published steps, and print how far the predictions are from the measurements."""
    from motet.cli.plan.validate_report import validate_plan

    validate_plan(path, json=json, by=by)


@plan_app.command("calibrate")
def calibrate_command(
    *,
    path: Annotated[Path, Argument(metavar="FILE.csv", help="Measured steps, as for `motet plan validate`.")],
    hold_out: Annotated[
        Literal["model", "source", "layers", "degrees", "layout"],
        Option(help="Fit on all other rows, and predict those of each model, source, depth or degrees in turn."),
    ] = "model",
    share: Annotated[
        float | None,
        Option(help="Fit on this share of the rows, of all layouts, and predict the rest."),
    ] = None,
    json: Json = False,
) -> None:
    """Fit nine constants of device, links and framework to measured steps, and predict the rows that are left out."""
    from motet.cli.plan.validate_report import calibrate_plan

    calibrate_plan(path, hold_out=hold_out, share=share, json=json)
