"""Planted mistakes are found, the first tensor that they touch is named, and what is said of them is right."""

import re

import pytest

from ranks import Ranks
from verify.planting import FAULTS, Fault
from verify.walking import subject, verified

QUICK = [
    "the sum over replicas is missing",
    "a hybrid forgets its replicas",
    "only the last microbatch counts",
    "masks follow the place in the microbatch",
    "a forward computes with parameters that others updated later",
    "everything is decayed",
    "the norm counts every replica",
]
ALL = [(name, layout) for name, fault in FAULTS.items() for layout in fault.layouts]


def test_there_are_many() -> None:
    assert len(FAULTS) >= 30


@pytest.mark.parametrize("name", QUICK)
def test_a_mistake_is_found_located_and_named(ranks: Ranks, name: str) -> None:
    fault = FAULTS[name]
    _judge(ranks, fault, fault.layouts[0])


@pytest.mark.proof
@pytest.mark.parametrize(("name", "layout"), ALL)
def test_every_mistake_on_every_layout(ranks: Ranks, name: str, layout: str) -> None:
    _judge(ranks, FAULTS[name], layout)


def _judge(ranks: Ranks, fault: Fault, layout: str) -> None:
    verdict = verified(ranks, subject(fault.model, fault.settings), layout, fault.name)
    assert not verdict.ok
    assert re.match(fault.first, verdict.first_difference or ""), verdict
    assert re.search(fault.cause, verdict.cause or ""), verdict


@pytest.mark.parametrize("layout", ["dp=2 zero=0 microbatches=2", "dp=3 zero=3", "dp=4 zero=1 shard_group=2"])
def test_what_is_right_is_not_called_wrong(ranks: Ranks, layout: str) -> None:
    verdict = verified(ranks, subject("decoder"), layout)
    assert verdict.ok, verdict
    assert 0 < verdict.worst_relative < 1e-12


@pytest.mark.parametrize("model", ["bert", pytest.param("t5", marks=pytest.mark.proof)])
def test_other_models_and_their_masks(ranks: Ranks, model: str) -> None:
    verdict = verified(ranks, subject(model), "dp=2 zero=3 microbatches=2")
    assert verdict.ok, verdict
