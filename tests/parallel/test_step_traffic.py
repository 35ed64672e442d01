"""Bytes that a step sends, exactly, with compression and without, and what it keeps."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from motet.parallel.data_parallel.buckets import Bucket, BucketParameter, build_buckets
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.communication.powersgd_matrices import bucket_reduction_specs
from motet.parallel.data_parallel.zero import BucketsAndFSDPUnits, FSDPUnit
from motet.parallel.layout import Layout
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.traffic_and_memory import ModelStateMemory, model_state_memory
from motet.precision.recipe import RECIPES
from motet.train.job import Job
from parallel.traffic_counter import count_bytes
from ranks import Ranks
from train.runs import small_job


@contextmanager
def messages_counted(sent: list[int]) -> Iterator[None]:
    """Adds what codecs hand to torch for other ranks: their messages are bytes, and nothing else is."""
    gather, exchange = dist.all_gather, dist.all_to_all_single

    def all_gather(arrived: list[Tensor], message: Tensor, **how: Any) -> Any:
        sent[0] += (len(arrived) - 1) * message.nbytes if message.dtype == torch.uint8 else 0
        return gather(arrived, message, **how)

    def all_to_all_single(arrived: Tensor, messages: Tensor, **how: Any) -> Any:
        sent[0] += (len(messages) - 1) * messages[0].nbytes if messages.dtype == torch.uint8 else 0
        return exchange(arrived, messages, **how)

    with patch.object(dist, "all_gather", all_gather), patch.object(dist, "all_to_all_single", all_to_all_single):
        yield


def bytes_of_job(group: RankGroup, job: Job) -> tuple[int, int]:
    """Sent in two steps, and promised."""
    messages = [0]
    with messages_counted(messages):
        programs, promised, *_ = count_bytes(group, job)
    return programs + messages[0], promised


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
        (3, ["layout.zero=0", *SMALL], "topk:keep=0.01", "fp64"),
        (3, ["layout.zero=1", *SMALL, PARAMETERS], "powersgd:rank=2", "bf16"),
        (3, ["layout.zero=1", *SMALL, PARAMETERS], "randomk:keep=0.1,unbiased=false", "bf16"),
        (4, ["layout.zero=2", *SMALL, *HYBRID], "topk:keep=0.01", "bf16"),
        (4, ["layout.zero=3", *HYBRID, SLOW], "powersgd:rank=2", "fp64"),
        (4, ["layout.zero=3", PARAMETERS, *HYBRID], "int8", "bf16"),
        (4, ["layout.zero=3", PARAMETERS, "layout.secondary_group=2"], "sign", "fp32"),
        (3, ["layout.zero=1", BFLOAT16], "powersgd:rank=2", "fp32"),
        (3, ["layout.zero=2", BFLOAT16], "topk:keep=0.01", "fp32"),
    ],
)
def test_bytes_of_codecs_are_those_that_are_promised(
    ranks: Ranks, tmp_path: Path, world: int, settings: list[str], codec: str, recipe: str
) -> None:
    how = [f"precision.recipe={recipe}", *RINGS, *settings, f"communication.compress_gradients={codec}"]
    for sent, promised in ranks.run(world, bytes_of_job, small_job(tmp_path, *how), timeout_s=240):
        assert sent == promised > 0


AHEAD = "communication.overlap=forward"


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp32 precision.reduce_dtype=bfloat16"])
@pytest.mark.parametrize(
    ("world", "settings", "model"),
    [
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
    ],
)
def test_bytes_sent_and_kept_are_those_that_are_promised(
    ranks: Ranks, tmp_path: Path, world: int, settings: list[str], model: str, recipe: str
) -> None:
    sizes = [] if "layout.zero=3" in settings else ["data.batch_sequences=48", *SMALL]
    job = small_job(tmp_path, *f"precision.recipe={recipe}".split(), *settings, *RINGS, *sizes, model=model)
    for sent, promised, kept, formula in ranks.run(world, count_bytes, job):
        assert sent == promised > 0
        assert kept == formula


def test_sums_in_bfloat16_halve_their_bytes(ranks: Ranks, tmp_path: Path) -> None:
    def job(*settings: str) -> Job:
        return small_job(tmp_path, "precision.recipe=bf16", "layout.zero=0", *RINGS, *settings)

    (wide, _), (narrow, promised) = (ranks.run(2, bytes_of_job, each)[0] for each in (job(), job(BFLOAT16)))
    assert wide == 2 * narrow == 2 * promised > 0


def test_memory_counts_what_is_owed_and_masters_that_are_apart() -> None:
    portions = BucketsAndFSDPUnits(build_buckets({"w": (0, 1000), "v": (0, 24)}, 2, 1024))
    rows = BucketsAndFSDPUnits(units=(FSDPUnit(((10, 3), (7,))),))
    on = CommunicationSettings(compress_gradients="int8", compress_parameters="int8")
    off = on.model_copy(update={"error_feedback": False})

    def kept(units: BucketsAndFSDPUnits, zero: int, recipe: str, how: CommunicationSettings) -> ModelStateMemory:
        layout = Layout(4, 1, zero, 2)
        return model_state_memory(units, layout, RECIPES[recipe], moments_per_parameter=2, rank=0, settings=how)

    found = kept(portions, 2, "fp32", on)
    assert (found.parameters, found.masters, found.compression_errors) == (1088 * 4, 544 * 4, (1088 + 544) * 4)
    assert kept(rows, 3, "fp64", on).compression_errors == (5 * 3 + 4) * 8
    assert kept(rows, 3, "fp64", off).compression_errors == 0


def test_the_matrices_of_a_part_are_its_whole_rows() -> None:
    bucket = Bucket(
        (BucketParameter("a", 0, 32, 35), BucketParameter("b", 0, 96, 6), BucketParameter("c", 0, 128, 24)), 32, 128, 4
    )
    shapes = {"a": (5, 7), "b": (6,), "c": (4, 3, 2)}
    (whole,) = bucket_reduction_specs([bucket], None, shapes, dtype="float32").buffers
    assert whole == (128, ((0, 5, 7), (96, 4, 6)), ((35, 64), (70, 96), (120, 128)))
    parts = [bucket_reduction_specs([bucket], shard, shapes, dtype="float32").buffers[0] for shard in range(4)]
    # Of the 35 numbers of "a" the first 32 are in the first part: four whole rows, and four numbers of the fifth.
    assert [part.matrices for part in parts] == [((0, 4, 7),), (), (), ((0, 4, 6),)]
    assert [part.padding for part in parts] == [(), ((3, 32),), ((6, 32),), ((24, 32),)]
