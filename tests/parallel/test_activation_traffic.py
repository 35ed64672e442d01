"""Collectives of activations and their bytes, against the textbook's numbers of a block."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from motet.cluster.cluster import load_cluster_for_ranks
from motet.models.spec.layer_specs import MicroBatchShape
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.layout import parse_layout, resolve_layout
from motet.parallel.model_sharding import ActivationSize, BoundaryComm, ModelInventory, ModelSharding
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.parallel.step_plan.traffic import (
    activation_collectives,
    sent_activation_bytes,
    traffic_between_hosts,
)
from motet.precision.recipe import RECIPES
from motet.train.job import load_job
from motet.train.job_step_plan import between_hosts_warning
from parallel.sharded_inventory import inventory
from parallel.test_roles_of_tensors import layered_sharding
from parallel.traffic_counter import count_bytes
from ranks import Ranks
from train.runs import small_job

WIDTH, SHAPE, RECIPE = 1024, MicroBatchShape(4, 128), RECIPES["bf16"]
ACTIVATION = 4 * 128 * WIDTH * 2  # Bytes; enough for an all-reduce in two steps


def planned(tp: int, *, sequence: bool = False, microbatches: int = 1, frozen: tuple[str, ...] = ()) -> StepPlan:
    sharding = layered_sharding(sequence=sequence)
    sized = (replace(comm, sizes=(ActivationSize(WIDTH),)) for comm in sharding.boundary_comms)
    return plan_of(replace(sharding, boundary_comms=tuple(sized)), tp, microbatches=microbatches, frozen=frozen)


def plan_of(sharding: ModelSharding, tp: int, *, microbatches: int = 1, frozen: tuple[str, ...] = ()) -> StepPlan:
    tensors = (replace(t, kind="frozen") if t.name.endswith(frozen) else t for t in inventory().tensors)
    settings, rows = parse_layout(f"dp=2 tp={tp} microbatches={microbatches}"), 8 * microbatches
    return make_step_plan(
        ModelInventory(tuple(tensors)) if frozen else inventory(),
        resolve_layout(settings, 2 * tp, rows),
        RECIPE,
        settings=CommunicationSettings(),
        batch_sequences=rows,
        model_sharding=sharding,
    )


def test_a_block_communicates_as_the_textbook_says() -> None:
    """Four all-reduces for each block, two in each direction; the embedding has one forward, the head one backward."""
    made = activation_collectives(planned(2), SHAPE, RECIPE)
    assert Counter((each.collective, each.moment) for each in made) == {
        ("all-reduce", "forward"): 3 * 2 + 1,
        ("all-reduce", "backward"): 3 * 2 + 1,
    }
    assert {(each.numel, each.dtype, each.over) for each in made} == {(ACTIVATION // 2, "bfloat16", "tp")}
    made = activation_collectives(planned(2, sequence=True), SHAPE, RECIPE)
    assert Counter((each.collective, each.moment) for each in made) == {
        ("all-gather", "forward"): 3 * 2 + 1,
        ("reduce-scatter", "forward"): 3 * 2 + 1,
        ("reduce-scatter", "backward"): 3 * 2 + 1,
        # The gradient of what was scattered, and once more the input of each layer whose weight is trained
        ("all-gather", "backward"): (3 * 2 + 1) + (3 * 2 + 1),
    }


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_send_the_bytes_of_the_formulas(tp: int) -> None:
    part = ACTIVATION * (tp - 1) // tp  # What a reduce-scatter or an all-gather sends
    sent = sent_activation_bytes(planned(tp, microbatches=3), SHAPE, RECIPE, rank=tp)
    assert (sent.all_reduce, sent.reduce_scatter, sent.all_gather) == (3 * 14 * 2 * part, 0, 0)
    sent = sent_activation_bytes(planned(tp, sequence=True), SHAPE, RECIPE, rank=1)
    assert (sent.all_reduce, sent.reduce_scatter, sent.all_gather) == (0, 14 * part, 21 * part)


def test_what_has_no_gradient_is_not_communicated_in_backward() -> None:
    sharding = layered_sharding()
    sized = tuple(
        replace(comm, sizes=(ActivationSize(WIDTH, needs_gradient=comm.module != "blocks.0.attn.q"),))
        for comm in sharding.boundary_comms
    )
    made = activation_collectives(plan_of(replace(sharding, boundary_comms=sized), 2), SHAPE, RECIPE)
    assert Counter(each.moment for each in made) == {"forward": 7, "backward": 6}
    frozen = planned(2, sequence=True, frozen=("mlp.up.weight", "attn.kv.weight"))
    again = [c.module for c in activation_collectives(frozen, SHAPE, RECIPE) if c.collective == "all-gather"]
    # The queries' weight is trained, and reads the same tensor as the frozen one of keys and values.
    assert Counter(again)["blocks.0.attn.q"] == 2 and Counter(again)["blocks.0.mlp.up"] == 1


def test_each_operation_and_its_conjugate() -> None:
    comms = tuple(
        BoundaryComm(operation, side, 0, operation, "tp", 1, sizes=(ActivationSize(WIDTH, "source"),))
        for operation, side in (("split", "input"), ("replicate", "input"), ("split", "output"), ("gather", "output"))
    )
    shape = MicroBatchShape(4, 128, source_length=32)
    made = activation_collectives(plan_of(ModelSharding(boundary_comms=comms), 2), shape, RECIPE)
    assert [(c.module, c.collective, c.moment) for c in made] == [
        ("replicate", "all-gather", "forward"),
        ("gather", "all-gather", "forward"),
        ("split", "all-gather", "backward"),
        ("split", "all-gather", "backward"),
    ]
    assert {each.numel for each in made} == {4 * 32 * WIDTH}


def test_bytes_between_hosts() -> None:
    plan = planned(4)
    made = activation_collectives(plan, SHAPE, RECIPE)
    # On two hosts of two, each pair of ranks of two hosts reduces one half: every rank sends a half of a half, twice.
    sent, seconds = traffic_between_hosts(made, plan.dims.groups("tp"), hosts=(0, 0, 1, 1, 2, 2, 3, 3))
    assert (sent, seconds) == (14 * 4 * 2 * ACTIVATION // 4, 0.0)
    cluster = load_cluster_for_ranks("two-hosts-200mbit", 8)
    _, seconds = traffic_between_hosts(made, plan.dims.groups("tp"), hosts=(0, 0, 1, 1, 2, 2, 3, 3), cluster=cluster)
    assert 1 < seconds / (sent / 2 / 25e6) < 1.3  # Half of the bytes leave by the one cable of each host


def test_ranks_of_several_hosts_are_warned_of() -> None:
    job = load_job("tiny", ["layout.tp=4", "layout.dp=2", "communication.cluster=two-hosts-200mbit"])
    plan, alone = planned(4), job.model_copy(update={"communication": CommunicationSettings()})
    assert between_hosts_warning(alone, plan) == between_hosts_warning(alone, plan, 4) == ""
    assert between_hosts_warning(alone, plan, 8) == between_hosts_warning(alone, planned(2), 2) == ""
    warning = between_hosts_warning(alone, plan, 2)
    assert warning.startswith(
        "layout.tp = 4: ranks 0 1 2 3 split layers, but lie on several hosts of 2 devices. In a step"
    )
    assert warning.endswith("set communication.cluster to predict its time. Use layout.tp=2 to stay inside of a host.")
    with_cluster = between_hosts_warning(job, plan, 8)
    assert re.search(r"and all communication of activations takes [0-9.]+ s on two-hosts-200mbit\. Use", with_cluster)
    assert "Use layout.tp=3 to" in between_hosts_warning(alone, plan, 6)
    assert "ranks 2 3 split layers" in between_hosts_warning(alone, planned(2), 3)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("decoder", ["layout.tp=2", "layout.dp=2", "layout.zero=2", "layout.microbatches=2", "precision.recipe=bf16"]),
        pytest.param("adapters", ["layout.tp=2", "layout.sp=true"], marks=pytest.mark.proof),
        pytest.param("decoder", ["layout.tp=2", "layout.rules.*.up=rows"], marks=pytest.mark.proof),
        ("llama", ["layout.tp=2", "model.frozen=['*embed*', '*layers.0.*']"]),
    ],
)
def test_ranks_send_the_bytes_that_are_promised(ranks: Ranks, tmp_path: Path, model: str, settings: list[str]) -> None:
    """The split is the one that the job proposes."""
    job = small_job(tmp_path, *settings, model=model)
    for counted in ranks.run(job.layout.dims.ranks, count_bytes, job):
        assert counted.sent == [counted.promised] * 2 and counted.promised > 0
        assert counted.kept == counted.formula or model != "decoder"  # It counts no frozen parameters
