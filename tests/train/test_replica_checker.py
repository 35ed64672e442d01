"""Watching a run: of what is right nothing is told, whatever the layout; what breaks on a rank is found and named."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.core.errors import InputError, ReplicaMismatchError
from motet.monitor.events import ReplicaCheckDone, RunEnded, read_events
from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import RankGroup
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.launch.preflight import check_job
from motet.train.loop import run_rank
from motet.train.replica_check import checker
from motet.train.step import TrainStep
from ranks import Ranks
from train.replica_faults import FP32, STEPS, flipped, job_of, watched
from train.runs import same_bits

CLEAN: dict[str, tuple[int, str, list[str]]] = {
    "stage 0": (2, "bert", ["layout.microbatches=2"]),
    "stage 0, forward": (2, "decoder", ["communication.overlap=forward"]),
    "stage 1": (3, "bert", []),
    "stage 1, gpt2": (2, "gpt2", ["layout.zero=1", "precision.recipe=bf16"]),
    "stage 1, bf16": (2, "bert", ["layout.zero=1", "precision.recipe=bf16"]),
    "stage 2": (3, "t5", ["layout.zero=2", "layout.microbatches=2"]),
    "stage 2, hybrid": (4, "bert", ["layout.zero=2", "layout.shard_group=2", "communication.overlap=forward"]),
    "stage 3": (2, "bert", ["layout.zero=3", "layout.min_shard_numel=100", "precision.recipe=bf16"]),
    "stage 3, hybrid": (4, "t5", ["layout.zero=3", "layout.shard_group=2", "precision.recipe=fp32"]),
    "stage 3, second copies": (4, "decoder", ["layout.zero=3", "layout.secondary_group=2"]),
    "compressed": (2, "decoder", ["layout.zero=2", "communication.compress_gradients=int8"]),
    "classes": (2, "classify", []),
    "servers": (2, "bert", ["layout.data=parameter_server", "layout.server.transport=collectives"]),
    "apart": (4, "bert", ["layout.zero=1", "layout.shard_group=2", "outer.every=2"]),
    "apart, alone": (2, "bert", ["outer.every=3"]),
    "one rank": (1, "gpt2", []),
    "tensors": (2, "bert", ["layout.tp=2"]),
    **{f"tensors, stage {n}": (4, "bert", ["layout.tp=2", "layout.dp=2", f"layout.zero={n}"]) for n in range(3)},
    "tensors, stage 3": (4, "decoder", ["layout.tp=2", "layout.dp=2", "layout.zero=3", "layout.min_shard_numel=100"]),
    "adapters": (4, "adapters", ["layout.zero=3", "layout.shard_group=2"]),
    "same bits, uneven": (3, "decoder", ["run.reproducible=layout", "layout.zero=3", "data.batch_sequences=10"]),
}
QUICK = (
    "tensors",
    "tensors, stage 3",
    "stage 1, bf16",
    "stage 3, hybrid",
    "servers",
    "apart",
    "same bits, uneven",
)


@pytest.mark.parametrize("case", [one if one in QUICK else pytest.param(one, marks=pytest.mark.proof) for one in CLEAN])
def test_nothing_is_found_where_all_is_right(case: str, ranks: Ranks, tmp_path: Path) -> None:
    world, model, overrides = CLEAN[case]
    results = ranks.run(world, watched, job_of(tmp_path, *overrides, model=model))
    for found, _ in results:
        assert [(one.step, one.violations, one.same_machines) for one in found] == [(n, (), True) for n in (1, 2, 3)]
    assert results[0][0][0].ranks == {"apart": 2, "apart, alone": 1}.get(case, world)


BESIDE = [("bert", ["layout.zero=2", "communication.overlap=forward"]), ("bert", ["layout.zero=3"])]


@pytest.mark.parametrize(("model", "changes"), [pytest.param("gpt2", [], marks=pytest.mark.proof), *BESIDE])
def test_training_goes_on_as_if_nothing_had_been(model: str, changes: list[str], ranks: Ranks, tmp_path: Path) -> None:
    job = job_of(tmp_path, *changes, model=model)
    plain = job.model_copy(update={"monitor": job.monitor.model_copy(update={"replica_check_every": None})})
    with_watch, without = (ranks.run(2, watched, one) for one in (job, plain))
    for (found, mine), (nothing, theirs) in zip(with_watch, without, strict=True):
        assert len(found) == STEPS and nothing == [] and same_bits(mine, theirs)


def test_buffers_that_each_rank_changes_are_none_of_it(ranks: Ranks, tmp_path: Path) -> None:
    """The running statistics of a batch norm: another batch on each rank, and the first rank's after each step."""
    model = "model={factory='train.trainable_user_models:WithBatchNorm', arguments={vocab_size=260}}"
    for found, _ in ranks.run(2, watched, job_of(tmp_path, model, FP32)):
        assert [one.violations for one in found] == [(), (), ()]


@pytest.mark.parametrize("on", [None, 1])
def test_a_forward_may_have_other_bits_without_gradients(on: int | None, ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(3, watched, job_of(tmp_path, FP32), "other_without_gradients", on)[0][0]
    loss = [any("has loss" in text for text in one.violations) for one in found]
    assert loss == [False, on is not None, on is not None]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9, 64 * 8, 3 * 64 * 8 + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.bool])
def test_a_digest_is_of_every_bit(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "DIGEST_CHUNK_WORDS", 64)
    tensor = torch.ones(size + 1).to(dtype)[1:]  # at an odd place in memory
    whole = checker.digest_tensors({"t": tensor})["t"]
    assert checker.digest_tensors({"t": tensor.clone()})["t"] == whole
    for place in {0, size // 2, size - 1} if size else ():
        for byte in range(tensor.element_size()):
            other = tensor.clone()
            other.view(torch.uint8)[place * tensor.element_size() + byte] ^= 1
            assert checker.digest_tensors({"t": other})["t"] != whole


def test_a_digest_tells_places_apart() -> None:
    tensor = torch.arange(100.0)
    swapped = tensor[[*range(3), 90, *range(4, 90), 3, *range(91, 100)]]
    assert checker.digest_tensors({"t": tensor}) != checker.digest_tensors({"t": swapped})


WHOLE = "have other parameters or buffers than each other, first in blocks.1.ffn"
UNLIKE = "rank 1 has other parameters or buffers than ranks 0 and 2, first in blocks.1.ffn"
MOMENTS = "other masters or moments than {}, first in (master|exp_avg)/"
LOSS = r"rank {} has loss [\d.]+ in its first micro-batch, and rank {} [\d.]+"
SUMS = "ranks 1 and 3 have other sums of gradients than each other"
Found = tuple[str, int, list[str], str]  # Plant, ranks, overrides, sentence
FOUND: list[Found] = [
    ("parameter_flips", 3, [FP32], UNLIKE),
    ("moment_flips", 4, [FP32, "layout.zero=3", "layout.shard_group=2"], MOMENTS.format("each other")),
    ("other_rows", 3, [FP32], "the 12 rows that ranks have read are not rows 0 to 11, each once"),
    ("other_files", 3, [FP32], "rank 1 reads other data than rank 2 reads for the same rows"),
    ("fewer_targets", 3, [FP32], r"rank 1 counts \d+ targets, and rank 2 \d+ for the same rows"),
    ("other_norm", 3, [FP32], "rank 1 has another gradient norm than ranks 0 and 2"),
    ("other_sums", 4, [FP32, "layout.zero=2", "layout.shard_group=2"], SUMS),
    ("wrong_arithmetic", 3, [FP32], LOSS.format(1, 2)),
    ("wrong_arithmetic", 2, ["layout.zero=3"], LOSS.format(1, 0)),
]
MORE: list[Found] = [
    ("parameter_flips", 2, [], f"ranks 0 and 1 {WHOLE}"),
    ("parameter_flips", 3, [FP32, "layout.zero=2"], UNLIKE),
    ("moment_flips", 3, [FP32], f"rank 1 has {MOMENTS.format('ranks 0 and 2')}"),
    ("moment_flips", 4, [FP32, "layout.zero=1", "layout.shard_group=2"], MOMENTS.format("each other")),
    ("other_rows", 2, ["layout.zero=3"], "rank 1 reads other data than rank 0 reads for the same rows"),
    ("other_sums", 3, [FP32], "rank 1 has other sums of gradients than ranks 0 and 2"),
    ("other_sums", 4, [FP32, "layout.zero=3", "layout.shard_group=2"], SUMS),
    ("wrong_arithmetic", 3, [FP32], LOSS.format(0, 1)),
]


@pytest.mark.parametrize("case", [*FOUND, *(pytest.param(one, marks=pytest.mark.proof) for one in MORE)])
def test_what_is_broken_is_found_and_named(case: Found, ranks: Ranks, tmp_path: Path) -> None:
    plant, world, overrides, sentence = case
    results = ranks.run(world, watched, job_of(tmp_path, *overrides), plant)
    told = [[one.violations for one in found] for found, _ in results]
    assert all(one == told[0] for one in told)  # every rank comes to the same judgement
    assert told[0][0] == ()
    assert any(re.search(sentence, text) for text in told[0][1]), told[0][1]


def broken_run(group: RankGroup, job: Job, folder: Path) -> str:
    """A whole run, whose rank 1 has a bit flipped in the second step. How it ends."""
    right, place = TrainStep.step, RankEnvironment(group.rank, group.world, group.rank, group.world, 0, "")

    def step(stepper: TrainStep, number: int, *given: Any, **named: Any) -> Any:
        if number == 1 and group.rank == 1:
            flipped(next(stepper.engine.module.parameters()), 0)
        return right(stepper, number, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "step", step)
        patch.setattr("motet.train.loop.start_process_group", lambda *_, **__: nullcontext(group))
        try:
            run_rank(job, place, folder, StopFlag())
        except ReplicaMismatchError as error:
            return str(error)
    return ""


def test_a_run_stops_with_a_sentence_or_warns(ranks: Ranks, tmp_path: Path) -> None:
    job = job_of(tmp_path, FP32, "run.steps=4", "checkpoint.every=1", every="monitor.replica_check_every=2")
    stops, warns = tmp_path / "stops", tmp_path / "warns"
    for folder in (stops, warns):
        folder.mkdir()
    told = ranks.run(2, broken_run, job, stops)
    assert told[0] == told[1]
    assert re.match(
        r"stopped at step 2, which is not saved: ranks 0 and 1 have other parameters or buffers than each other, first "
        r"in embedding.weight: the model of a rank has changed by itself .* `motet verify` .* --resume",
        told[0],
    )
    end = read_events(stops / "events.jsonl")[-1]
    assert isinstance(end, RunEnded) and (end.reason, end.message) == ("disagreed", told[0])
    assert [path.name for path in (stops / "checkpoints").iterdir()] == ["step-00000001"]
    warning = job.model_copy(update={"monitor": job.monitor.model_copy(update={"replica_check_action": "warn"})})
    assert ranks.run(2, broken_run, warning, warns) == ["", ""]
    compared = [event for event in read_events(warns / "events.jsonl") if isinstance(event, ReplicaCheckDone)]
    assert [(one.step, bool(one.violations)) for one in compared] == [(2, True), (4, True)]


def test_workers_of_a_parameter_server_are_not_compared(tmp_path: Path) -> None:
    job = job_of(tmp_path, "layout.data=parameter_server")
    with pytest.raises(InputError, match=r"monitor.replica_check_every = 1 compares ranks that take a step together"):
        check_job(job, 2)
