"""`precision.reduce_dtype`: the optimizer gets sums that are rounded as the setting says, and in the masters' dtype."""

import tempfile
from pathlib import Path

import pytest
import torch

from motet.collectives.compression.codecs import parse_codec
from motet.collectives.execute import api
from motet.monitor.events import WarningIssued, read_events, read_steps
from motet.parallel.data_parallel.communication.communicator import CompressedGradientReducer
from motet.parallel.data_parallel.communication.powersgd_matrices import ReductionBufferSpec, StepReductionSpecs
from motet.parallel.layout import microbatches_of_rank
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components
from motet.train.job import Job
from parallel.test_zero_stages import AHEAD, HYBRID, SMALL, job_of
from ranks import Ranks
from train.runs import run_job, small_job, whole_tensor
from train.test_served import SERVED, serve

Gradients = dict[str, torch.Tensor]
UNCLIPPED = ("data.batch_sequences=48", "optimizer.clip_norm=false")
BFLOAT16_UNIT = 2.0**-8  # The relative error of a rounding to 8 bits
FLOAT32_UNIT = 2.0**-24


def gradients_of_optimizer(group: RankGroup, job: Job) -> tuple[Gradients, float]:
    """The gradients that the optimizer gets in the first step, and their norm."""
    with tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        sharded = parts.engine.optimizer.sharded_parameters
        with parts.engine.optimizer.capture_gradients() as captured:
            result = parts.make_train_step(job).step(0, 0.001)
            sharded.wait_for_pending()
        assert {g.dtype for g in captured} == {m.dtype for m in sharded.local_masters} == {torch.float32}
        return {n: whole_tensor(s, group) for n, s in sharded.local_shards(captured).items()}, result.grad_norm


def microbatch_gradients(group: RankGroup, job: Job, world: int) -> tuple[list[Gradients], float]:
    """The gradient of each micro-batch of each rank, in the dtype of the parameters; and the number of targets."""
    with tempfile.TemporaryDirectory() as folder:
        parts, layout, terms, targets = build_components(job, group, Path(folder)), job.layout_for(world), [], 0.0
        named = dict(parts.model.module.named_parameters())
        for rank in range(world):
            for microbatch in microbatches_of_rank(layout, rank, job.data.batch_sequences):
                batch = parts.data.batch(0, microbatch.rows)
                targets += batch.weights.sum(dtype=torch.float64).item()
                with parts.model.randomness(0, batch.rows):
                    loss = parts.model.loss_sum(batch)
                terms.append(dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)))
        return terms, targets


CASES = [
    (1, "zero=0", ()),
    (1, "zero=0 microbatches=3", ()),
    (3, "zero=0 microbatches=2", (*SMALL, AHEAD)),
    (2, "zero=1 microbatches=3", SMALL),
    (3, "zero=2", (*SMALL, AHEAD)),
    (4, "zero=2 shard_group=2 microbatches=3", SMALL),
    (2, "zero=3", ()),
    (4, f"{HYBRID} min_shard_numel=100", ()),
]


@pytest.mark.parametrize(
    ("recipe", "world", "layout", "settings"),
    [
        *(pytest.param("bf16", *case, marks=pytest.mark.proof if case in CASES[1::3] else ()) for case in CASES),
        *(pytest.param("fp32", *case, marks=() if case in CASES[2:3] else pytest.mark.proof) for case in CASES),
    ],
)
def test_sums_are_rounded_as_they_are_said_to_be(
    ranks: Ranks, tmp_path: Path, recipe: str, world: int, layout: str, settings: tuple[str, ...]
) -> None:
    """Float64 only for the optimizer; bfloat16 once for each term that is wider, and once for each addition.
    The factor, one over the number of targets, and the product with it are rounded in every dtype."""
    changes = (f"precision.recipe={recipe}", *UNCLIPPED, *settings)
    count = "".join(word for word in layout.split() if word.startswith("microbatches"))
    terms, targets = ranks.run(1, microbatch_gradients, job_of(tmp_path, count, *changes), world)[0]
    total = {n: sum(t[n].double() for t in terms) / targets for n in terms[0]}
    sizes = {n: sum(t[n].double().abs() for t in terms) / targets for n in terms[0]}
    errors = {}
    for dtype, unit, last_roundings in (("float64", FLOAT32_UNIT, 3), ("bfloat16", BFLOAT16_UNIT, 2)):
        job = job_of(tmp_path, layout, *changes, f"precision.reduce_dtype={dtype}")
        found, norm = ranks.run(world, gradients_of_optimizer, job, timeout_s=120)[0]
        roundings = len(terms) - (recipe == "bf16") if dtype == "bfloat16" else 0
        if dtype == "float64" and "zero=3" in layout:  # which adds the micro-batches of a rank in the masters' dtype
            roundings = len(terms)
        for name, exact in total.items():
            bound = 1.01 * (roundings * unit * sizes[name] + last_roundings * FLOAT32_UNIT * exact.abs())
            assert ((found[name] - exact).abs() <= bound + 1e-30).all(), (name, dtype)
        errors[dtype] = sum((found[n] - t).square().sum().item() for n, t in total.items()) ** 0.5
        assert norm == pytest.approx(sum(g.double().square().sum().item() for g in found.values()) ** 0.5, rel=1e-6)
    assert errors["bfloat16"] > 1000 * errors["float64"] or (len(terms), recipe) == (1, "bf16")


def unsent_ones(group: RankGroup, steps: int) -> set[float]:
    """Only a large element is sent; the others, each 1, wait in the errors."""
    codec, specs = parse_codec("topk:keep=0.001"), StepReductionSpecs((ReductionBufferSpec(400),), "bfloat16")
    reducer = CompressedGradientReducer(codec, group, [specs], shard=0, error_feedback=True)
    for step in range(steps):
        tensor = torch.ones(400, dtype=torch.bfloat16)
        tensor[0] = 2.0**20
        reducer.all_reduce(0, tensor, step, dense_all_reduce=api.all_reduce)
        assert tensor[0] == 2.0**21 and not tensor[1:].any()
    return set(reducer.errors[1:].tolist())


def test_error_feedback_of_bfloat16_sums_adds_in_float32(ranks: Ranks) -> None:
    """A sum of ones in bfloat16 would end at 256."""
    assert ranks.run(2, unsent_ones, 301) == [{301.0}] * 2


@pytest.mark.parametrize(("dtype", "low", "high"), [("float64", 0.0, 1e-5), ("bfloat16", 1e-5, 0.02)])
def test_servers_sum_in_the_dtype_of_the_pushes(
    ranks: Ranks, tmp_path: Path, dtype: str, low: float, high: float
) -> None:
    fp32 = ("precision.recipe=fp32", "run.steps=6")
    ranks.run_places(1, run_job, small_job(tmp_path, *fp32), tmp_path / "alone")
    ranks.run_places(
        4, serve, small_job(tmp_path, *fp32, SERVED, f"precision.reduce_dtype={dtype}"), tmp_path / "served"
    )
    steps = (read_steps(tmp_path / run / "events.jsonl") for run in ("served", "alone"))
    norms = [(a.grad_norm or 0.0) / (b.grad_norm or 0.0) for a, b in zip(*steps, strict=True)]
    assert low <= max(abs(ratio - 1) for ratio in norms) < high


def test_a_run_goes_on_with_another_dtype(ranks: Ranks, tmp_path: Path) -> None:
    codec, fp32 = "communication.compress_gradients=topk:keep=0.1", ("precision.recipe=fp32", "run.steps=8")
    first = small_job(tmp_path, *fp32, codec, "precision.reduce_dtype=bfloat16", "run.stop_at=4")
    ranks.run_places(2, run_job, first, tmp_path / "run")
    second = small_job(tmp_path, *fp32, codec, "precision.reduce_dtype=float64")
    assert ranks.run_places(2, run_job, second, tmp_path / "run") == [8, 8]
    said = [e.text for e in read_events(tmp_path / "run/events.jsonl") if isinstance(e, WarningIssued)]
    assert any("compress" in text for text in said), said
