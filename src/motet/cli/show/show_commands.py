"""The commands `motet show model | layout | step | pipeline | collective | dtype | precision | numerics | memory`.
Only the proof of a split and the trace of a model need torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option, Typer

from motet.cli.collectives.collectives_commands import draw_command
from motet.cli.job_arguments import CommandGroup, JobCommand, Json, Overrides
from motet.cli.output import rare_garbage_collection

show_app = Typer(cls=CommandGroup, no_args_is_help=True, help="Show the parts of a run.")


@show_app.command("model", cls=JobCommand)
def model_command(
    *,
    source: Annotated[
        str, Argument(metavar="JOB_OR_CONFIG", help="A job, hf:FOLDER, or a config.json of Hugging Face.")
    ],
    overrides: Overrides = None,
    sequence_length: Annotated[
        int | None, Option(min=1, help="Tokens per sequence; else the job's, or the config's context.")
    ] = None,
    attention: Annotated[
        Literal["causal", "full"], Option(help="Count attention as far as tokens see each other, or all pairs.")
    ] = "causal",
    trace: Annotated[
        bool, Option("--trace", help="Find the sizes by a forward without memory: of any module, also your own.")
    ] = False,
    output: Annotated[
        Path | None, Option(metavar="FILE", help="Write the model to this file, for `motet plan --model`.")
    ] = None,
    json: Json = False,
) -> None:
    """Parameters, FLOPs and saved activations of each block of a model."""
    from motet.cli.show.model_sizes import ModelRequest, show_model_sizes

    show_model_sizes(ModelRequest(source, overrides or [], sequence_length, attention, trace, output, json))


show_app.command("collective")(draw_command)


@show_app.command("layout", cls=JobCommand)
def layout_command(
    *,
    words: Annotated[str, Argument(metavar="LAYOUT", help='Such as "dp=8 zero=3 shard_group=4".')],
    overrides: Overrides = None,
    job: Annotated[str, Option(help="The job whose model is sharded, and whose batch is read.")] = "tiny",
    ranks: Annotated[
        int | None, Option(min=1, help="Ranks of a layout that does not say dp; the job's when not given.")
    ] = None,
    cluster: Annotated[
        str | None, Option(metavar="NAME_OR_FILE", help="Draw the ranks on the hosts of a preset or a TOML file.")
    ] = None,
    roles: Annotated[bool, Option("--roles", help="Print how `tp` splits each tensor, and why.")] = False,
    json: Json = False,
) -> None:
    """The ranks that hold, sum and gather each part of a layout, and a proof that all elements and rows count once."""
    with rare_garbage_collection():
        from motet.cli.show.layout_report import show_layout

        show_layout(words, overrides or [], job, ranks=ranks, cluster=cluster, roles=roles, json=json)


@show_app.command("step", cls=JobCommand)
def step_command(
    *,
    source: Annotated[str, Argument(metavar="JOB", help="A job file, or the name of a built-in job.")],
    overrides: Overrides = None,
    cluster: Annotated[str, Option(metavar="NAME_OR_FILE", help="A preset, or a TOML file.")],
    ranks: Annotated[int, Option(min=1, help="Ranks that train it.")] = 2,
    layout: Annotated[
        str | None, Option(metavar="LAYOUT", help='Another than the job\'s, such as "tp=2 zero=1 recompute=full".')
    ] = None,
    rank: Annotated[int | None, Option(min=0, help="Draw this rank of a pipeline alone.")] = None,
    svg: Annotated[Path | None, Option(help="Write a picture to this file.")] = None,
    json: Json = False,
) -> None:
    """The planner's simulation of a step: computation and communication of a rank of each stage, in seconds."""
    with rare_garbage_collection():
        from motet.cli.show.step_output import StepRequest, show_step

        show_step(StepRequest(source, overrides or [], ranks, cluster, layout, rank, svg, json))


@show_app.command("pipeline")
def pipeline_command(
    *,
    schedule: Annotated[
        str, Option(metavar="NAME_OR_FILE", help="The name of a schedule, or a file with a line for each rank.")
    ] = "1f1b",
    stages: Annotated[int | None, Option(min=1, help="Ranks of the pipeline; 4, or the file's.")] = None,
    chunks: Annotated[int | None, Option(min=1, help="Stages of a rank; the schedule's, or 2.")] = None,
    microbatches: Annotated[int | None, Option(min=1, help="Micro-batches of a step; 8, or the file's.")] = None,
    durations: Annotated[
        str, Option(help="Durations of forward, backward, its two halves, and a message: F=1,B=2,I=1,W=1,M=0.")
    ] = "",
    svg: Annotated[Path | None, Option(help="Write a picture to this file.")] = None,
    csv: Annotated[
        Path | None, Option(help="Write the actions of each rank to this file, as --schedule reads it.")
    ] = None,
    json: Json = False,
) -> None:
    """The order in which the ranks of a pipeline compute, with idle time, memory and bytes between ranks."""
    from motet.cli.show.pipeline_output import parse_durations, schedule_of_options, show_pipeline
    from motet.parallel.pipeline.schedule_timeline import ScheduleTimeline

    value = schedule_of_options(schedule, stages, chunks=chunks, microbatches=microbatches)
    show_pipeline(ScheduleTimeline(value, parse_durations(durations)), json=json, svg=svg, csv=csv)


@show_app.command("dtype")
def dtype_command(
    *,
    value: Annotated[str | None, Option(metavar="NUMBER", help="Show the bits that hold this number.")] = None,
    json: Json = False,
) -> None:
    """The number formats of deep learning, from FP64 to E8M0: bits, range, step, and how each stores a number."""
    from motet.cli.show.precision_output import show_dtypes

    show_dtypes(value, json=json)


@show_app.command("precision", cls=JobCommand)
def precision_command(
    *,
    source: Annotated[
        str | None, Argument(metavar="[JOB]", help="A job file, or the name of a built-in job; else all recipes.")
    ] = None,
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """The dtype of each kind of tensor, and the bytes that training keeps for each parameter."""
    from motet.cli.show.precision_output import show_precision

    show_precision(source, overrides or [], json=json)


@show_app.command("numerics")
def numerics_command(
    *,
    run: Annotated[Path, Argument(metavar="RUN", help="The folder of a run with monitor.numerics_every.")],
    step: Annotated[int | None, Option(min=1, help="A measured step; else the last one.")] = None,
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32", "float64"] | None,
        Option(help="The format whose range is drawn; else float16, or that of the run if it has 16 bits."),
    ] = None,
    svg: Annotated[Path | None, Option(help="Write a picture to this file.")] = None,
    json: Json = False,
) -> None:
    """Weights, gradients and activations of a run by exponent, and the values that underflow and overflow."""
    from motet.cli.show.numerics_output import show_numerics

    show_numerics(run, step, dtype, json=json, svg=svg)


@show_app.command("memory", cls=JobCommand)
def memory_command(
    *,
    source: Annotated[str, Argument(metavar="JOB", help="A job file, or the name of a built-in job.")],
    overrides: Overrides = None,
    ranks: Annotated[int | None, Option(min=1, help="Ranks that train it; the job's when not given.")] = None,
    predict: Annotated[bool, Option("--predict", help="Predict the bytes, and measure nothing.")] = False,
    budget: Annotated[
        str | None, Option(metavar="SIZE", help="Draw a line at these bytes, such as 8GiB; else at memory.budget.")
    ] = None,
    svg: Annotated[Path | None, Option(help="Write a picture to this file.")] = None,
    json: Json = False,
) -> None:
    """The live bytes of a training step by category, measured on CPU ranks and predicted."""
    from motet.cli.show.memory_output import show_memory

    show_memory(source, overrides or [], ranks, predict=predict, budget=budget, svg=svg, json=json)
