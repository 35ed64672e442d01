"""The output of `motet show precision`: dtypes of each kind of tensor, and the bytes for each parameter that follow."""

from collections.abc import Iterator
from math import prod
from typing import Any

from motet.cli.output import print_lines
from motet.core.dtypes import DTYPE_BYTES
from motet.core.units import format_bytes
from motet.models.settings import UserModuleSettings
from motet.models.spec.model_spec import spec_from_settings
from motet.monitor.stdout_stderr import print_json
from motet.parallel.layout import LayoutSettings, resolve_layout
from motet.precision.moment_formats import bytes_per_element, stored_bytes
from motet.precision.recipe import RECIPES, PrecisionRecipe, PrecisionSettings
from motet.precision.state_bytes import parameter_state_bytes
from motet.train.job import Job, load_job
from motet.train.job_step_plan import step_plan_of_split_job
from motet.train.optimizer.optimizer_settings import OptimizerSettings

_KINDS = ("parameters", "gradients", "masters", "moments", "total")
_COLUMNS = ("recipe", "optimizer", "computed in", "gradients in", "moments in", *_KINDS)
_NOTE = (
    "Bytes for each parameter that are kept from step to step, where nothing is sharded. Parameters are in the dtype "
    "of forward and backward, gradients in that of their sums. A recipe keeps masters where their dtype is not that of "
    "the parameters. Moments in 8bit have a float32 scale for each 256 elements; those of vectors, and of matrices "
    "whose rows cannot be cut into equal blocks, have the dtype of the masters."
)


def show_precision(source: str | None, overrides: list[str], *, json: bool) -> None:
    """Print the bytes per parameter of all recipes and optimizers, or those of one job."""
    job = load_job(source, overrides) if source else None
    report: dict[str, Any] = _job_report(job) if job else {"rows": [*_rows()]}
    if json:
        print_json(report)
        return
    if job:
        print_lines(*_dtype_lines(report), "")
    print_lines(*_table_lines(report["rows"]), "", _NOTE)
    if report.get("parameter_count"):
        count, total = report["parameter_count"], report["total_bytes"]
        remark = f"The {count:,} parameters of this job therefore take {format_bytes(total)} on one device"
        print_lines(f"{remark}; `motet show layout` counts what each rank of a layout keeps.")


def _row(recipe: str, optimizer: OptimizerSettings, dtypes: PrecisionRecipe) -> dict[str, Any]:
    kept = parameter_state_bytes(dtypes, optimizer.moments_per_parameter)
    name = {"adamw": "AdamW", "sgd": "SGD"}[optimizer.name] + ", momentum" * (
        optimizer.name == "sgd" and optimizer.momentum > 0
    )
    kinds = {kind: getattr(dtypes, kind) for kind in ("compute", "master", "reduce", "state")}
    row: dict[str, Any] = {"recipe": recipe, "optimizer": name, **kinds}
    return row | {"bytes": vars(kept) | {"total": kept.total}}


def _rows() -> Iterator[dict[str, Any]]:
    """Each recipe, with gradients in its dtype and in 16 bits, with each optimizer."""
    optimizers = OptimizerSettings(), OptimizerSettings(name="sgd", momentum=0.9), OptimizerSettings(name="sgd")
    for name in RECIPES:
        settings = PrecisionSettings.model_validate({"recipe": name})
        in_16_bits = settings.model_copy(update={"reduce_dtype": "bfloat16"})
        moments = [] if name == "fp64" else ["bfloat16", "8bit"]
        compact = [settings.model_copy(update={"moment_dtype": dtype}).resolved for dtype in moments]
        for dtypes in dict.fromkeys((settings.resolved, in_16_bits.resolved, *compact)):
            kept = (each for each in optimizers if each.moments_per_parameter > 0 or dtypes.state == dtypes.master)
            yield from (_row(name, optimizer, dtypes) for optimizer in kept)


def _job_report(job: Job) -> dict[str, Any]:
    recipe = job.precision.resolved
    row = _row(job.precision.recipe, job.optimizer, recipe)
    exceptions = [{"match": patterns, "moments": dtype} for patterns, dtype in recipe.moment_exceptions]
    report: dict[str, Any] = {"job": job.name, "rows": [row], "exceptions": exceptions}
    if isinstance(job.model, UserModuleSettings) or job.model.frozen or job.model.adapters:
        return report  # What is trained is known to the ranks alone
    count, total = spec_from_settings(job.model).parameter_count, row["bytes"]["total"]
    if recipe.moments_are_masters_dtype:
        return report | {"parameter_count": count, "total_bytes": count * total}
    plan = step_plan_of_split_job(job, resolve_layout(LayoutSettings(), 1, job.data.batch_sequences))
    shapes = ((tensor.name, tensor.shape) for tensor in plan.inventory.tensors if tensor.kind == "trained")
    stored = (stored_bytes(recipe.moment_dtype(name, shape), shape, prod(shape)) for name, shape in shapes)
    moments = job.optimizer.moments_per_parameter * sum(stored)
    others = int(total - row["bytes"]["moments"])
    return report | {"parameter_count": count, "total_bytes": count * others + moments}


def _dtype_lines(report: dict[str, Any]) -> Iterator[str]:
    row = report["rows"][0]
    yield f"{report['job']}, precision.recipe = {row['recipe']}"
    for kind, text in (
        ("compute", "parameters and activations in forward and backward"),
        ("reduce", "sums of gradients over micro-batches and ranks"),
        ("master", "parameters that the optimizer updates"),
        ("state", "moments of the optimizer"),
    ):
        size = bytes_per_element(row[kind]) if kind == "state" else DTYPE_BYTES[row[kind]]
        yield f"  {row[kind]:9} {_size(size)} bytes  {text}"
    for exception in report["exceptions"]:
        yield (
            f"  {exception['moments']:9} {_size(bytes_per_element(exception['moments']))} bytes  moments of "
            + ", ".join(exception["match"])
        )


def _size(count: float) -> str:
    return f"{count:.4g}"


def _table_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    cells = [_COLUMNS]
    for row in rows:
        sizes = (_size(row["bytes"][kind]) for kind in _KINDS)
        cells.append((row["recipe"], row["optimizer"], row["compute"], row["reduce"], row["state"], *sizes))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = [
            cell.ljust(width) if i < 5 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(padded).rstrip()
