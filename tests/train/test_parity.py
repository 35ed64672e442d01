"""The same global batch gives the same numbers on any number of ranks and micro-batches."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components
from motet.train.job import Job
from ranks import Ranks
from train.runs import Trained, small_job, train, worst_difference

STEPS = 20
QUICK = [(3, 2), (4, 4)]  # of batches of 48 rows, as all with 2 or 4 micro-batches
CASES = {"decoder": [*QUICK, (1, 4)], "llama": [], "qwen2": QUICK[:1], "gpt2": QUICK[:1]}
FULL = [(world, parts) for world in (1, 2, 3, 4) for parts in (1, 2, 4)]
THREE_PARTS = [(world, 3) for world in (1, 2, 3, 4)]  # of batches of 36 rows
FEW_STEPS = 8
OTHERS = ["bert", "t5", "classify", "adapters"]


def _agree(ranks: Ranks, job: Callable[[int], Job], steps: int, cases: list[tuple[int, int]]) -> Trained:
    """`job` of so many micro-batches. Gives what one rank with one micro-batch has computed."""
    reference: Trained = ranks.run(1, train, job(1), steps, timeout_s=240)[0]
    assert all(p.dtype.itemsize == 8 for p in reference.parameters.values())
    for world, microbatches in cases:
        for rank, trained in enumerate(ranks.run(world, train, job(microbatches), steps, timeout_s=240)):
            worst = worst_difference(trained, reference)
            assert worst < 1e-12, f"{world} ranks x {microbatches} micro-batches, rank {rank}: {worst:.2e}"
    return reference


def _jobs(folder: Path, model: str, batch: int = 36, servers: Sequence[str] = ()) -> Callable[[int], Job]:
    """Jobs by their number of micro-batches, of which that of one has no servers."""
    samples = ["data.samples=136"] * (model == "classify")  # 2 x 136 = 7 x 36 + 20: the last batch is not full
    changes = [f"data.batch_sequences={batch}", *samples]

    def job(parts: int) -> Job:
        more = servers if parts > 1 else ()
        return small_job(folder, f"layout.microbatches={parts}", *changes, *more, model=model)

    return job


def _agree_and_learn(ranks: Ranks, folder: Path, model: str, batch: int, cases: list[tuple[int, int]]) -> None:
    reference = _agree(ranks, _jobs(folder, model, batch), STEPS, cases)
    assert reference.losses[-1] < reference.losses[0] - 0.3  # it learns, so there is something to agree on


@pytest.mark.parametrize(
    "model", ["decoder", *(pytest.param(name, marks=pytest.mark.proof) for name in ("gpt2", "llama", "qwen2"))]
)
def test_layouts_compute_the_same_numbers(ranks: Ranks, tmp_path: Path, model: str) -> None:
    for batch, cases in ((48, CASES[model]), (36, [(3, 3)] * (model in ("decoder", "llama")))):
        if cases:
            _agree_and_learn(ranks, tmp_path, model, batch, cases)


@pytest.mark.proof
@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize(("batch", "cases"), [(48, FULL), (36, THREE_PARTS)], ids=["1, 2, 4 parts", "3 parts"])
def test_every_layout_computes_the_same_numbers(
    ranks: Ranks, tmp_path: Path, model: str, batch: int, cases: list[tuple[int, int]]
) -> None:
    _agree_and_learn(ranks, tmp_path, model, batch, cases)


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.proof if name in ("bert", "adapters") else ()) for name in OTHERS]
)
def test_so_does_each_objective_and_what_is_trained(ranks: Ranks, tmp_path: Path, model: str) -> None:
    reference = _agree(ranks, _jobs(tmp_path, model), FEW_STEPS, [(2, 1), (3, 3)])
    assert len(set(reference.losses)) == FEW_STEPS and min(reference.norms) > 1e-3
    if model == "classify":
        assert ranks.run(1, _last_targets, _jobs(tmp_path, model)(1)) == [(FEW_STEPS, 20.0)]


def _last_targets(group: RankGroup, job: Job) -> tuple[int, float]:
    with tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        batch = parts.data.batch(parts.total_steps - 1, range(job.data.batch_sequences))
    return parts.total_steps, batch.weights.sum().item()


@pytest.mark.parametrize(
    ("world", "servers", "model"),
    [(3, 2, "t5"), *(pytest.param(*each, marks=pytest.mark.proof) for each in ((2, 1, "decoder"), (4, 3, "gpt2")))],
)
def test_so_do_ranks_that_are_servers(ranks: Ranks, tmp_path: Path, world: int, servers: int, model: str) -> None:
    """Gradients are reduced to the rank that keeps a bucket, and what it has updated is broadcast."""
    _owners_agree(ranks, tmp_path, model, [(world, servers)])


@pytest.mark.proof
@pytest.mark.parametrize("model", [*CASES, *OTHERS])
def test_so_do_servers_in_every_number(ranks: Ranks, tmp_path: Path, model: str) -> None:
    cases = [(world, servers) for world in (1, 2, 3, 4) for servers in (1, 2, 3) if servers <= world]
    _owners_agree(ranks, tmp_path, model, cases)


def _owners_agree(ranks: Ranks, folder: Path, model: str, cases: list[tuple[int, int]]) -> None:
    steps = STEPS if model in CASES else FEW_STEPS
    by = ["reduce_algorithm=flat", "broadcast_algorithm=scatter-all-gather", "slice_mib=0.02"]
    served = ["layout.data=parameter_server", *(f"layout.server.{each}" for each in ("transport=collectives", *by))]
    for world, servers in cases:
        _agree(ranks, _jobs(folder, model, servers=[*served, f"layout.server.count={servers}"]), steps, [(world, 3)])


def test_other_numbers_are_noticed(ranks: Ranks, tmp_path: Path) -> None:
    """The measure is no rubber stamp: one row less in the batch is far above it."""
    job = small_job(tmp_path, "data.batch_sequences=12")
    other = small_job(tmp_path, "data.batch_sequences=11")
    a, b = (ranks.run(1, train, which, 3)[0] for which in (job, other))
    assert worst_difference(a, b) > 1e-6
