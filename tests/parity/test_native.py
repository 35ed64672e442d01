"""A layout in the precision of its job is as far from one device as other orders of the same additions."""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from motet.collectives.execute import api
from motet.parallel.process.process_group import RankGroup
from motet.parity.candidate_layouts import make_candidate
from motet.parity.compare import native_precision
from motet.parity.record.record_verification_steps import record_native_step
from motet.parity.record.tensor_recorder import RecordedTensor
from motet.parity.subjects.job_subject import JobVerificationSubject
from motet.train import engine
from motet.train.job import Job
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer
from parity.faults import Patch, all_of, around, changed, nothing
from parity.planted_steps import UNEVEN
from ranks import Ranks
from train.runs import small_job

Plant = Callable[[], Patch]


@lru_cache(maxsize=4)
def referred(recipe: str, *settings: str) -> native_precision.NativeReference:
    folder = Path(tempfile.mkdtemp(prefix="motet-native-"))
    atexit.register(shutil.rmtree, folder)
    common = ["run.steps=3", "checkpoint.keep=10", "model.dropout=0.1", *settings]
    job = small_job(folder, f"precision.recipe={recipe}", *common)
    return native_precision.run_native_reference(JobVerificationSubject(job), folder, {})


@lru_cache(maxsize=8)
def spread(microbatches: int, recipe: str, *settings: str) -> native_precision.SummationOrderSpread | None:
    return native_precision.measure_order_spread(referred(recipe, *settings), microbatches)


def step_on_a_rank(group: RankGroup, job: Job, folder: Path, plant: Plant) -> list[RecordedTensor]:
    with plant():
        return record_native_step(JobVerificationSubject(job), group, folder)


def compared(
    ranks: Ranks, recipe: str, layout: str, plant: Plant = nothing, *settings: str
) -> tuple[native_precision.DifferenceZScore | None, native_precision.DifferenceZScore | None]:
    native = referred(recipe, *settings)
    candidate = make_candidate(native.subject.job, layout)
    seen = ranks.run(candidate.world, step_on_a_rank, candidate.job, native.folder, plant, timeout_s=120)
    parts = candidate.job.layout_for(candidate.world).sharding.reproducible_batch_size or candidate.microbatches
    subject = JobVerificationSubject(candidate.job)
    return native_precision.compare_native(native, spread(parts, recipe, *settings), seen, subject=subject)


def sums_in_bfloat16() -> Patch:
    """Only float32 gradients are rounded, so float64 shows no difference."""

    def rounded(own: Any, *tensors: Any, **how: Any) -> Any:
        for each in tensors:
            if isinstance(each, Tensor) and each.dtype == torch.float32 and each.numel() > 1:
                each.copy_(each.bfloat16())
        return own(*tensors, **how)

    return all_of(around(api, "reduce_scatter", rounded), around(api, "all_reduce", rounded))


def _masters_updated(spoilt: Callable[[Tensor], Tensor]) -> Patch:
    def wrong(_: None, optimizer: ShardedOptimizer, *given: Any) -> None:
        for master in optimizer.sharded_parameters.local_masters:
            master.copy_(spoilt(master))

    return changed(ShardedOptimizer, "update", wrong)


def masters_in_bfloat16() -> Patch:
    return _masters_updated(Tensor.bfloat16)


def a_bit_in_a_master() -> Patch:
    return _masters_updated(lambda master: torch.nextafter(master, torch.full_like(master, torch.inf)))


QUICK = [("bf16", "dp=2 zero=2 microbatches=2")]
RECIPES = ["fp32", "bf16", *(f"fp32 precision.reduce_dtype={d}" for d in ("bfloat16", "float64"))]
CASES = [(recipe, layout) for layout in ("dp=3 zero=3", "dp=2 zero=2 microbatches=2") for recipe in RECIPES]


@pytest.mark.parametrize(
    ("recipe", "layout"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.proof) for case in CASES]
)
def test_rounding_is_as_likely_as_in_other_orders(ranks: Ranks, recipe: str, layout: str) -> None:
    recipe, *settings = recipe.split()
    worst, first = compared(ranks, recipe, layout, nothing, *settings)
    assert first is None, (first, first and first.cause)
    assert worst.z < 8


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        pytest.param("fp32", "dp=2 zero=1 microbatches=2", marks=pytest.mark.proof),
        ("bf16", "dp=3 zero=0 microbatches=2"),
        pytest.param("bf16", "dp=2 zero=1 microbatches=2", marks=pytest.mark.proof),
        pytest.param("fp32", "dp=3 zero=0 microbatches=2", marks=pytest.mark.proof),
    ],
)
def test_a_sum_that_is_kept_too_short_is_found(ranks: Ranks, recipe: str, layout: str) -> None:
    _, first = compared(ranks, recipe, layout, sums_in_bfloat16)
    assert first is not None and first.difference.key[0] == "gradient" and "rounded" in first.cause


def masters_of_rounded_values() -> Patch:
    """Masters are rounded once, when they are made."""

    def wrong(optimizer: ShardedOptimizer, *given: Any) -> ShardedOptimizer:
        for master in optimizer.sharded_parameters.local_masters:
            master.copy_(master.bfloat16())
        return optimizer

    return changed(engine, "build_sharded_optimizer", wrong)


@pytest.mark.parametrize(
    ("plant", "kind"), [(masters_in_bfloat16, "state"), (masters_of_rounded_values, "starting parameter")]
)
def test_masters_with_few_bits_are_found(ranks: Ranks, plant: Plant, kind: str) -> None:
    _, first = compared(ranks, "bf16", "dp=2 zero=1", plant)
    assert first is not None and first.difference.key[0] == kind and "bfloat16" in first.cause


def test_promised_bits_are_held_to(ranks: Ranks) -> None:
    assert compared(ranks, "fp32", "dp=3 zero=1", nothing, *UNEVEN)[1] is None
    assert compared(ranks, "fp32", "dp=3 zero=1", a_bit_in_a_master)[1] is None
    _, first = compared(ranks, "fp32", "dp=3 zero=1", a_bit_in_a_master, *UNEVEN)
    assert first is not None and first.difference.key[0] == "state"
    assert "its bits are not those of one device" in first.cause


def test_in_float64_the_bits_alone_are_compared(ranks: Ranks) -> None:
    assert compared(ranks, "fp64", "dp=3 zero=1", nothing, *UNEVEN) == (None, None)
    _, first = compared(ranks, "fp64", "dp=3 zero=1", a_bit_in_a_master, *UNEVEN)
    assert first is not None and "its bits are not those of one device" in first.cause
