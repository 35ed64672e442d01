"""The same global batch gives the same numbers on any number of ranks and micro-batches."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components
from motet.train.job import Job
from ranks import Ranks
from train.runs import Trained, small_job, train, worst_difference

STEPS = 20
BATCH = "data.batch_sequences=48"
QUICK = [(3, 2), (4, 4)]
FULL = [(world, parts) for world in (1, 2, 3, 4) for parts in (1, 2, 4)]
CASES = {"decoder": [*QUICK, (1, 4), (2, 1)], "llama": QUICK[:1], "qwen2": QUICK[1:], "gpt2": QUICK}
FEW_STEPS = 8
FEW = [(2, 1), (3, 2)]
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


def _large(folder: Path, model: str) -> Callable[[int], Job]:
    return lambda parts: small_job(folder, BATCH, f"layout.microbatches={parts}", model=model)


@pytest.mark.parametrize("model", CASES)
def test_layouts_compute_the_same_numbers(ranks: Ranks, tmp_path: Path, model: str) -> None:
    reference = _agree(ranks, _large(tmp_path, model), STEPS, CASES[model])
    assert reference.losses[-1] < reference.losses[0] - 0.3  # it learns, so there is something to agree on


@pytest.mark.proof
@pytest.mark.parametrize("model", CASES)
def test_every_layout_computes_the_same_numbers(ranks: Ranks, tmp_path: Path, model: str) -> None:
    _agree(ranks, _large(tmp_path, model), STEPS, FULL)


@pytest.mark.parametrize("model", OTHERS)
def test_so_does_each_objective_and_what_is_trained(ranks: Ranks, tmp_path: Path, model: str) -> None:
    def job(parts: int) -> Job:
        return small_job(tmp_path, f"layout.microbatches={parts}", model=model)

    reference = _agree(ranks, job, FEW_STEPS, FEW)
    assert len(set(reference.losses)) == FEW_STEPS
    assert min(reference.norms) > 1e-3
    if model == "classify":
        assert ranks.run(1, _last_targets, job(1)) == [(FEW_STEPS, 8.0)]


def _last_targets(group: RankGroup, job: Job) -> tuple[int, float]:
    with tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        batch = parts.data.batch(parts.total_steps - 1, range(job.data.batch_sequences))
    return parts.total_steps, batch.weights.sum().item()


@pytest.mark.parametrize(("world", "servers", "model"), [(2, 1, "decoder"), (3, 2, "t5"), (4, 3, "gpt2")])
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

        def job(parts: int, servers: int = servers) -> Job:
            more = [] if parts == 1 else [*served, f"layout.server.count={servers}"]
            batch = [BATCH] if model in CASES else []
            return small_job(folder, f"layout.microbatches={parts}", *batch, *more, model=model)

        _agree(ranks, job, steps, [(world, 2)])


def test_other_numbers_are_noticed(ranks: Ranks, tmp_path: Path) -> None:
    """The measure is no rubber stamp: one row less in the batch is far above it."""
    job = small_job(tmp_path, "data.batch_sequences=12")
    other = small_job(tmp_path, "data.batch_sequences=11")
    a, b = (ranks.run(1, train, which, 3)[0] for which in (job, other))
    assert worst_difference(a, b) > 1e-6
