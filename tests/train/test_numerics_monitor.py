"""The numerics monitor: exact counts of values by tensor, the same in every layout, and none where it is off."""

from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.monitor.events import NumericsMeasured, TensorNumerics
from motet.parallel.process.process_group import RankGroup
from motet.precision.value_counts import HIGHEST_EXPONENT, LOWEST_EXPONENT, count_values, counts_of_row
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from ranks import Ranks
from train.runs import small_job

STEPS = 2
Counted = dict[tuple[str, str], TensorNumerics]


def test_values_are_counted_by_exponent_and_by_what_a_format_loses() -> None:
    tiny, largest = 2.0**-24, 65504.0
    values = [0.0, -0.0, torch.inf, torch.nan, 1.0, -1.5, 2.0, tiny, -tiny / 2, tiny * 0.51, 2.0**-15, 2.0**-14]
    values += [largest, 65519.9, -65520.0, 1e30]
    counts = counts_of_row(count_values(torch.tensor(values), [torch.float16, torch.bfloat16]).tolist())
    assert (counts.zeros, counts.infinite, counts.nan) == (2, 1, 1)
    assert counts.by_format == ((1, 3, 2), (0, 0, 0))
    by_exponent = {LOWEST_EXPONENT + i: count for i, count in enumerate(counts.by_exponent) if count}
    assert by_exponent == {0: 2, 1: 1, -24: 1, -25: 2, -15: 1, -14: 1, 15: 3, 99: 1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_ends_of_each_dtype_are_counted(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    values = torch.tensor([info.max, info.smallest_normal, info.smallest_normal * info.eps], dtype=dtype)
    counts = counts_of_row(count_values(values, [torch.float16]).tolist())
    exponents = [LOWEST_EXPONENT + i for i, count in enumerate(counts.by_exponent) for _ in range(count)]
    expected = sorted(int(torch.frexp(v.double()).exponent) - 1 for v in values)
    assert exponents == [min(max(e, LOWEST_EXPONENT), HIGHEST_EXPONENT) for e in expected]


def measure(group: RankGroup, job: Job, folder: Path) -> tuple[list[NumericsMeasured], list[float]]:
    """The measurements of some steps, and their losses."""
    with precision_context(job):
        parts = build_components(job, group, folder / f"rank-{group.rank}")
        stepper = parts.make_train_step(job)
        results = [stepper.step(step, 0.003) for step in range(STEPS)]
    return [r.numerics for r in results if r.numerics], [r.loss for r in results]


def counted(event: NumericsMeasured, *kinds: str) -> Mapping[Any, Any]:
    return {(t.kind, t.name): t for t in event.tensors if t.kind in kinds}


EVERY_STEP = "monitor.numerics_every=1", "data.batch_sequences=4"
REPRODUCIBLE = *EVERY_STEP, "run.reproducible=layout", "precision.recipe=fp32"
ALL_KINDS = "weights", "gradients", "activations", "activation_gradients"


def test_data_parallel_ranks_count_what_one_device_counts(ranks: Ranks, tmp_path: Path) -> None:
    ((reference, losses),) = ranks.run(1, measure, small_job(tmp_path, *REPRODUCIBLE), tmp_path / "one")
    assert len(reference) == STEPS
    for stage in range(4):
        job = small_job(tmp_path, *REPRODUCIBLE, f"layout.zero={stage}")
        for measured, _ in ranks.run(4, measure, job, tmp_path / f"stage {stage}"):
            for event, reference_event in zip(measured, reference, strict=True):
                assert counted(event, *ALL_KINDS) == counted(reference_event, *ALL_KINDS), stage
    unwatched = small_job(tmp_path, *REPRODUCIBLE, "monitor.numerics_every=0")
    ((measured, plain_losses),) = ranks.run(1, measure, unwatched, tmp_path / "unwatched")
    assert (measured, plain_losses) == ([], losses)


SPLIT = {
    "dp2 at stage 1, forward overlap": (2, ["layout.zero=1", "communication.overlap=forward"]),
    "dp2, sums gathered": (2, ["layout.zero=0", "communication.overlap=forward"]),
    "tp2": (2, ["layout.tp=2"]),
    "tp2, sequence parallel": (2, ["layout.tp=2", "layout.sp=true"]),
    "pp2": (2, ["layout.pp=2"]),
    "full recomputation": (1, ["memory.recompute=full"]),
    "selective recomputation at stage 3": (2, ["layout.zero=3", "memory.recompute=selective"]),
}


COMMON = *EVERY_STEP, "layout.microbatches=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("numerics")


@cache
def numbers_of_one_rank(ranks: Ranks, folder: Path) -> list[NumericsMeasured]:
    ((reference, _),) = ranks.run(1, measure, small_job(folder, *COMMON), folder / "one")
    return reference


@pytest.mark.parametrize("layout", SPLIT)
def test_split_tensors_are_counted_once(ranks: Ranks, folder: Path, layout: str) -> None:
    world, settings = SPLIT[layout]
    for measured, _ in ranks.run(world, measure, small_job(folder, *COMMON, *settings), folder / "split"):
        for event, reference_event in zip(measured, numbers_of_one_rank(ranks, folder), strict=True):
            for kind in ALL_KINDS:
                assert_alike(
                    counted(event, kind), counted(reference_event, kind), exact=kind == "weights" and event.step == 1
                )


def assert_alike(a: Mapping[Any, TensorNumerics], b: Mapping[Any, TensorNumerics], *, exact: bool) -> None:
    """Equal numbers of elements. Layouts add in another order, so values at powers of two, and those that are nothing
    but rounding, may be counted in another place."""
    assert {key: t.elements for key, t in a.items()} == {key: t.elements for key, t in b.items()}
    for key, tensor in a.items():
        moved = (histogram(tensor) - histogram(b[key])) + (histogram(b[key]) - histogram(tensor))
        assert moved.total() <= (0 if exact else 0.05 * tensor.elements), (key, moved)


def histogram(tensor: TensorNumerics) -> Counter[int | str]:
    exponents = {tensor.lowest_exponent + index: count for index, count in enumerate(tensor.exponents)}
    return Counter({**exponents, "zero": tensor.zeros, "infinite": tensor.infinite, "nan": tensor.nan})
