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
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan import timeline
from motet.train.build import build_components, precision_context
from motet.train.step_graph import layers_and_messages
from train.runs import small_job

STRETCHES = [
    timeline.ModelSegment("embedding", 1.0, frozenset({"table"})),
    *(timeline.ModelSegment(f"block {i}", 4.0, frozenset({f"{i}.a", f"{i}.b"})) for i in range(3)),
    timeline.ModelSegment("head", 2.0, frozenset({"norm"})),
]
BUCKETS = [
    timeline.CommUnitVolume("bucket 0", frozenset({"norm", "2.b"}), 3.0, 3.0),
    timeline.CommUnitVolume("bucket 1", frozenset({"2.a", "1.b", "1.a", "0.b"}), 5.0, 5.0),
    timeline.CommUnitVolume("bucket 2", frozenset({"0.a", "table"}), 4.0, 4.0),
]
UNITS = [
    *(timeline.CommUnitVolume(f"block {i}", STRETCHES[i + 1].parameters, 4.0, 2.0, is_block=True) for i in (2, 1, 0)),
    timeline.CommUnitVolume("the rest", frozenset({"table", "norm"}), 3.0, 1.5),
]
LAYOUTS = [
    DataParallelSharding(4, parts, zero, 4 if zero else 1, reshard_after_forward)
    for zero, parts, reshard_after_forward in product(range(4), (1, 3), (True, False))
]


def made(layout: DataParallelSharding, overlap: str) -> dict[str, timeline.TimelineNode]:
    settings = CommunicationSettings.model_validate({"overlap": overlap})
    nodes = timeline.build_step_graph(STRETCHES, UNITS if layout.zero == 3 else BUCKETS, layout, settings=settings)
    found: dict[str, timeline.TimelineNode] = {}
    for node in nodes:
        assert node.name not in found
        assert all(name in found for name in node.depends_on), node
        found[node.name] = node
    return found


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
    nodes, parts = made(layout, overlap), names_of_parts(layout)
    sums = {name for name, node in nodes.items() if node.kind == "reduce"}
    for message in UNITS if layout.zero == 3 else BUCKETS:
        sent = [part for part in parts if f"reduce {message.name}{part}" in sums]
        assert sent == (parts if layout.zero >= 2 else parts[-1:])
        for part in sent:
            done = before(f"reduce {message.name}{part}", nodes)
            assert {f"backward {s.name}{part}" for s in STRETCHES if s.parameters & message.parameters} <= done
    assert sums <= before("agree on the norm", nodes)


@pytest.mark.parametrize("overlap", ["none", "backward", "forward"])
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.zero < 3], ids=str)
def test_the_next_forward_uses_what_was_updated(layout: DataParallelSharding, overlap: str) -> None:
    nodes = made(layout, overlap)
    for stretch, message in product(STRETCHES, BUCKETS):
        if not message.parameters & stretch.parameters:
            continue
        done = before(f"forward {stretch.name} of the next step", nodes)
        assert "agree on the norm" in done
        if layout.zero or overlap == "forward":
            assert f"gather {message.name}" in done
        assert (f"update {message.name}" if layout.zero == 0 and overlap == "forward" else "update all") in done


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.zero == 3], ids=str)
def test_stage_3_gathers_before_it_computes(layout: DataParallelSharding) -> None:
    nodes = made(layout, "backward")
    assert "update all" in before("gather the rest for forward of the next step", nodes)
    for stretch, message, part in product(STRETCHES, UNITS, names_of_parts(layout)):
        if message.parameters & stretch.parameters:
            assert f"gather {message.name} for forward{part}" in before(f"forward {stretch.name}{part}", nodes)
            way = "backward" if message.is_block and layout.reshard_after_forward else "forward"
            assert f"gather {message.name} for {way}{part}" in before(f"backward {stretch.name}{part}", nodes)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_overlap_makes_a_step_shorter_and_never_longer(zero: int) -> None:
    layout, ends = DataParallelSharding(4, 2, zero, 4 if zero else 1), []
    for overlap in ("none", "backward", "forward"):
        times = timeline.compute_node_times(list(made(layout, overlap).values()), lambda node: node.work)
        ends.append(max(stop for _, stop in times.values()))
    assert ends[0] > ends[1] > ends[2]


def complete_in_order(job_folder: Path) -> tuple[list[int], list[str]]:
    """The order of the buckets in a real backward, and in the graph."""
    job = small_job(job_folder, "communication.bucket_mib=0.02", "communication.first_bucket_mib=0.001")
    order: list[int] = []
    with precision_context(job):
        parts = build_components(job, RankGroup(0, 1, None, torch.device("cpu")), job_folder)
        spread = parts.engine.optimizer.sharded_parameters
        assert isinstance(spread, BucketedDataParallel)
        spread.flat_parameters.gradients.on_bucket_ready = order.append
        parts.make_train_step(job).step(0, 0.001)
        stretches, messages = layers_and_messages(job, parts.layout.sharding)
    nodes = timeline.build_step_graph(stretches, messages, parts.layout, settings=job.communication)
    said = [node.label for node in nodes if node.kind == "reduce"]
    buckets = [frozenset(member.name for member in bucket.members) for bucket in spread.flat_parameters.buckets]
    assert [message.parameters for message in messages] == buckets and len(buckets) > 4
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
