"""`motet show`: drawings and tables of what a run is made of, without torch. `model` lists the sizes of a model.

`layout` and `step` are in show_layout.py and show_step.py; `collective` is the same as `motet collectives draw`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from motet.cli.collectives.list_algorithms import draw
from motet.cli.show.layout import layout
from motet.cli.show.step import step

if TYPE_CHECKING:
    from rich.table import Table

    from motet.models.spec.flops_and_memory import BlockSpec
    from motet.models.spec.model_spec import ModelSpec
    from motet.train.job import Job

app = typer.Typer(no_args_is_help=True, help="Show what a run is made of.")


@app.callback()
def show_callback() -> None:
    """Show what a run is made of."""


@app.command()
def model(
    source: Annotated[
        str, typer.Argument(metavar="JOB_OR_CONFIG", help="A job, hf:FOLDER, or a config.json of Hugging Face.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings of the job to replace.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence; else the job's, or the config's context.")
    ] = None,
    attention: Annotated[
        Literal["causal", "full"], typer.Option(help="Count attention as far as tokens see each other, or all pairs.")
    ] = "causal",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Parameters, FLOPs and saved activations of each block of a model."""
    from motet.models.spec.model_spec import spec_from_settings
    from motet.monitor.console import print_json, stdout_console

    job = _load_job_or_config(source, overrides or [], sequence_length)
    report = {"source": source, **_model_sizes(job, spec_from_settings(job.model), attention)}
    if json:
        print_json(report)
    else:
        stdout_console().print(_table(report))
        stdout_console().print(_summary(report))


def _load_job_or_config(source: str, overrides: list[str], sequence_length: int | None) -> Job:
    """The job; of a config, one that trains its model as such models are trained."""
    from motet.core.errors import InputError
    from motet.models.hf.hf_config import read_config, settings_from_config
    from motet.train.job import job_from_tree, load_job

    path = source.removeprefix("hf:")
    if source.startswith("hf:") or path.endswith(".json") or Path(path).is_dir():
        if overrides:
            raise InputError(f"override {overrides[0]!r}: {source} is a config, and only jobs have settings to replace")
        settings = settings_from_config(read_config(path))
        values = settings.model_dump(mode="json")
        objective = {"masked": "masked", "classify": "classify"}.get(values.get("head", ""), "causal")
        objective = "spans" if values["family"] == "encoder-decoder" else objective
        data = {"objective": objective, "sequence_length": sequence_length or settings.context}
        tree = {"name": "config", "model": values, "data": data, "precision": {"recipe": "bf16"}, "run": {"steps": 1}}
        job = job_from_tree(tree, source)
    else:
        length = [] if sequence_length is None else [f"data.sequence_length={sequence_length}"]
        job = load_job(source, [*overrides, *length])
    context = getattr(job.model, "context", job.data.sequence_length)
    if job.data.sequence_length > context:
        raise InputError(
            f"sequences of {job.data.sequence_length} tokens are longer than model.context = {context}; "
            "shorten data.sequence_length or lengthen model.context"
        )
    return job


def _model_sizes(job: Job, spec: ModelSpec, attention: Literal["causal", "full"]) -> dict[str, Any]:
    """Per block, of one repetition; then of the whole model."""
    from motet.precision.recipe import RECIPES
    from motet.train.flops import batch_shape

    single_sequence, two_sequences, dtype = (
        batch_shape(job, 1),
        batch_shape(job, 2),
        RECIPES[job.precision.recipe].compute,
    )
    tokens = single_sequence.length + single_sequence.source_length

    def row(layer: BlockSpec | ModelSpec) -> dict[str, Any]:
        flops, saved_bytes = layer.forward_flops(single_sequence, attention), layer.saved_bytes(single_sequence, dtype)
        return {
            "forward_flops_per_token": flops / tokens,
            "training_flops_per_token": 3 * flops / tokens,
            # What one more sequence adds: some tensors are there once, however many sequences there are.
            "saved_bytes_per_token": (layer.saved_bytes(two_sequences, dtype) - saved_bytes) / tokens,
            "saved_bytes_per_sequence": saved_bytes,
        }

    blocks = [
        {
            "name": block.name,
            "repeat": block.repeat,
            "parameters": block.parameter_count,
            "active_parameters": block.active_parameter_count,
            **row(block),
        }
        for block in spec.blocks
    ]
    return {
        "sequence_length": job.data.sequence_length,
        "tokens_per_sequence": tokens,
        "dtype": dtype,
        "attention": attention,
        "parameters": spec.parameter_count,
        "active_parameters": spec.active_parameter_count,
        **row(spec),
        "blocks": blocks,
    }


def _table(report: dict[str, Any]) -> Table:
    from rich.table import Table

    from motet.core.units import format_bytes, format_count

    def sizes(row: dict[str, Any]) -> tuple[str, str, str]:
        return (
            f"{row['parameters']:,}",
            format_count(row["training_flops_per_token"]),
            format_bytes(row["saved_bytes_per_token"]),
        )

    table = Table(title=report["source"], show_footer=True)
    table.add_column("block", footer="model")
    names = ("repeat", "parameters", "FLOPs per token", "saved per token")
    for name, footer in zip(names, ("", *sizes(report)), strict=True):
        table.add_column(name, footer=footer, justify="right")
    for block in report["blocks"]:
        table.add_row(block["name"], str(block["repeat"]), *sizes(block))
    return table


def _summary(report: dict[str, Any]) -> str:
    from motet.core.units import format_bytes

    active = f"A token goes through {report['active_parameters']:,} parameters. "
    pairs = "pairs that see each other" if report["attention"] == "causal" else "all pairs"
    return (
        (active if report["active_parameters"] != report["parameters"] else "")
        + "A block's row is one repetition. FLOPs are of forward and backward in sequences of "
        f"{report['tokens_per_sequence']:,} tokens, attention counted for {pairs}. Saved from forward to backward for "
        f"one such sequence in {report['dtype']}, nothing recomputed: {format_bytes(report['saved_bytes_per_sequence'])}."
    )


app.command(name="collective")(draw)
app.command()(layout)
app.command()(step)
