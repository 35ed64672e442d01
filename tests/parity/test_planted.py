"""Planted mistakes are found; the first tensor that they change and the cause are right."""

import re
from pathlib import Path
from typing import Any

import pytest

from motet.parity.compare.reference_runs import run_reference
from motet.parity.layout_verdict import LayoutVerdict, self_difference_verdict
from motet.parity.subjects.job_subject import JobVerificationSubject
from motet.train.state import TrainingState
from parity.faults import FAULTS, changed
from parity.planted_steps import UNEVEN
from parity.run_planted import reference, verified, verified_fault, with_overflow
from ranks import Ranks
from train.runs import small_job

QUICK = [
    "a forward computes with parameters that others updated later",
    "a tied copy goes stale",
    "a tied weight is not synchronised",
    "gradients of gathered keys stay local",
    "positions are counted in the part",
    "the scale is applied twice",
]
ALL = [
    pytest.param(name, layout, marks=() if name in QUICK and layout == fault.layouts[0] else pytest.mark.proof)
    for name, fault in FAULTS.items()
    for layout in fault.layouts
]


def test_there_are_many() -> None:
    assert len(FAULTS) >= 30


@pytest.mark.parametrize(("name", "layout"), ALL)
def test_a_mistake_is_found_located_and_named(ranks: Ranks, name: str, layout: str) -> None:
    fault = FAULTS[name]
    verdict = verified_fault(ranks, fault, layout)
    assert not verdict.ok
    assert re.match(fault.first, verdict.first_difference or ""), verdict
    assert re.search(fault.cause, verdict.cause or ""), verdict


def test_one_device_that_is_not_restored_is_no_measure(tmp_path: Path) -> None:
    def wrong(restored: Any, state: TrainingState, *_: Any) -> Any:
        next(iter(state.optimizer.sharded_parameters.local_masters)).add_(1e-6)
        return restored

    job = small_job(tmp_path, "run.steps=3", "checkpoint.keep=10")
    with changed(TrainingState, "restore", wrong):
        referred = run_reference(JobVerificationSubject(job), tmp_path)
    assert referred.self_difference is not None
    verdict = self_difference_verdict("dp=2 zero=1", 2, referred.self_difference)
    assert not verdict.ok and verdict.first_difference is not None
    assert verdict.first_difference.startswith("starting parameter")
    assert reference("decoder").runs.self_difference is None


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("dp=3 zero=2", UNEVEN),
        pytest.param("dp=4 zero=1 shard_group=2", (), marks=pytest.mark.proof),
        pytest.param("dp=2 zero=0 microbatches=2", (), marks=pytest.mark.proof),
        pytest.param("dp=3 zero=3", (), marks=pytest.mark.proof),
    ],
)
def test_what_is_right_is_not_called_wrong(ranks: Ranks, layout: str, settings: tuple[str, ...]) -> None:
    verdict = verified(ranks, reference("decoder", settings), layout)
    assert verdict.ok, verdict
    assert 0 < verdict.worst_relative < 1e-12


ZERO3 = "dp=2 zero=3 microbatches=2"
KEPT = [
    (policy, model, layout)
    for policy in ("full", "selective", "every-k")
    for model in ("decoder", "t5", "gpt2")
    for layout in ("dp=2 zero=1", ZERO3, "dp=2 zero=3 reshard_after_forward=false", "tp=2 sp=true", "tp=2", "pp=2")
]


@pytest.mark.proof
@pytest.mark.parametrize("case", KEPT)
def test_what_recomputation_may_keep_is_not_called_wrong(ranks: Ranks, case: tuple[str, str, str]) -> None:
    policy, model, layout = case
    verdict = verified(ranks, reference(model, (f"memory.recompute={policy}",)), layout)
    assert verdict.ok, verdict


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2 zero=1",
        *(
            pytest.param(each, marks=pytest.mark.proof)
            for each in ("dp=1 zero=0", "dp=2 zero=0", ZERO3, "tp=2", "pp=2")
        ),
        pytest.param("dp=2 zero=1 communication.overlap=forward", marks=pytest.mark.proof),
    ],
)
def test_a_right_overflow_is_not_called_wrong(ranks: Ranks, layout: str) -> None:
    verdict = with_overflow(ranks, LayoutVerdict(layout, True, 0.0, ""), "decoder", (), "")
    assert verdict.ok, verdict


@pytest.mark.proof
@pytest.mark.parametrize("model", ["bert", "t5"])
def test_other_models_and_their_masks(ranks: Ranks, model: str) -> None:
    verdict = verified(ranks, reference(model), "dp=2 zero=3 microbatches=2")
    assert verdict.ok, verdict
