"""The output of `motet show layout --roles`: how each parameter is split, and what stays whole."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from motet.cli.output import print_lines
from motet.monitor.stdout_stderr import print_json
from motet.parallel.model_sharding import ShardRule
from motet.parallel.roles_of_tensors import TensorRole, tensor_roles
from motet.parallel.step_plan.plan import StepPlan
from motet.train.cost_of_split import describe_repeated_work, repeated_work
from motet.train.job import Job

_HEADER = ("tensor", "count", "shape", "split", "on a rank", "gradient summed over", "reason")


def show_roles(job: Job, plan: StepPlan, *, json: bool) -> None:
    """Print the role of each parameter, and the work that every tensor-parallel rank repeats."""
    roles, dims = tensor_roles(plan.inventory, plan.model_sharding, plan.dims), dict(plan.dims.sizes)
    if json:
        unsplit = [{"module": module, "reason": why} for module, why in plan.model_sharding.unsplit_streams]
        report = {"tensors": [vars(role) for role in roles], "unsplit_streams": unsplit}
        print_json({"job": job.name, "dims": dims, **report, "repeated": repeated_work(job, plan)})
        return
    sizes = " x ".join(f"{name} {size}" for name, size in dims.items() if size > 1)
    print_lines(f"{job.name}, {sizes}: how ranks split the parameters", "", *_aligned([_HEADER, *map(_cells, roles)]))
    streams = (f"All tokens on every rank, {module}: {why}." for module, why in plan.model_sharding.unsplit_streams)
    print_lines("", *_whole_lines(roles), *streams, describe_repeated_work(job, plan))


def _cells(role: TensorRole) -> tuple[str, ...]:
    shape, local_shape = (" x ".join(map(str, each)) or "1" for each in (role.shape, role.local_shape))
    partial_over = " ".join(role.partial_over) or "-"
    return role.name, str(role.count), shape, role.split, local_shape, partial_over, role.reason


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A line for each row, with complete names, which can be searched for."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _whole_lines(roles: Iterable[TensorRole]) -> Iterator[str]:
    by_reason: dict[str, list[TensorRole]] = {}
    for role in (role for role in roles if role.split == "whole"):
        by_reason.setdefault(role.reason, []).append(role)
    for reason, members in by_reason.items():
        elements, names = sum(role.count * prod(role.shape) for role in members), (role.name for role in members)
        why = "" if reason == ShardRule().reason else f" ({reason})"
        yield f"Left whole, {elements:,} parameters{why}: {', '.join(names)}."
