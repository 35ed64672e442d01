"""The graph of a step: nothing is used before it is there, and backward really has gradients in the order it says."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from motet.cli.show.show_commands import show_app as app
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.layout import Layout
from motet.parallel.model_inventory import ModelInventory, TensorInfo
from motet.parallel.model_sharding import ModelSharding, ShardRule
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan import timeline
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.precision.recipe import RECIPES
from motet.train.build import build_components, precision_context
from motet.train.step_graph import step_plan_of_job, step_timeline
from train.runs import small_job

STRETCHES = [
    timeline.ModelSegment("embedding", 1.0, frozenset({"table"})),
    *(timeline.ModelSegment(f"block {i}", 4.0, frozenset({f"{i}.a", f"{i}.b"})) for i in range(3)),
    timeline.ModelSegment("head", 2.0, frozenset({"norm"})),
]
NUMEL = 2**14
INVENTORY = ModelInventory(
    (
        TensorInfo("table", (NUMEL,), "float32", "trained"),
        *(TensorInfo(f"{i}.{name}", (NUMEL,), "float32", "trained", block=i) for i in range(3) for name in "ab"),
        TensorInfo("norm", (128,), "float32", "trained"),
    )
)
BUCKETS = [{"norm", "2.b"}, {"2.a", "1.b", "1.a", "0.b"}, {"0.a", "table"}]  # Not cut where segments end
LAYOUTS = [
    *(
        DataParallelSharding(4, parts, zero, shards if zero else 1, reshard_after_forward)
        for zero, shards, parts, reshard_after_forward in product(range(4), (4, 2), (1, 3), (True, False))
        if zero or shards == 4
    ),
    DataParallelSharding(4, 3, 3, 4, secondary_shards=2),
    DataParallelSharding(4, 3, 3, 4, min_shard_numel=200),
]


def planned(layout: DataParallelSharding, overlap: str) -> StepPlan:
    limits = {"first_bucket_mib": 8 * NUMEL / 2**20, "bucket_mib": 16 * NUMEL / 2**20}
    settings = CommunicationSettings.model_validate({"overlap": overlap} | limits)
    dims = ParallelDims((("dp", layout.ranks),))
    batch = layout.ranks * layout.microbatches
    recipe = RECIPES["bf16"]
    return make_step_plan(INVENTORY, Layout(dims, layout), recipe, settings=settings, batch_sequences=batch)


def made(layout: DataParallelSharding, overlap: str) -> dict[str, timeline.TimelineNode]:
    nodes = timeline.build_step_graph(STRETCHES, planned(layout, overlap), RECIPES["bf16"])
    found: dict[str, timeline.TimelineNode] = {}
    for node in nodes:
        assert node.name not in found
        assert all(name in found for name in node.depends_on), node
        found[node.name] = node
    return found


def messages(layout: DataParallelSharding) -> dict[str, set[str]]:
    """Unit -> its parameters, as the test wants them."""
    if layout.zero < 3:
        return {f"bucket {number}": names for number, names in enumerate(BUCKETS)}
    units = {**{str(i): {f"{i}.a", f"{i}.b"} for i in range(3)}, "outside of blocks": {"table", "norm"}}
    return units if not layout.min_shard_numel else units | {"outside of blocks": {"table"}, "bucket 0": {"norm"}}


def sums(layout: DataParallelSharding, overlap: str) -> dict[str, list[str]]:
    """Collective -> the parts of the batch after which it sums gradients."""
    parts = names_of_parts(layout)
    if layout.zero == 0:
        return {"reduce-scatter" if overlap == "forward" else "all-reduce": parts[-1:]}
    replicas = {"all-reduce": parts[-1:]} if layout.shards < layout.ranks else {}
    return {"reduce-scatter": parts if layout.zero >= 2 else parts[-1:], **replicas}


def before(name: str, nodes: dict[str, timeline.TimelineNode]) -> set[str]:
    """All that is done when a node begins."""
    done: set[str] = set()
    waiting = [name]
    while waiting:
        new = set(nodes[waiting.pop()].depends_on) - done
        done |= new
        waiting += new
    return done


def names_of_parts(layout: DataParallelSharding) -> list[str]:
    return [""] if layout.microbatches == 1 else [f" of part {i + 1}" for i in range(layout.microbatches)]


@pytest.mark.parametrize("overlap", ["none", "backward", "forward"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_are_sent_when_they_are_there(layout: DataParallelSharding, overlap: str) -> None:
    nodes, wanted = made(layout, overlap), sums(layout, overlap)
    sent = {name for name, node in nodes.items() if node.kind == "reduce"}
    assert sent == {
        f"{kind} {unit}{part}" for kind, parts in wanted.items() for part in parts for unit in messages(layout)
    }
    for (unit, parameters), (kind, parts) in product(messages(layout).items(), wanted.items()):
        for part in parts:
            done = before(f"{kind} {unit}{part}", nodes)
            assert {f"backward {s.name}{part}" for s in STRETCHES if s.parameters & parameters} <= done
            assert kind == "reduce-scatter" or layout.zero == 0 or f"reduce-scatter {unit}{part}" in done
            waits = overlap == "none" and unit.startswith("bucket")
            first_user = next(s for s in STRETCHES if s.parameters & parameters)
            assert waits or {f"backward {s.name}{part}" for s in STRETCHES[: STRETCHES.index(first_user)]}.isdisjoint(
                done
            )
    assert sent <= before("agree on the norm", nodes)


@pytest.mark.parametrize("overlap", ["none", "backward", "forward"])
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.zero < 3], ids=str)
def test_the_next_forward_uses_what_was_updated(layout: DataParallelSharding, overlap: str) -> None:
    nodes = made(layout, overlap)
    for stretch, (unit, parameters) in product(STRETCHES, messages(layout).items()):
        if not parameters & stretch.parameters:
            continue
        done = before(f"forward {stretch.name} of the next step", nodes)
        assert "agree on the norm" in done
        if layout.zero or overlap == "forward":
            assert f"all-gather {unit}" in done
        assert (f"update {unit}" if layout.zero == 0 and overlap == "forward" else "update all") in done
    embedding = before("forward embedding of the next step", nodes)
    assert ("all-gather bucket 0" in embedding) == bool(layout.zero and overlap != "forward")


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.zero == 3], ids=str)
def test_stage_3_gathers_before_it_computes(layout: DataParallelSharding) -> None:
    nodes = made(layout, "backward")
    assert "update all" in before("all-gather outside of blocks for forward of the next step", nodes)
    for stretch, (unit, parameters), part in product(STRETCHES, messages(layout).items(), names_of_parts(layout)):
        if parameters & stretch.parameters and not unit.startswith("bucket"):
            assert f"all-gather {unit} for forward{part}" in before(f"forward {stretch.name}{part}", nodes)
            gathers_again = unit != "outside of blocks" and layout.reshard_after_forward
            way = "backward" if gathers_again else "forward"
            assert f"all-gather {unit} for {way}{part}" in before(f"backward {stretch.name}{part}", nodes)
            assert (f"all-gather {unit} for backward{part}" in nodes) == gathers_again
    if layout.min_shard_numel:
        assert "all-gather bucket 0" in before("forward embedding of the next step", nodes)


def test_second_copies_are_gathered_within_their_groups() -> None:
    layout = DataParallelSharding(4, 1, 3, 4, secondary_shards=2)
    for way, groups in {"forward": ((0, 1, 2, 3),), "backward": ((0, 1), (2, 3))}.items():
        action = made(layout, "backward")[f"all-gather 1 for {way}"].action
        assert action is not None and action.rank_groups == groups


@pytest.mark.parametrize(
    ("layout", "overlap", "bytes_per_parameter"),
    [
        (DataParallelSharding(4, 3, 0, 1), "backward", {"all-reduce": 2 * 4}),
        (DataParallelSharding(4, 3, 0, 1), "forward", {"reduce-scatter": 4, "all-gather": 4}),
        (DataParallelSharding(4, 3, 1, 4), "backward", {"reduce-scatter": 4, "all-gather": 2}),
        (DataParallelSharding(4, 3, 2, 4), "backward", {"reduce-scatter": 3 * 4, "all-gather": 2}),
        (DataParallelSharding(4, 3, 2, 2), "backward", {"reduce-scatter": 3 * 4, "all-reduce": 4, "all-gather": 2}),
        (DataParallelSharding(4, 3, 3, 2, reshard_after_forward=False), "backward",
         {"reduce-scatter": 3 * 4, "all-reduce": 4, "all-gather": 4 * 2}),
    ],
)  # fmt: skip
def test_its_bytes(layout: DataParallelSharding, overlap: str, bytes_per_parameter: dict[str, int]) -> None:
    """Gradients are summed in float32, an all-reduce sends them twice; parameters are gathered in bfloat16."""
    work: dict[str, float] = {}
    for name, node in made(layout, overlap).items():
        if node.resource == "network":
            kind = name.split()[0]
            work[kind] = work.get(kind, 0.0) + node.work
    numel = 7 * NUMEL + 128
    assert work == {kind: numel * bytes_ for kind, bytes_ in bytes_per_parameter.items()}


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_overlap_makes_a_step_shorter_and_never_longer(zero: int) -> None:
    layout, ends = DataParallelSharding(4, 2, zero, 4 if zero else 1), []
    for overlap in ("none", "backward", "forward"):
        times = timeline.compute_node_times(list(made(layout, overlap).values()), _seconds)
        ends.append(max(stop for _, stop in times.values()))
    assert ends[0] > ends[1] > ends[2]


def _seconds(node: timeline.TimelineNode) -> float:
    return node.work / (8 * NUMEL) if node.resource == "network" else node.work


def test_buckets_keep_their_order_where_backward_has_another() -> None:
    """Bucket 0 is complete last here, so that the others wait for it, as the engine has them wait."""
    layout = DataParallelSharding(4, 1, 2, 4)
    nodes = timeline.build_step_graph(STRETCHES[::-1], planned(layout, "backward"), RECIPES["bf16"])
    sent = [node for node in nodes if node.kind == "reduce"]
    assert [node.label for node in sent] == ["bucket 0", "bucket 1", "bucket 2"]
    assert {node.depends_on for node in sent} == {("backward head",)}


WITHIN_BLOCKS = ShardRule(partial_over=("dp", "tp"))
SPLITS = {
    "tp": ModelSharding({f"{i}.{name}": WITHIN_BLOCKS for i in range(3) for name in "ab"}),
    "pp": ModelSharding(stages=(range(1), range(1, 3))),
    "both": ModelSharding({f"{i}.a": WITHIN_BLOCKS for i in range(3)}, stages=(range(1), range(1, 3))),
}


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("split", SPLITS)
def test_units_of_several_sync_groups_have_unique_names(split: str, zero: int) -> None:
    """Otherwise what one of them waits for would be taken for what the other one waits for."""
    layout = DataParallelSharding(2, 3, zero, 2 if zero else 1, min_shard_numel=200 * (zero == 3))
    dims = ParallelDims((("pp", 1 if split == "tp" else 2), ("dp", 2), ("tp", 1 if split == "pp" else 2)))
    plan = make_step_plan(
        INVENTORY,
        Layout(dims, layout),
        RECIPES["bf16"],
        settings=CommunicationSettings(bucket_mib=16 * NUMEL / 2**20),
        batch_sequences=6,
        model_sharding=SPLITS[split],
    )
    names = [unit.name for unit in plan.comm_units]
    assert len(plan.groups) > 1 and len(set(names)) == len(names)
    nodes = timeline.build_step_graph(STRETCHES, plan, RECIPES["bf16"])
    assert len({node.name for node in nodes}) == len(nodes)
    for unit in plan.comm_units:
        users = {s.name for s in STRETCHES if s.parameters & {member.name for member in unit.members}}
        reductions = [node for node in nodes if node.kind == "reduce" and node.unit == unit]
        for node in reductions:
            part = node.label.removeprefix(unit.name)
            done = before(node.name, {each.name: each for each in nodes})
            assert {f"backward {user}{part}" for user in users} <= done
        assert bool(reductions) == bool(unit.members)


def complete_in_order(job_folder: Path) -> tuple[list[int], list[str]]:
    """The order of the buckets in a real backward, and in the graph."""
    job = small_job(job_folder, "communication.bucket_mib=0.02", "communication.first_bucket_mib=0.001")
    order: list[int] = []
    with precision_context(job):
        parts = build_components(job, RankGroup(0, 1, None, torch.device("cpu")), job_folder)
        (spread,) = parts.engine.optimizer.sharded_parameters.engines
        assert isinstance(spread, BucketedDataParallel)
        spread.flat_parameters.gradients.on_bucket_ready = order.append
        parts.make_train_step(job).step(0, 0.001)
    plan = step_plan_of_job(job, job.layout_for(2))
    nodes, _ = step_timeline(job, plan, 0.5)
    said = [node.label for node in nodes if node.kind == "reduce"]
    assert [unit.members for unit in plan.comm_units] == [bucket.members for bucket in spread.flat_parameters.buckets]
    assert len(plan.comm_units) > 4
    return order, said


def test_backward_has_gradients_in_that_order(tmp_path: Path) -> None:
    order, said = complete_in_order(tmp_path)
    assert [f"bucket {number}" for number in order] == said


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["step", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command(tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    found = json.loads(run("tiny", "layout.zero=2", "--ranks", "4", "--svg", str(picture), "--json"))
    assert {node["kind"] for node in found["nodes"]} == {"forward", "backward", "reduce", "agree", "update", "gather"}
    assert picture.read_text().count('<rect class="box ') == len(found["nodes"])
    assert "after backward block 0" in run("tiny", "--ranks", "4")
