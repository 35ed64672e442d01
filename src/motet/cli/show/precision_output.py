"""The output of `motet show precision`: dtypes of each kind of tensor, and the bytes for each parameter that follow."""

from collections.abc import Iterator
from typing import Any

from motet.cli.output import print_lines
from motet.core.dtypes import DTYPE_BYTES
from motet.core.units import format_bytes
from motet.models.settings import UserModuleSettings
from motet.models.spec.model_spec import spec_from_settings
from motet.monitor.stdout_stderr import print_json
from motet.precision.recipe import RECIPES, PrecisionRecipe, PrecisionSettings
from motet.precision.state_bytes import parameter_state_bytes
from motet.train.job import Job, load_job
from motet.train.optimizer.optimizer_settings import OptimizerSettings

_KINDS = ("parameters", "gradients", "masters", "moments", "total")
_COLUMNS = ("recipe", "optimizer", "computed in", "gradients in", *_KINDS)
_NOTE = (
    "Bytes for each parameter that are kept from step to step, where nothing is sharded. Parameters are in the dtype "
    "of forward and backward, gradients in that of their sums. A recipe keeps masters where their dtype is not that of "
    "the parameters."
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
    row: dict[str, Any] = {"recipe": recipe, "optimizer": name, **vars(dtypes)}
    return row | {"bytes": vars(kept) | {"total": kept.total}}


def _rows() -> Iterator[dict[str, Any]]:
    """Each recipe, with gradients in its dtype and in 16 bits, with each optimizer."""
    optimizers = OptimizerSettings(), OptimizerSettings(name="sgd", momentum=0.9), OptimizerSettings(name="sgd")
    for name in RECIPES:
        settings = PrecisionSettings.model_validate({"recipe": name})
        in_16_bits = settings.model_copy(update={"reduce_dtype": "bfloat16"})
        for dtypes in dict.fromkeys((settings.resolved, in_16_bits.resolved)):
            yield from (_row(name, optimizer, dtypes) for optimizer in optimizers)


def _job_report(job: Job) -> dict[str, Any]:
    row = _row(job.precision.recipe, job.optimizer, job.precision.resolved)
    report: dict[str, Any] = {"job": job.name, "rows": [row]}
    if isinstance(job.model, UserModuleSettings) or job.model.frozen or job.model.adapters:
        return report  # What is trained is known to the ranks alone
    count = spec_from_settings(job.model).parameter_count
    return report | {"parameter_count": count, "total_bytes": count * row["bytes"]["total"]}


def _dtype_lines(report: dict[str, Any]) -> Iterator[str]:
    row = report["rows"][0]
    yield f"{report['job']}, precision.recipe = {row['recipe']}"
    for kind, text in (
        ("compute", "parameters and activations in forward and backward"),
        ("reduce", "sums of gradients over micro-batches and ranks"),
        ("master", "parameters that the optimizer updates"),
        ("state", "moments of the optimizer"),
    ):
        yield f"  {row[kind]:9} {DTYPE_BYTES[row[kind]]} bytes  {text}"


def _table_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    cells = [_COLUMNS]
    for row in rows:
        sizes = (str(row["bytes"][kind]) for kind in _KINDS)
        cells.append((row["recipe"], row["optimizer"], row["compute"], row["reduce"], *sizes))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = [
            cell.ljust(width) if i < 4 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(padded).rstrip()
