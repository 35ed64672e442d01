"""Bytes that a step sends, exactly, with compression and without, and what it keeps."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pages.control_collectives import control_bytes
from torch import nn

from motet import parallelize
from motet.collectives.shm_backend.transport import rendezvous
from motet.core.token_authentication import TOKEN_VARIABLE
from motet.core.trace import install_sink
from motet.parallel.data_parallel.buckets import Bucket, BucketParameter
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.communication.powersgd_matrices import bucket_reduction_spec
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.model_sharding import ModelInventory
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.memory import ModelStateMemory, model_state_memory
from motet.parallel.step_plan.traffic import sent_bytes_per_step
from motet.precision.recipe import RECIPES
from motet.train.job import Job
from on_ranks import Counter
from parallel.plans import inventory_of_shapes, plan_of
from parallel.traffic_counter import CountedBytes, count_bytes
from ranks import Ranks
from train.runs import small_job

RINGS = ["communication.all_reduce=ring", "communication.reduce_scatter=ring", "communication.all_gather=ring"]
SMALL = ["communication.bucket_mib=0.02", "communication.first_bucket_mib=0.001"]
PARAMETERS = "communication.compress_parameters=int8:block=100"
SLOW = "communication.compress_over=replicas"
BFLOAT16 = "precision.reduce_dtype=bfloat16"
HYBRID = ["layout.shard_group=2", "layout.microbatches=3"]


@pytest.mark.parametrize(
    ("world", "settings", "codec", "recipe"),
    [
        (3, ["layout.zero=0", *SMALL], "int4", "fp64"),
        pytest.param(3, ["layout.zero=0", *SMALL], "topk:keep=0.01", "fp64", marks=pytest.mark.proof),
        (3, ["layout.zero=1", *SMALL, PARAMETERS], "powersgd:rank=2", "bf16"),
        pytest.param(
            3, ["layout.zero=1", *SMALL, PARAMETERS], "randomk:keep=0.1,unbiased=false", "bf16", marks=pytest.mark.proof
        ),
        pytest.param(4, ["layout.zero=2", *SMALL, *HYBRID], "topk:keep=0.01", "bf16", marks=pytest.mark.proof),
        (4, ["layout.zero=3", *HYBRID, SLOW], "powersgd:rank=2", "fp64"),
        pytest.param(4, ["layout.zero=3", PARAMETERS, *HYBRID], "int8", "bf16", marks=pytest.mark.proof),
        (4, ["layout.zero=3", PARAMETERS, "layout.secondary_group=2"], "sign", "fp32"),
        pytest.param(3, ["layout.zero=1", BFLOAT16], "powersgd:rank=2", "fp32", marks=pytest.mark.proof),
        (3, ["layout.zero=2", BFLOAT16], "topk:keep=0.01", "fp32"),
    ],
)
def test_bytes_of_codecs_are_those_that_are_promised(
    ranks: Ranks, tmp_path: Path, world: int, settings: list[str], codec: str, recipe: str
) -> None:
    how = [f"precision.recipe={recipe}", *RINGS, *settings, f"communication.compress_gradients={codec}"]
    for sent, promised, *_ in ranks.run(world, count_bytes, small_job(tmp_path, *how), timeout_s=240):
        assert sent == [promised] * 2 and promised > 0


AHEAD = "communication.overlap=forward"
OWNERS = ["layout.data=parameter_server", "layout.server.transport=collectives", "layout.server.slice_mib=0.02"]
RINGED = ["layout.server.count=3", "layout.server.reduce_algorithm=ring", "layout.server.broadcast_algorithm=flat"]


COUNTED = [
    (2, ["layout.zero=0"], "decoder"),
    (3, ["layout.zero=1"], "decoder"),
    (2, ["layout.zero=2", "layout.microbatches=2"], "decoder"),
    (4, ["layout.zero=2", *HYBRID], "decoder"),
    (4, ["layout.zero=1", "layout.shard_group=2"], "decoder"),
    (3, ["layout.zero=0", AHEAD], "decoder"),
    (2, ["layout.zero=3"], "decoder"),
    (3, ["layout.zero=3", "layout.microbatches=2", "layout.reshard_after_forward=false"], "decoder"),
    (4, ["layout.zero=3", *HYBRID], "decoder"),
    (3, ["layout.zero=3"], "adapters"),
    (2, ["layout.zero=3", "layout.min_shard_numel=100", "layout.microbatches=2"], "decoder"),
    (3, [*OWNERS, "layout.server.count=2"], "decoder"),
    (4, [*OWNERS, *RINGED, "layout.microbatches=2"], "decoder"),
    (1, ["layout.zero=2", "layout.microbatches=2"], "decoder"),
]
SENT_RECIPES = ["fp32", "bf16", "fp32 precision.reduce_dtype=bfloat16"]
MORE_RECIPES = COUNTED[2:9:3]
QUICK = [case for case in COUNTED if case not in (COUNTED[1], COUNTED[4], COUNTED[5], COUNTED[10])]


@pytest.mark.parametrize(
    ("world", "settings", "model", "recipe"),
    [
        pytest.param(
            *case,
            recipe,
            marks=() if case in MORE_RECIPES or (recipe == "fp32" and case in QUICK) else pytest.mark.proof,
        )
        for case in COUNTED
        for recipe in SENT_RECIPES
    ],
)
def test_bytes_sent_and_kept_are_those_that_are_promised(
    ranks: Ranks, tmp_path: Path, world: int, settings: list[str], model: str, recipe: str
) -> None:
    sizes = [] if "layout.zero=3" in settings else ["data.batch_sequences=48", *SMALL]
    how = ["data.batch_sequences=48"] if OWNERS[0] in settings else [*RINGS, *sizes]
    job = small_job(tmp_path, *f"precision.recipe={recipe}".split(), *settings, *how, model=model)
    for sent, promised, kept, formula in ranks.run(world, count_bytes, job):
        assert sent == [promised] * 2 and (promised > 0) == (world > 1)
        assert kept == formula


def test_sums_in_bfloat16_halve_their_bytes(ranks: Ranks, tmp_path: Path) -> None:
    def job(*settings: str) -> Job:
        return small_job(tmp_path, "precision.recipe=bf16", "layout.zero=0", *RINGS, *settings)

    wide, narrow = (ranks.run(2, count_bytes, each)[0] for each in (job(), job(BFLOAT16)))
    assert wide.sent[1] == 2 * narrow.sent[1] == 2 * narrow.promised > 0


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, ["layout.zero=0"]),
        (3, ["layout.zero=0", "precision.recipe=fp64"]),  # one bucket of more than 256 KiB, in uneven chunks
        pytest.param(3, ["layout.zero=0", AHEAD, *SMALL], marks=pytest.mark.proof),
        pytest.param(3, ["layout.zero=1", AHEAD], marks=pytest.mark.proof),
        pytest.param(4, ["layout.zero=1", "layout.shard_group=2", *SMALL], marks=pytest.mark.proof),
        (4, ["layout.zero=2", *HYBRID]),
        (4, ["layout.zero=0", BFLOAT16]),  # between hosts partial sums travel in float32
        (3, ["layout.zero=3", "layout.microbatches=2"]),
        (4, ["layout.zero=3", *HYBRID]),
    ],
)
@pytest.mark.parametrize("per_host", [pytest.param(4, marks=pytest.mark.proof), 2])
def test_bytes_that_the_default_backend_sends_are_those_that_are_promised(
    ranks: Ranks, tmp_path: Path, world: int, settings: list[str], per_host: int
) -> None:
    job = small_job(tmp_path, "data.batch_sequences=48", "precision.recipe=bf16", *settings)
    for sent, promised, *_ in ranks.run(world, count_on_hosts, job, per_host):
        assert sent == [promised] * 3 and promised > 0


def count_on_hosts(group: RankGroup, job: Job, per_host: int) -> CountedBytes:
    hosts = tuple(rank // per_host for rank in range(group.world))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(rendezvous, "host_identity", lambda: f"host {hosts[group.rank]}")
        monkeypatch.setenv(TOKEN_VARIABLE, "of the tests of bytes between hosts")
        return count_bytes(replace(group, process_group=dist.new_group()), job, 3, hosts)


def step_of_a_module_with_buffers(group: RankGroup) -> tuple[float, int]:
    """The second step, of one micro-batch on even ranks and two on odd ranks: bytes sent, and those that are listed."""
    module, hosts = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), (0,) * group.world
    engine, counter = parallelize(module, loss=lambda module, x: module(x).square().mean(), precision="fp32"), Counter()
    batches = [torch.randn(4, 6) for _ in range(1 + group.rank % 2)]
    engine.step(*batches)
    with install_sink(counter):
        engine.step(*batches)
    said = sent_bytes_per_step(
        engine.plan, RECIPES["fp32"], settings=CommunicationSettings(), rank=group.rank, hosts=hosts
    ).total
    listed = [("micro-batches", 0), ("agreement", 1), *(("buffer", buffer.nbytes) for buffer in module.buffers())]
    control = sum(control_bytes(name, numel, rank=group.rank, hosts=hosts) for name, numel in listed)
    return counter.counts["sent_bytes"], said + control


def test_buffers_and_micro_batches_of_a_loop_of_ones_own_are_listed(ranks: Ranks) -> None:
    for sent, listed in ranks.run(3, step_of_a_module_with_buffers):
        assert sent == listed


def test_memory_counts_what_is_owed_and_masters_that_are_apart() -> None:
    buckets, rows = inventory_of_shapes({"w": (1000,), "v": (24,)}), inventory_of_shapes({"w": (10, 3), "v": (7,)})
    on = CommunicationSettings(compress_gradients="int8", compress_parameters="int8")
    off = on.model_copy(update={"error_feedback": False})

    def kept(inventory: ModelInventory, zero: int, recipe: str, how: CommunicationSettings) -> ModelStateMemory:
        plan = plan_of(inventory, DataParallelSharding(4, 1, zero, 2), recipe, how)
        return model_state_memory(plan, RECIPES[recipe], moments_per_parameter=2, rank=0)

    found = kept(buckets, 2, "fp32", on)
    assert (found.parameters, found.masters, found.compression_errors) == (1088 * 4, 544 * 4, (1088 + 544) * 4)
    assert kept(rows, 3, "fp64", on).compression_errors == (5 * 3 + 4) * 8
    assert kept(rows, 3, "fp64", off).compression_errors == 0


def test_the_matrices_of_a_part_are_its_whole_rows() -> None:
    bucket = Bucket(
        (BucketParameter("a", 0, 32, 35), BucketParameter("b", 0, 96, 6), BucketParameter("c", 0, 128, 24)), 32, 128, 4
    )
    shapes = {"a": (5, 7), "b": (6,), "c": (4, 3, 2)}
    whole = bucket_reduction_spec(bucket, bucket.flat_slice, shapes)
    assert whole == (128, ((0, 5, 7), (96, 4, 6)), ((35, 64), (70, 96), (120, 128)))
    parts = [bucket_reduction_spec(bucket, slice(32 + 32 * shard, 64 + 32 * shard), shapes) for shard in range(4)]
    # Of the 35 numbers of "a" the first 32 are in the first part: four whole rows, and four numbers of the fifth.
    assert [part.matrices for part in parts] == [((0, 4, 7),), (), (), ((0, 4, 6),)]
    assert [part.padding for part in parts] == [(), ((3, 32),), ((6, 32),), ((24, 32),)]
