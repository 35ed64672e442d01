"""Tree sums send and keep what traffic_and_memory.py says, to the byte."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from motet.parallel.process.process_group import RankGroup
from motet.parallel.reproducible import tree_reduce
from motet.parallel.step_plan.traffic_and_memory import sent_bytes_per_step
from motet.precision.recipe import RECIPES
from motet.train.build import build_components
from motet.train.job import Job
from parallel.traffic_counter import count_bytes
from ranks import Ranks
from train.runs import small_job


@pytest.mark.parametrize(
    ("world", "batch", "layout"),
    [(2, 8, "zero=0"), (3, 10, "zero=0"), (3, 10, "zero=1"), (4, 10, "zero=2 shard_group=2"), (3, 7, "zero=3")],
)
def test_bytes(ranks: Ranks, tmp_path: Path, world: int, batch: int, layout: str) -> None:
    settings = [f"layout.{setting}" for setting in layout.split()]
    same = ["run.reproducible=layout", "communication.all_gather=ring", f"data.batch_sequences={batch}"]
    job = small_job(tmp_path, *same, *settings, "precision.recipe=fp32")
    for sent, said, programs, whole, kept, said_kept in ranks.run(world, _count, job, str(tmp_path)):
        assert sent == said > 0 and programs + sent == whole and kept == said_kept


def _count(group: RankGroup, job: Job, folder: str) -> tuple[int, ...]:
    """Measured and predicted bytes of two steps: of the sums, of all Programs, and of the memory kept."""
    given = [0]
    with pytest.MonkeyPatch.context() as inside:
        for name, is_cut in (("all_to_all", True), ("all_gather", False)):
            inside.setattr(tree_reduce, name, _counting(getattr(tree_reduce, name), given, is_cut))
        programs, whole, kept, said_kept = count_bytes(group, job)
    parts = build_components(job, group, Path(folder))
    units, recipe = parts.engine.optimizer.sharded_parameters.comm_units, RECIPES["fp32"]
    said = sent_bytes_per_step(units, parts.layout, recipe, settings=job.communication, rank=group.rank)
    return given[0], 2 * (said.reduce_scatter + said.all_reduce), programs, whole, kept, said_kept


def _counting(collective: Callable[..., Any], given: list[int], is_cut: bool) -> Callable[..., Any]:
    """Count the bytes of a collective: a rank keeps its part of a scattered tensor, and sends a gathered one."""

    def call(output: Any, input: Any, ranks: RankGroup, *args: Any, **kwargs: Any) -> Any:
        given[0] += input.nbytes * (ranks.world - 1) // (ranks.world if is_cut else 1)
        return collective(output, input, ranks, *args, **kwargs)

    return call
