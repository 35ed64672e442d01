"""The output of `motet show precision`: dtypes of each kind of tensor, and the bytes for each parameter that follow.

The output of `motet show dtype`: the bits of number formats, their ranges, and the value that each stores.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import prod
from typing import Any

from rich.text import Text

from motet.cli.job_arguments import load_job_or_config
from motet.cli.output import OutputLine, print_lines, table_lines
from motet.core.units import format_bytes
from motet.models.settings import UserModuleSettings
from motet.models.spec.model_spec import spec_from_settings
from motet.monitor.stdout_stderr import print_json
from motet.parallel.layout import LayoutSettings, resolve_layout
from motet.precision.number_formats import NUMBER_FORMATS, NumberFormat, parse_exact_value
from motet.precision.recipe import (
    RECIPES,
    PrecisionRecipe,
    PrecisionSettings,
    bytes_per_element,
    parameter_state_bytes,
    stored_bytes,
)
from motet.train.job import Job
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
    job = load_job_or_config(source, overrides) if source else None
    report: dict[str, Any] = _job_report(job) if job else {"rows": [*_rows()]}
    if json:
        print_json(report)
        return
    if job:
        print_lines(*_dtype_lines(report), "")
    print_lines(*table_lines(map(_cells, report["rows"]), header=_COLUMNS, right=range(5, 10)), "", _NOTE)
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
        return report  # The sum below is for a model whose parameters are all trained
    count, total = spec_from_settings(job.model).parameter_count, row["bytes"]["total"]
    if recipe.moments_are_masters_dtype:
        return report | {"parameter_count": count, "total_bytes": count * total}
    plan = step_plan_of_split_job(job, resolve_layout(LayoutSettings(), 1, job.data.batch_sequences))
    shapes = ((tensor.name, tensor.shape) for tensor in plan.inventory.tensors if tensor.kind == "trained")
    stored = (stored_bytes(recipe.moment_dtype(name, shape), shape, prod(shape)) for name, shape in shapes)
    moments = job.optimizer.moments_per_parameter * sum(stored)
    others = int(total - row["bytes"]["moments"])
    return report | {"parameter_count": count, "total_bytes": count * others + moments}


def _dtype_lines(report: dict[str, Any]) -> Iterator[OutputLine]:
    row = report["rows"][0]
    yield f"{report['job']}, precision.recipe = {row['recipe']}"
    uses = [
        (row["compute"], "parameters and activations in forward and backward"),
        (row["reduce"], "sums of gradients over micro-batches and ranks"),
        (row["master"], "parameters that the optimizer updates"),
        (row["state"], "moments of the optimizer"),
    ]
    uses += [(each["moments"], f"moments of {', '.join(each['match'])}") for each in report["exceptions"]]
    yield from table_lines(
        ((dtype, f"{_size(bytes_per_element(dtype))} bytes", text) for dtype, text in uses), indent=2
    )


def _size(count: float) -> str:
    return f"{count:.4g}"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    sizes = (_size(row["bytes"][kind]) for kind in _KINDS)
    return row["recipe"], row["optimizer"], row["compute"], row["reduce"], row["state"], *sizes


_STYLES = ("bold red", "bold green", "bold blue")  # Sign, exponent, mantissa
_LEGEND = "S is the sign, E the exponent, M the mantissa."
_NOTES = (
    "The step at 1 is the distance to the next larger number. Overflow is the result for a value that rounds beyond "
    "the largest number; a conversion that saturates stores the largest number instead."
)
_ROUNDING = (
    "Each value is rounded once from the exact number: to the nearest, and of two that are equally near to the even "
    "code (in E8M0 to the larger)."
)


def show_dtypes(value: str | None, *, json: bool) -> None:
    """Draw all formats, or the bits and the stored value of one number in each."""
    exact = None if value is None else parse_exact_value(value)
    if json:
        reports = [
            _properties(form) | ({} if exact is None else {"stored": _stored(form, exact)}) for form in NUMBER_FORMATS
        ]
        print_json({"value": value, "formats": reports})
    elif value is None or exact is None:
        _print_formats()
    else:
        _print_stored(value.strip(), exact)


def _properties(form: NumberFormat) -> dict[str, Any]:
    return {
        "name": form.name,
        "dtype": form.dtype,
        "bits": form.bits,
        "sign_bits": form.sign_bits,
        "exponent_bits": form.exponent_bits,
        "mantissa_bits": form.mantissa_bits,
        "bias": form.bias,
        "largest": form.largest,
        "smallest_normal": form.smallest_normal,
        "smallest_subnormal": form.smallest_subnormal,
        "epsilon": form.epsilon,
        "has_infinity": form.has_infinity,
        "has_nan": form.has_nan,
        "overflow": form.overflow,
        "remark": form.remark,
    }


def _stored(form: NumberFormat, exact: Fraction | float) -> dict[str, Any]:
    """Bits and value of a number in a format, and the value where a conversion saturates."""
    code, saturated = form.encode(exact), form.encode(exact, saturates=True)
    if code is None or saturated is None:
        return {"bits": None, "value": None, "saturated": None, "relative_error": None}
    value = form.decode(code)
    is_measurable = math.isfinite(value) and math.isfinite(exact) and exact != 0
    error = float(abs(Fraction(value) - Fraction(exact)) / abs(Fraction(exact))) if is_measurable else None
    bits = " ".join(filter(None, form.bit_fields(code)))
    return {"bits": bits, "value": value, "saturated": form.decode(saturated), "relative_error": error}


def _print_formats() -> None:
    counts = ((form.sign_bits, form.exponent_bits, form.mantissa_bits) for form in NUMBER_FORMATS)
    bits = ([letter * count for letter, count in zip("SEM", each, strict=True)] for each in counts)
    drawn = [(form.name, str(form.bits), _colour(each)) for form, each in zip(NUMBER_FORMATS, bits, strict=True)]
    print_lines(*table_lines(drawn, header=["format", "bits", ""], right=[1]), _LEGEND, "")
    header = "format", "bias", "largest", "smallest normal", "smallest subnormal", "step at 1", "inf", "NaN", "overflow"
    rows = []
    for form in NUMBER_FORMATS:
        subnormal = "none" if form.smallest_subnormal is None else _format(form.smallest_subnormal)
        numbers = _format(form.largest), _format(form.smallest_normal), subnormal, _format(form.epsilon)
        exists = ["yes" if each else "no" for each in (form.has_infinity, form.has_nan)]
        rows.append([form.name, str(form.bias), *numbers, *exists, form.overflow])
    remarks = (f"{form.name}: {form.remark}." for form in NUMBER_FORMATS if form.remark)
    print_lines(*table_lines(rows, header=header, right=range(1, 8)), "", *remarks, _NOTES)


def _print_stored(value: str, exact: Fraction | float) -> None:
    rows: list[list[OutputLine]] = []
    for form in NUMBER_FORMATS:
        stored = _stored(form, exact)
        if stored["bits"] is None:
            rows.append([form.name, "cannot be stored"])
            continue
        error, differs = stored["relative_error"], not _is_same(stored["value"], stored["saturated"])
        saturated = _format(stored["saturated"]) if differs else ""
        error_text, digits = "" if error is None else f"{error:.2g}", form.bit_fields(form.encode(exact) or 0)
        rows.append([form.name, _format(stored["value"]), error_text, saturated, _colour(digits)])
    header = ["format", f"stored for {value}", "relative error", "saturated", "sign, exponent, mantissa"]
    print_lines(*table_lines(rows, header=header, right=range(1, 4)), "", _ROUNDING)


def _colour(fields: Sequence[str]) -> Text:
    """The three parts of a format, each in its colour."""
    return Text(" ").join(Text(field, style) for field, style in zip(fields, _STYLES, strict=True) if field)


def _is_same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


def _format(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else str(value).replace("nan", "NaN").replace("inf", "infinity")
