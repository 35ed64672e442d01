"""A bit that flips in one copy of a tensor, other rows, and another norm are found in every layout, and named."""

from pathlib import Path

import pytest

from motet.parallel.process.process_group import RankGroup
from motet.train.job import Job
from ranks import Ranks
from train.replica_faults import FP32, flip_of, job_of, other_norm, other_rows, watched

TABLES = "model={factory='train.trainable_user_models:WithTables'}"
STAGE_3 = ["layout.zero=3", "layout.min_shard_numel=100"]
# Layout -> the rank with the fault, and settings. The ranks of "tp=2 dp=2" are (dp, tp) = 00, 01, 10, 11.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp": (1, ["layout.tp=2", "layout.dp=2", FP32]),
    "tp, stage 3": (1, ["layout.tp=2", "layout.dp=2", *STAGE_3, FP32]),
    "hybrid": (1, ["layout.zero=1", "layout.shard_group=2", "precision.recipe=bf16"]),
    "hybrid, stage 3": (1, [*STAGE_3, "layout.shard_group=2", FP32]),
    "secondary copies": (1, [*STAGE_3, "layout.secondary_group=2", FP32]),
    "local SGD": (1, ["outer.every=2", "layout.zero=2", "layout.shard_group=2", FP32]),
}
COPIES: dict[str, dict[str, tuple[int, ...]]] = {
    # Of the faulty rank's tensors: a small parameter, a master (a large one), a frozen weight, buffers.
    "tp": {"norm.weight": (0, 1, 2, 3), "table.weight": (0, 1, 2, 3), "mix.weight": (0, 1, 2, 3), "buffers": (1, 3)},
    "tp, stage 3": {"norm.weight": (0, 1, 2, 3), "table.weight": (0, 1), "mix.weight": (0, 1), "buffers": (1, 3)},
    "hybrid": {
        "norm.weight": (0, 1, 2, 3), "table.weight": (1, 3), "mix.weight": (0, 1, 2, 3), "buffers": (0, 1, 2, 3)
    },
    "hybrid, stage 3": {
        "norm.weight": (0, 1, 2, 3), "table.weight": (1, 3), "mix.weight": (1, 3), "buffers": (0, 1, 2, 3)
    },
    "secondary copies": {
        "norm.weight": (0, 1, 2, 3), "table.weight": (1,), "mix.weight": (1,), "buffers": (0, 1, 2, 3)
    },
    "local SGD": {"norm.weight": (0, 1), "table.weight": (1,), "mix.weight": (0, 1), "buffers": (0, 1)},
}  # fmt: skip
SAME_ROWS = {"tp": (0, 1), "tp, stage 3": (0, 1)}


def unlike(ranks: tuple[int, ...], rank: int, difference: str) -> str:
    """The clause about a rank whose copy is unlike those of the other ranks; of two nobody knows which is right."""
    others = [str(each) for each in ranks if each != rank]
    if len(others) == 1:
        return f"ranks {min(ranks)} and {max(ranks)} have {difference} than each other"
    return f"rank {rank} has {difference} than ranks {', '.join(others[:-1])} and {others[-1]}"


FLIPS = ("norm.weight", "mix.weight", "master/table.weight", "exp_avg_sq/table.weight", "scale", "shift")


def faults_in_turn(group: RankGroup, job: Job, on: int) -> dict[str, list[tuple[str, ...]]]:
    """The violations of three steps, by the fault that one rank has in the second."""
    plants = {**{name: flip_of(name) for name in FLIPS}, "other_rows": other_rows, "other_norm": other_norm}
    return {name: [each.violations for each in watched(group, job, plant, on)[0]] for name, plant in plants.items()}


QUICK = ("tp, stage 3",)


@pytest.mark.parametrize("layout", [n if n in QUICK else pytest.param(n, marks=pytest.mark.proof) for n in LAYOUTS])
def test_a_fault_is_found_in_every_layout(layout: str, ranks: Ranks, tmp_path: Path) -> None:
    rank, overrides = LAYOUTS[layout]
    results = ranks.run(4, faults_in_turn, job_of(tmp_path, TABLES, *overrides), rank)
    replica = [0, 1] if layout == "local SGD" else [0, 1, 2, 3]
    for name, (before, found, _) in results[rank].items():
        assert before == () and all(results[other][name][1] == found for other in replica), name
        tensor, difference = (
            name.rpartition("/")[2],
            f"other {'masters or moments' if '/' in name else 'parameters or buffers'}",
        )
        if name == "other_norm":
            wanted = unlike(tuple(replica), rank, "another gradient norm")
        elif name == "other_rows" and layout in SAME_ROWS:
            wanted = unlike(SAME_ROWS[layout], rank, "read other rows")
        elif name == "other_rows":
            wanted = "rows that ranks have read are not rows 0 to"
        elif len(copies := COPIES[layout].get(tensor, COPIES[layout]["buffers"])) > 1:
            wanted = f"{unlike(copies, rank, difference)}, first in {name}:"
        else:  # Nobody else has it
            continue
        assert any(wanted in text for text in found), (name, wanted, found)
