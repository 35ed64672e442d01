"""Parts of a step by their definitions: the bytes of every collective, the bytes of an update, and waits."""

from dataclasses import dataclass, field, replace

import pytest

from motet.models.settings import DecoderSettings, MixtureOfExpertsSettings
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.plan.frameworks import STACKS, SoftwareStack
from motet.plan.planned_cluster import load_planned_cluster
from motet.plan.planned_step import PlannedStep
from motet.plan.time.step_simulation import PipelineDurations, simulate_pipeline
from plan.sized_layouts import sized, sized_layout

MODEL = DecoderSettings(
    vocab_size=32000, context=2048, layers=16, hidden=2048, heads=16, kv_heads=8, ffn_hidden=5632, tied=False
)
EXPERTS = MODEL.model_copy(update={"experts": MixtureOfExpertsSettings(count=8, per_token=2, hidden=1024)})
IN_BLOCK = 2 * 2048 + 2 * 2048**2 + 2 * 2048 * 1024 + 3 * 2048 * 5632  # Two norms, q and o, k and v, gated network
EMBEDDING, HEAD = 32000 * 2048, 32000 * 2048 + 2048
WHOLE = 16 * IN_BLOCK + EMBEDDING + HEAD
MEGATRON = STACKS["megatron"]
TIMES = load_planned_cluster("h100", 64).step_times


@dataclass
class RecordedCosts:
    """Collectives that a step asks for, each of which takes the same time."""

    asked: set[tuple[str, int, int, int]] = field(default_factory=set)

    def seconds(self, collective: str, size_bytes: float, *, ranks: int, ranks_per_host: int) -> float:
        self.asked.add((collective, round(size_bytes), ranks, ranks_per_host))
        return 1e-3


def collectives(
    model: DecoderSettings = MODEL, stack: SoftwareStack = MEGATRON, matmul: str = "bfloat16", **sizes: object
) -> set[tuple[str, int, int, int]]:
    """(Collective, bytes, ranks, ranks on one host) of a step of 64 devices on hosts of 8."""
    costs = RecordedCosts()
    step = PlannedStep(model, 2048, 256, **sized(**sizes), matmul=matmul, stack=stack)
    replace(TIMES, costs=costs).predict(step)
    return costs.asked


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (0, {("all-reduce", 4 * WHOLE, 64, 8)}),
        (1, {("reduce-scatter", 4 * WHOLE, 64, 8), ("all-gather", 2 * WHOLE, 64, 8)}),
        (2, {("reduce-scatter", 4 * WHOLE, 64, 8), ("all-gather", 2 * WHOLE, 64, 8)}),
    ],
)
def test_gradients_are_reduced_in_float32_and_parameters_gathered_in_bfloat16(zero: int, expected: set) -> None:
    assert collectives(dp=64, zero=zero, microbatches=4) == expected


def test_overlap_with_the_next_forward_sends_the_sums_of_stage_0_in_two_halves() -> None:
    """The row of ZERO_STAGES is not that of an all-reduce; each rank updates everything."""
    costs, layout = RecordedCosts(), sized_layout(dp=64, microbatches=4)
    steps = [
        PlannedStep(MODEL, 2048, 256, layout, stack=MEGATRON, communication=CommunicationSettings(overlap=how))
        for how in ("backward", "forward")
    ]
    before, after = (replace(TIMES, costs=costs).predict(step).parts["optimizer"] for step in steps)
    sums = {("all-reduce", 4 * WHOLE, 64, 8), ("reduce-scatter", 4 * WHOLE, 64, 8), ("all-gather", 4 * WHOLE, 64, 8)}
    assert costs.asked == sums and before == after


def test_without_overlap_all_communication_is_exposed() -> None:
    hidden, exposed = (
        TIMES.predict(
            PlannedStep(
                MODEL,
                2048,
                256,
                sized_layout(dp=64, zero=1, microbatches=4),
                communication=CommunicationSettings(overlap=how),
            )
        )
        for how in ("backward", "none")
    )
    assert exposed.parts["data parallelism"] > 1.5 * hidden.parts["data parallelism"]


def test_replicas_are_all_ranks_with_the_same_parameters() -> None:
    """Ranks of a sequence hold the same; those of tensor parallelism hold parts of all but the norms."""
    assert {("all-reduce", 4 * WHOLE, 64, 8)} < collectives(dp=32, cp=2, zero=0, microbatches=8)
    assert {("reduce-scatter", 4 * WHOLE, 64, 8)} < collectives(dp=16, cp=4, zero=1, microbatches=16)
    norms = 33 * 2048
    part = (WHOLE - norms) // 8 + norms
    assert {("all-reduce", 4 * part, 8, 1)} < collectives(dp=8, tp=8, sp=True, microbatches=32)
    part = (WHOLE - norms) // 4 + norms
    assert {("reduce-scatter", 4 * part, 16, 2)} < collectives(dp=8, tp=4, cp=2, zero=1, microbatches=32)


def test_shard_groups_add_their_parts_up() -> None:
    expected = {("reduce-scatter", 4 * WHOLE, 8, 8), ("all-gather", 2 * WHOLE, 8, 8), ("all-reduce", WHOLE // 2, 8, 1)}
    assert collectives(dp=64, zero=1, shard_group=8, microbatches=4) == expected


def test_activations_of_tensor_and_context_parallelism() -> None:
    """Outputs of attention and network of a block, and the gradient of the input of the head; keys and values."""
    row = 2048 * 2048 * 2
    whole = collectives(dp=8, tp=8, microbatches=32)
    assert {("all-reduce", 2 * row, 8, 8), ("all-reduce", row, 8, 8)} < whole
    assert all(name == "all-reduce" for name, *_ in whole)
    split = collectives(dp=8, tp=8, sp=True, microbatches=32)
    assert {(name, 2 * row, 8, 8) for name in ("reduce-scatter", "all-gather")} < split
    keys_and_values = 2048 * 8 * (128 + 128) * 2
    assert ("all-gather", keys_and_values, 4, 4) in collectives(dp=16, cp=4, microbatches=16)
    assert ("all-gather", keys_and_values // 2, 4, 4) in collectives(dp=8, tp=2, cp=4, microbatches=32)
    queries_to_outputs = 512 * 2 * 16 * (128 + 128) * 2  # Of the tokens of a rank
    by_heads = collectives(dp=16, cp=4, cp_kind="all-to-all", microbatches=16)
    assert ("all-to-all", queries_to_outputs, 4, 4) in by_heads


def in_stage_3(width: float, *, efficiency: float = 1.0, shards: int = 64) -> set[tuple[str, int, int, int]]:
    """Collectives of a block, the embedding and the head. `width` is the bytes of a gathered parameter of a block; the
    embedding and the head are gathered in bfloat16. Less of the bandwidth counts as more bytes."""
    replicas, asked = 64 // shards, set()
    for numel, gathered in ((IN_BLOCK, width), (EMBEDDING, 2), (HEAD, 2)):
        asked.add(("all-gather", round(gathered * numel / efficiency), shards, 8))
        asked.add(("reduce-scatter", round(4 * numel / efficiency), shards, 8))
        if replicas > 1:
            asked.add(("all-reduce", round(4 * numel / efficiency / shards), replicas, 1))
    return asked


def test_stage_3_gathers_and_reduces_each_block() -> None:
    assert collectives(dp=64, zero=3) == in_stage_3(2)
    assert collectives(dp=64, zero=3, shard_group=8) == in_stage_3(2, shards=8)
    assert collectives(dp=64, zero=3, matmul="float8") == in_stage_3(1)
    slow = replace(MEGATRON, sharded_efficiency=0.5)
    assert collectives(dp=64, zero=3, shard_group=8, stack=slow) == in_stage_3(2, efficiency=0.5, shards=8)
    in_halves = collectives(dp=64, zero=3, stack=replace(MEGATRON, gathers_per_block=2))
    assert {("all-gather", IN_BLOCK, 64, 8), ("reduce-scatter", 2 * IN_BLOCK, 64, 8)} < in_halves


def test_experts_are_reduced_by_the_ranks_that_hold_the_same() -> None:
    expert_parameters = 16 * 8 * 3 * 2048 * 1024
    dense = PlannedStep(EXPERTS, 2048, 256, **sized()).spec.parameter_count - expert_parameters
    asked = collectives(EXPERTS, dp=64, ep=8, zero=1, microbatches=4)
    expected = {("reduce-scatter", 4 * dense, 64, 8), ("reduce-scatter", 4 * expert_parameters // 8, 8, 1)}
    expected |= {("all-gather", 2 * dense, 64, 8), ("all-gather", 2 * expert_parameters // 8, 8, 1)}
    assert {each for each in asked if each[0] != "all-to-all"} == expected
    assert expected < collectives(EXPERTS, dp=16, cp=4, ep=8, zero=1, microbatches=16)
    routed = 2048 * 2 * 2048 * 2  # Two experts for each token of a row, in bfloat16
    assert ("all-to-all", routed, 8, 8) in asked
    split = collectives(EXPERTS, dp=16, tp=4, sp=True, ep=8, zero=1, microbatches=16)
    assert {size for name, size, *_ in split if name == "all-to-all"} == {routed // 4}


def test_messages_between_stages_are_one_micro_batch() -> None:
    row = 2048 * 2048 * 2
    assert ("send-receive", row, 2, 1) in collectives(dp=8, pp=8, microbatches=32)
    assert ("send-receive", 4 * row, 2, 1) in collectives(dp=8, pp=8, microbatches=8)
    on_hosts = {"dp": 2, "pp": 8, "tp": 4, "microbatches": 128}
    for words in ({}, {"sp": True}):
        assert ("send-receive", row // 4, 2, 1) in collectives(**on_hosts, **words)
    # motet sends whole tensors between ranks of one host, whose links are as fast as those of tensor parallelism.
    motet = STACKS["motet"]
    assert ("send-receive", row // 4, 2, 1) in collectives(**on_hosts, stack=motet)
    on_one_host = PlannedStep(MODEL, 2048, 8, **sized(dp=1, pp=2, tp=4, microbatches=8), stack=motet)
    costs = RecordedCosts()
    replace(TIMES, costs=costs).predict(on_one_host)
    assert ("send-receive", row, 2, 2) in costs.asked


def test_an_update_reads_and_writes_all_states() -> None:
    """Master and two moments in float32 read and written, a gradient read twice, a parameter of 2 bytes written."""
    memory_Bps = TIMES.rates.for_ranks(64, 64).memory_Bps  # noqa: N806 - a unit
    for sizes, held in (({"zero": 0}, WHOLE), ({"zero": 1}, WHOLE / 64), ({"zero": 3, "shard_group": 8}, WHOLE / 8)):
        step = PlannedStep(MODEL, 2048, 256, **sized(dp=64, **sizes), stack=MEGATRON)
        each = (3 * 2 + 2) * 4 + 2
        expected = held * each * MEGATRON.optimizer_passes / memory_Bps
        # Parts are scaled to add up to the step, which here corrects rounding errors alone.
        assert TIMES.predict(step).parts["optimizer"] == pytest.approx(expected, rel=1e-6), sizes


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_stages_that_wait_for_messages_take_longer(schedule: str, chunks: int) -> None:
    stages = 4 * chunks
    waits = PipelineDurations(schedule, 4, chunks, 8, (1.0,) * stages, (2.0,) * stages, (0.5,) * stages, 0.0, 0.25)
    longer = replace(waits, forward_s=(1.25,) * stages, backward_s=(2.25,) * stages, blocks_s=0.0)
    assert simulate_pipeline(waits) == pytest.approx(simulate_pipeline(longer))


def test_parts_are_those_of_the_slowest_rank() -> None:
    """Twelve blocks and an embedding or a head, or eight of each."""
    even, first, last = (
        TIMES.predict(PlannedStep(MODEL, 2048, 64, **sized(dp=2, pp=2, stages=stages, microbatches=32)))
        for stages in ("0-7,8-15", "0-11,12-15", "0-3,4-15")
    )
    assert 1.3 < first.parts["computation"] / even.parts["computation"] < 1.5
    assert 1.3 < last.parts["computation"] / even.parts["computation"] < 1.5
