"""The balance of experts does not depend on the layout: losses, terms and parameters to rounding, loads exactly."""

from functools import cache
from pathlib import Path

import pytest
import torch

from motet.parallel.process.process_group import RankGroup
from ranks import Ranks
from train.mixture_runs import (
    BALANCES,
    CORRECTIONS,
    FAMILIES,
    OURS,
    TrainedMixture,
    check_equal,
    job_of_family,
    settings_of,
    train_mixture,
)

ALONE = RankGroup(0, 1, None, torch.device("cpu"))
LAYOUTS = {
    "dp=2 zero=0": 2, "dp=2 zero=1 microbatches=2": 2, "dp=2 zero=2": 2, "dp=2 zero=3": 2, "microbatches=4": 1,
    "tp=2": 2, "tp=2 sp=true": 2, "pp=2 microbatches=2": 2, "cp=2": 2, "recompute=full": 1, "recompute=selective": 1,
    "cp=2 tp=2 sp=true recompute=full": 4, "pp=2 cp=2 microbatches=4 recompute=full": 4, "dp=2 pp=2 zero=1": 4,
}  # fmt: skip
QUICK = [("motet", "bias", "dp=2 zero=3"), ("mixtral", "row", "cp=2")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixtures")


@cache
def alone(folder: Path, family: str, kind: str) -> TrainedMixture:
    return train_mixture(ALONE, job_of_family(folder, family, BALANCES[kind]))


def cases() -> list[object]:
    wanted = [(f, kind, layout) for f in (*FAMILIES, *OURS) for kind in ("row", "bias") for layout in LAYOUTS]
    possible = [case for case in wanted if case[1] == "row" or case[0] in CORRECTIONS]
    return [*QUICK, *(pytest.param(*case, marks=pytest.mark.proof) for case in possible if case not in QUICK)]


@pytest.mark.parametrize(("family", "kind", "layout"), cases())
def test_numbers_of_every_layout_are_those_of_one_device(
    ranks: Ranks, folder: Path, family: str, kind: str, layout: str
) -> None:
    job = job_of_family(folder, family, BALANCES[kind], "monitor.replica_check_every=5", *settings_of(layout))
    expected = alone(folder, family, kind)
    assert any(loads != expected.experts[0].layers[0].loads for loads in [e.layers[0].loads for e in expected.experts])
    for result in ranks.run(LAYOUTS[layout], train_mixture, job, timeout_s=300):
        check_equal(result, expected)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["row", "bias"])
def test_rows_that_ranks_do_not_divide(ranks: Ranks, folder: Path, kind: str) -> None:
    job = job_of_family(folder, "motet with capacity", BALANCES[kind], "data.sequence_length=23")
    expected = train_mixture(ALONE, job)
    split = job.model_copy(update={"layout": job.layout.model_copy(update={"cp": 2})})
    for result in ranks.run(2, train_mixture, split, timeout_s=300):
        check_equal(result, expected)


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["zero=1", "zero=3", "pp=2"])
def test_reproducible_layouts_have_the_same_bits(ranks: Ranks, folder: Path, layout: str) -> None:
    """Losses and parameters; the entropies, which nothing uses, are rounded in another order."""
    settings = (BALANCES["bias"], "run.reproducible=layout")
    expected = train_mixture(ALONE, job_of_family(folder, "motet", *settings), 3)
    for result in ranks.run(2, train_mixture, job_of_family(folder, "motet", *settings, f"layout.{layout}"), 3):
        assert result.trained.losses == expected.trained.losses
        assert [each.loss_sum for each in result.experts] == [each.loss_sum for each in expected.experts]
        assert all(torch.equal(result.trained.parameters[n], p) for n, p in expected.trained.parameters.items())
        assert all(torch.equal(buffer, expected.buffers[name]) for name, buffer in result.buffers.items())


def test_terms_have_the_scale_of_fp16(folder: Path) -> None:
    """A large part of the gradient is that of the terms here, so a wrong scale would show in the norm."""
    balance = "kind='row', weight=0.5, z_weight=0.5"
    half, single = (
        train_mixture(ALONE, job_of_family(folder, "motet", balance, f"precision.recipe={recipe}", *more), 2)
        for recipe, more in (("fp16", ["precision.emulate=true"]), ("fp32", []))
    )
    assert half.trained.norms == pytest.approx(single.trained.norms, rel=1e-2)
    assert half.trained.losses == pytest.approx(single.trained.losses, rel=1e-3)
