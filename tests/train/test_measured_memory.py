"""The live bytes of a step of a job: measured on ranks, they are those that are predicted."""

import json
import tempfile
from pathlib import Path

import pytest
from torch import Tensor
from torch.distributed import ProcessGroup

from motet.cli.job_arguments import parse_bytes
from motet.memory.memory_timeline import Category
from motet.memory.storage_tracker import StorageTracker, tensors_reachable_from
from motet.models.arch.attention_and_feed_forward import FeedForward
from motet.parallel.process.process_group import CpuBackend, RankGroup
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from motet.train.memory_check import measure_ranks
from motet.train.memory_check.step_memory import measure_on_group
from motet.train.memory_check.step_prediction import StepMemory
from ranks import Ranks
from train.runs import small_job

TOLERANCE = 0.01
STATE: tuple[Category, ...] = ("parameters", "master parameters", "gradients", "moments")
# The model of the job tiny, with a vocabulary of bytes, on short sequences.
TINY = [
    *("model.layers=4", "model.hidden=256", "model.heads=8", "model.kv_heads=4", "model.ffn_hidden=688"),
    *("model.context=64", "data.sequence_length=64", "data.batch_sequences=4", "precision.recipe=fp32"),
]


def measured(group: RankGroup, job: Job) -> StepMemory:
    with tempfile.TemporaryDirectory() as folder:
        return measure_on_group(job, group, Path(folder))


def check(memory: StepMemory, in_pipeline: bool = False, tolerance: float = TOLERANCE) -> None:
    timeline, predicted = memory.measured, memory.predicted
    assert timeline is not None
    for category in (*STATE, "saved activations"):
        expected = predicted.peak_of(category)
        assert abs(timeline.peak_of(category) - expected) <= tolerance * expected, (category, expected)
    assert timeline.bytes_by_category["gradients"][-1] == predicted.peak_of("gradients")
    together: tuple[Category, ...] = ("gradients", "gathered or unreduced")
    largest = predicted.peak_of(*together)
    # Products of a pipeline are added to buckets, without a gradient that autograd hands over.
    least = predicted.peak_of("gradients") if in_pipeline else (1 - tolerance) * largest
    assert least <= timeline.peak_of(*together) <= (1 + tolerance) * largest


def check_job(ranks: Ranks, folder: Path, world: int, *settings: str, model: str = "decoder") -> list[StepMemory]:
    memories: list[StepMemory] = ranks.run(
        world, measured, small_job(folder, *TINY, *settings, model=model), timeout_s=240
    )
    for memory in memories:
        # What waits for weight gradients holds the received activation, too, which is not predicted.
        is_split = any("zb-" in each for each in settings)
        check(memory, any("layout.pp" in each for each in settings), 0.1 if is_split else TOLERANCE)
    return memories


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, []),
        (2, ["layout.zero=2"]),
        (2, ["layout.tp=2"]),
        (2, ["layout.pp=2", "layout.microbatches=2", "memory.recompute=every-k", "memory.every=4"]),
        (2, ["layout.zero=3", "memory.recompute=full", "precision.recipe=bf16", "precision.emulate=true"]),
        (2, ["layout.zero=3", "layout.microbatches=2", "layout.reduce_gradients=step"]),
        (2, ["layout.zero=2", "model.adapters.rank=4"]),
    ],
    ids=[
        "one rank",
        "stage 2",
        "tensor parallelism",
        "pipeline",
        "stage 3, recomputed, bf16",
        "stage 3, one reduction",
        "adapters",
    ],
)
def test_a_rank_keeps_what_is_predicted(ranks: Ranks, tmp_path: Path, world: int, settings: list[str]) -> None:
    alone = measure_ranks.predict_step_memory(job := small_job(tmp_path, *TINY, *settings), job.layout_for(world))
    for memory, before in zip(check_job(ranks, tmp_path, world, *settings), alone, strict=True):
        for category in (*STATE, "saved activations"):  # Without ranks the same is predicted
            assert before.predicted.peak_of(category) == memory.predicted.peak_of(category), category
        assert memory.measured and memory.measured.peak_of("other state") < 16384
        assert StepMemory.from_json(json.loads(json.dumps(memory.as_json()))) == memory


EXPERTS = "model.experts={count=8, per_token=2, hidden=224, shared=1}"
LIMITED = "model.experts={count=8, per_token=3, hidden=96, scores='sigmoid', capacity=1.1, drop='last'}"


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((EXPERTS, "memory.recompute=selective"), id="selective"),
        *(
            pytest.param(each, marks=pytest.mark.proof)
            for each in (
                (EXPERTS,),
                (LIMITED,),
                (LIMITED, "memory.recompute=full"),
                (EXPERTS, "precision.recipe=bf16", "precision.emulate=true"),
                (EXPERTS, "model.adapters={rank=4, targets=['*attention*']}"),
            )
        ),
    ],
)
@pytest.mark.parametrize("layout", [["layout.zero=2"], pytest.param(["layout.zero=3"], marks=pytest.mark.proof)])
def test_mixtures_of_experts(ranks: Ranks, tmp_path: Path, layout: list[str], settings: tuple[str, ...]) -> None:
    check_job(ranks, tmp_path, 2, *layout, *settings)


@pytest.mark.proof
@pytest.mark.parametrize("recompute", ["none", "full", "selective", "every-k"])
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, ["layout.microbatches=2"]),
        (2, ["layout.zero=1"]),
        (2, ["layout.zero=2", "layout.microbatches=2"]),
        (2, ["layout.zero=3"]),
        (2, ["layout.tp=2", "layout.sp=true"]),
        (2, ["layout.pp=2", "layout.microbatches=4", "layout.schedule=gpipe"]),
        (2, ["layout.pp=2", "layout.microbatches=4", "layout.schedule=zb-interleaved", "layout.chunks=2"]),
        (4, ["layout.tp=2", "layout.zero=2"]),
        (4, ["layout.tp=2", "layout.pp=2", "layout.microbatches=2"]),
    ],
)
def test_all_layouts(ranks: Ranks, tmp_path: Path, world: int, settings: list[str], recompute: str) -> None:
    check_job(ranks, tmp_path, world, *settings, f"memory.recompute={recompute}")


@pytest.mark.proof
@pytest.mark.parametrize(
    "trained",
    [
        "model.adapters={rank=4,targets=['*.qkv','*.down']}",
        "model.frozen=['embedding*','blocks.0.*']",
        "model.frozen=['*.up.*','*norm*']",
    ],
)
@pytest.mark.parametrize(
    "layout",
    [
        ["memory.recompute=selective"],
        ["layout.zero=3"],
        ["layout.tp=2", "layout.sp=true"],
        ["layout.pp=2", "layout.microbatches=2"],
    ],
)
def test_adapters_and_frozen_parameters(ranks: Ranks, tmp_path: Path, layout: list[str], trained: str) -> None:
    check_job(ranks, tmp_path, 2, *layout, trained)


def counted(group: RankGroup, job: Job) -> tuple[int, int]:
    """The peak of the timeline of a step, and that of a meter which knows no categories."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        components = build_components(job, group, Path(folder))
        step = components.make_train_step(job)
        step.step(0, 1e-3)
        roots = components.engine.module, components.engine.optimizer
        meter = StorageTracker(tensors_reachable_from(*roots, without=(RankGroup, ProcessGroup)))
        meter.start()
        step.step(1, 1e-3)
        meter.stop()
        timeline = measure_on_group(job, group, Path(folder) / "measured").measured
        assert timeline is not None
        return timeline.peak, meter.peak()


@pytest.mark.parametrize(
    "settings", [["memory.recompute=selective"], pytest.param(["layout.tp=2"], marks=pytest.mark.proof)]
)
def test_categories_add_up_to_all_live_bytes(ranks: Ranks, tmp_path: Path, settings: list[str]) -> None:
    gloo_ranks = ranks.on("gloo")  # Whose buffers no kernel reads
    for peak, expected in gloo_ranks.run(
        1 + ("layout.tp=2" in settings), counted, small_job(tmp_path, *TINY, *settings)
    ):
        tolerance = 0.02 if "layout.tp=2" in settings else 0.001  # Gloo's threads may hold a message a little longer
        assert abs(peak - expected) <= tolerance * expected


@pytest.mark.parametrize("backend", ["motet", pytest.param("gloo", marks=pytest.mark.proof)])
def test_messages_of_split_layers(ranks: Ranks, tmp_path: Path, backend: CpuBackend) -> None:
    """Ranks sum an activation in each block, and its gradient in backward."""
    job = small_job(tmp_path, *TINY, "layout.tp=2")
    for memory in ranks.on(backend).run(2, measured, job, timeout_s=120):
        held = memory.measured.peak_of("messages") / (4 * 64 * 256 * 4)  # Rows x tokens x width x bytes
        assert held == 1 if backend == "motet" else held in (1, 2)  # Gloo's threads may hold one a little longer


@pytest.mark.proof
@pytest.mark.parametrize("budget", ["56MiB", "60MiB", "100MiB"])
def test_chosen_policies(ranks: Ranks, tmp_path: Path, budget: str) -> None:
    """The prediction is that of the policies that were chosen, and the peak is within the budget."""
    memories = check_job(ranks, tmp_path, 1, "memory.recompute=auto", f"memory.budget={budget}")
    assert memories[0].measured and memories[0].measured.peak <= parse_bytes(budget)


def leaking(group: RankGroup, job: Job) -> tuple[StepMemory, StepMemory]:
    """A job, and the same one whose feed-forward networks keep a tensor that backward does not need."""
    right, leak, compute = measured(group, job), list[Tensor](), FeedForward.forward

    def keeping(self: FeedForward, x: Tensor) -> Tensor:
        leak.append(x.detach() + 1)
        return compute(self, x)

    FeedForward.forward = keeping  # type: ignore[method-assign]
    try:
        return right, measured(group, job)
    finally:
        FeedForward.forward = compute  # type: ignore[method-assign]


def test_a_tensor_that_is_kept_though_it_should_not_be_is_seen(ranks: Ranks, tmp_path: Path) -> None:
    right, wrong = ranks.run(1, leaking, small_job(tmp_path, *TINY), timeout_s=120)[0]
    assert right.measured and wrong.measured
    kept = wrong.measured.peak_of("saved activations") - right.measured.peak_of("saved activations")
    assert kept == 4 * (4 * 64 * 256 * 4)  # Layers x tokens x width x bytes
    with pytest.raises(AssertionError):
        check(wrong)


def test_a_module_without_sizes_is_measured_alone(ranks: Ranks, tmp_path: Path) -> None:
    memory = ranks.run(1, measured, small_job(tmp_path, "precision.recipe=fp32", model="recomputed"))[0]
    assert memory.measured.peak_of("saved activations") and not memory.predicted.peak_of("saved activations")
    compared = {each.name: each for each in memory.comparisons()}
    assert compared["saved activations"].predicted is None and compared["parameters"].difference == 0


def test_parameters_that_are_gathered_exist_only_while_they_are(ranks: Ranks, tmp_path: Path) -> None:
    job = small_job(tmp_path, "precision.recipe=fp32", "layout.zero=3", model="llama")
    for memory in ranks.run(2, measured, job, timeout_s=120):
        timeline = memory.measured
        assert timeline.peak_of("other state") < 1024
        assert timeline.bytes_by_category["gathered or unreduced"][0] == 0
        assert timeline.bytes_by_category["gathered or unreduced"][-1] == 0
        assert timeline.peak_of("gathered or unreduced") > timeline.peak_of("master parameters")


@pytest.mark.parametrize(
    ("settings", "ranks_count", "words"),
    [
        (["run.ranks=64", "layout.zero=3", "data.batch_sequences=64"], 64, "64 ranks are more than the 4"),
        (["model.layers=1000", "model.hidden=16384"], 1, "takes"),
    ],
)
def test_what_this_machine_does_not_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], ranks_count: int, words: str
) -> None:
    monkeypatch.setattr(measure_ranks, "usable_cores", lambda: 2)
    job = small_job(tmp_path, *settings)
    reason = measure_ranks.reason_to_predict(job, job.layout_for(ranks_count), ranks_count)
    assert words in reason and reason.endswith("so the bytes are predicted")
    small = small_job(tmp_path)
    assert measure_ranks.reason_to_predict(small, small.layout_for(1), 1) == ""
