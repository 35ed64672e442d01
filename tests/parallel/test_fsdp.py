"""Stage 3 computes what one rank computes, and its checkpoints are those of any other stage."""

from pathlib import Path

import pytest

from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context, run_rank
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.state import newest_checkpoint
from ranks import Ranks
from train.runs import Trained, same_bits, saved_tensors, small_job, train, worst_difference

STEPS = 10
HYBRID = ["layout.shard_group=2", "layout.microbatches=3"]
NAMED = [
    "communication.all_gather=ring",
    "communication.reduce_scatter=direct",
    "communication.all_reduce=recursive-doubling",
]
HARD = "model={factory='parallel.sharded_models:Hard'}"
HEAD_ONLY = ["model.tied=false", "model.frozen=['embedding*', 'blocks*', 'norm*']"]


def _worst(
    ranks: Ranks, folder: Path, world: int, layout: list[str], model: str = "decoder", changes: list[str] | None = None
) -> float:
    """The largest difference of any rank to one rank alone."""
    alone = _alone(ranks, folder, model, changes or [])
    job = small_job(folder, *(changes or []), "layout.zero=3", *layout, model=model)
    return max(worst_difference(one, alone) for one in ranks.run(world, train, job, STEPS, timeout_s=240))


def _steps(model: str) -> int | None:
    """All that there are where its samples are fewer."""
    return None if model == "classify" else STEPS


def _alone(ranks: Ranks, folder: Path, model: str, changes: list[str]) -> Trained:
    job = small_job(folder, *changes, model=model)
    alone: Trained = ranks.run(1, train, job, _steps(model), timeout_s=240)[0]
    assert min(alone.norms) > 1e-3
    return alone


CASES = [
    (1, [], "decoder", []),
    (2, ["layout.microbatches=3"], "decoder", []),
    (3, ["layout.reshard_after_forward=false", "layout.microbatches=2"], "decoder", []),
    (4, [*HYBRID, *NAMED, "layout.min_shard_numel=100"], "decoder", []),
    (2, [], "bert", []),
    (2, [], "t5", []),
    (2, [], "gpt2", []),
    (2, [], "adapters", []),
    (2, [], "decoder", HEAD_ONLY),
    (3, ["layout.microbatches=2"], "decoder", [HARD]),
    (4, HYBRID, "decoder", [HARD]),
]


@pytest.mark.parametrize(("world", "layout", "model", "changes"), CASES)
def test_it_computes_what_one_rank_computes(
    ranks: Ranks, tmp_path: Path, world: int, layout: list[str], model: str, changes: list[str]
) -> None:
    worst = _worst(ranks, tmp_path, world, layout, model, changes)
    assert worst < 1e-12


@pytest.mark.proof
@pytest.mark.parametrize("model", ["decoder", "bert", "t5", "classify", "llama", "qwen2", "gpt2", "adapters"])
def test_every_world_and_choice(ranks: Ranks, tmp_path: Path, model: str) -> None:
    alone = _alone(ranks, tmp_path, model, [])
    for world in (1, 2, 3, 4):
        layouts = [[], ["layout.reshard_after_forward=false"]]
        if world == 4:
            layouts += [["layout.shard_group=2"], ["layout.shard_group=2", "layout.reshard_after_forward=false"]]
        for layout in layouts:
            for parts in (1, 2 if world == 3 else 3):
                settings = ["layout.zero=3", *layout, f"layout.microbatches={parts}"]
                job = small_job(tmp_path, *settings, model=model)
                for rank, trained in enumerate(ranks.run(world, train, job, _steps(model), timeout_s=240)):
                    worst = worst_difference(trained, alone)
                    assert worst < 1e-12, f"{model} {world} ranks {settings}, rank {rank}: {worst:.2e}"


def _train(place: RankEnvironment, job: Job, folder: Path) -> int:
    return run_rank(job, place, folder, StopFlag()).completed_steps


def _load_and_save(group: RankGroup, job: Job, found: Path, folder: Path) -> None:
    """Load in another layout, and save into another folder."""
    with precision_context(job):
        state = build_components(job, group, folder).state
        newest = newest_checkpoint(found / "checkpoints")
        assert newest is not None
        step, _ = state.restore(newest)
        state.save(step)


@pytest.mark.parametrize(("model", "recipe"), [("adapters", "bf16"), (HARD, "fp32")])
def test_a_checkpoint_is_that_of_every_layout(ranks: Ranks, tmp_path: Path, model: str, recipe: str) -> None:
    changes = [f"precision.recipe={recipe}", *([model] if "=" in model else [])]

    def job(*layout: str) -> Job:
        return small_job(tmp_path, *changes, *layout, model="decoder" if "=" in model else model)

    cycle: list[tuple[int, list[str]]] = [
        (1, []),
        (3, ["layout.zero=3", "layout.min_shard_numel=100"]),
        (4, ["layout.zero=3", "layout.shard_group=2"]),
        (2, ["layout.zero=2"]),
        (2, ["layout.zero=3", "layout.reshard_after_forward=false"]),
    ]
    ranks.run_places(2, _train, job("layout.zero=3", "run.stop_at=2"), tmp_path / "0", timeout_s=120)
    first = saved_tensors(tmp_path / "0")
    assert any(tensor.count_nonzero() for name, tensor in first.items() if name.startswith("exp_avg_sq/"))
    for number, (world, layout) in enumerate(cycle):
        ranks.run(world, _load_and_save, job(*layout), tmp_path / f"{number}", tmp_path / f"{number + 1}")
        assert same_bits(saved_tensors(tmp_path / f"{number + 1}"), first), (world, layout)
