"""`run.reproducible = "layout"`: losses, norms and parameters have the same bits in every layout."""

from pathlib import Path

import pytest
import torch

from motet.monitor.events import EvaluationDone, Event, StepDone, WarningIssued, read_events
from motet.train.job import Job
from ranks import RankFailureError, Ranks
from train.runs import Trained, run_job, same_bits, saved_tensors, small_job, train

STEPS = 4
NOISY = "model={factory='train.trainable_user_models:Noisy', vocab_size=260}"
"""Draws by itself, which follows its sequence."""
Layouts = list[tuple[int, str]]
FP16 = "fp16 precision.loss_scale_initial=8192 precision.loss_scale_growth_steps=2"
"""Two of four steps overflow."""
CASES = [  # model, recipe, batch, (ranks, settings of the layout)
    ("decoder", "bf16 precision.reduce_dtype=float64", 10, [(3, "zero=1"), (4, "zero=3 shard_group=2")]),
    ("decoder", "fp32", 9, [(4, "zero=1 shard_group=2"), (4, "zero=2 shard_group=2"), (4, "zero=3 shard_group=2")]),
    ("gpt2", "fp32", 7, [(3, "zero=2"), (4, "zero=3 secondary_group=2 min_shard_numel=100")]),
    ("classify", "fp32", 5, [(2, "zero=0")]),
]
MORE_CASES = [
    ("decoder", "fp32 precision.reduce_dtype=bfloat16", 10, [(3, "zero=0"), (4, "zero=2"), (3, "zero=3")]),
    ("decoder", "fp32", 10, [(2, "zero=0"), (3, "zero=1"), (4, "zero=2"), (3, "zero=3")]),
    ("decoder", "bf16", 10, [(3, "zero=0"), (4, "zero=3")]),
    ("decoder", FP16, 10, [(3, "zero=2")]),
    (NOISY, "fp32", 5, [(2, "zero=1"), (3, "zero=2")]),
]


def job_of(folder: Path, layout: str, *changes: str, model: str = "decoder") -> Job:
    """`layout`: as in "zero=2 shard_group=2". Several buckets, so that their sums overlap."""
    cut = [] if "zero=3" in layout else ["communication.bucket_mib=0.02", "communication.first_bucket_mib=0.01"]
    settings = [f"layout.{setting}" for setting in layout.split()]
    model, changes = ("decoder", (*changes, model)) if "factory" in model else (model, changes)
    return small_job(folder, "run.reproducible=layout", *settings, *cut, *changes, model=model)


def unlike(a: Trained, b: Trained) -> list[str]:
    """Gradients that are summed in another dtype than the masters' are scaled only in the copy of the optimizer."""
    numbers = [name for name in ("losses", "norms") if getattr(a, name) != getattr(b, name)]
    summed = {n: g for n, g in a.gradients.items() if g.dtype == b.gradients[n].dtype == a.masters[n].dtype}
    kinds = (a.masters, b.masters), (summed, b.gradients)
    return numbers + [name for x, y in kinds for name in x if not torch.equal(_bits(x[name]), _bits(y[name]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("model", "recipe", "batch", "layouts"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.proof) for case in MORE_CASES)],
)
def test_every_layout_has_the_same_bits(
    ranks: Ranks, tmp_path: Path, model: str, recipe: str, batch: int, layouts: Layouts
) -> None:
    changes = [*f"precision.recipe={recipe}".split(), f"data.batch_sequences={batch}"]
    _agree(ranks, tmp_path, STEPS, changes, layouts, model)


def test_so_they_have_with_other_overlaps_and_on_gloo(ranks: Ranks, tmp_path: Path) -> None:
    changes = ["precision.recipe=fp32", "data.batch_sequences=5"]
    layouts = [(2, "zero=0"), (2, "zero=2")]
    _agree(ranks, tmp_path, STEPS, [*changes, "communication.overlap=none"], layouts, "decoder")
    _agree(ranks, tmp_path, STEPS, [*changes, "communication.overlap=forward"], [(3, "zero=1")], "decoder")
    _agree(ranks.on("gloo"), tmp_path, STEPS, changes, [(2, "zero=0"), (3, "zero=3")], "decoder")


@pytest.mark.proof
def test_fp16_has_the_same_bits_in_all_stages(ranks: Ranks, tmp_path: Path) -> None:
    layouts = [(2, "zero=0"), (3, "zero=1"), (4, "zero=2 shard_group=2"), (2, "zero=3"), (4, "zero=3 shard_group=2")]
    changes = [*f"precision.recipe={FP16}".split(), "data.batch_sequences=10"]
    _agree(ranks, tmp_path, STEPS, changes, layouts, "decoder")


@pytest.mark.proof
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize("batch", [12, 10])
def test_all_stages_on_one_to_four_ranks_are_alike(ranks: Ranks, tmp_path: Path, recipe: str, batch: int) -> None:
    layouts = [(dp, f"zero={zero}") for dp in (1, 2, 3, 4) for zero in (0, 1, 2, 3)]
    _agree(ranks, tmp_path, 50, [f"precision.recipe={recipe}", f"data.batch_sequences={batch}"], layouts, "decoder")


@pytest.mark.proof
@pytest.mark.parametrize("model", ["llama", "qwen2", "gpt2", "adapters", "bert", "t5", "classify"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_other_models_have_the_same_bits(ranks: Ranks, tmp_path: Path, model: str, recipe: str) -> None:
    layouts = [(2, "zero=2"), (3, "zero=0"), (4, "zero=3"), (4, "zero=3 shard_group=2")]
    _agree(ranks, tmp_path, 10, [f"precision.recipe={recipe}", "data.batch_sequences=10"], layouts, model)


@pytest.mark.proof
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_larger_products_of_matrices_have_the_same_bits(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    """Libraries split the inner dimension of large products, and choose how by the shape."""
    shape = "vocab_size=1000, context=128, layers=2, hidden=256, heads=8, kv_heads=4, ffn_hidden=688"
    wide = [f"model={{family='decoder', {shape}}}", "data.sequence_length=128", "data.batch_sequences=5"]
    layouts = [(2, "zero=0"), (3, "zero=1"), (2, "zero=2"), (3, "zero=3")]
    _agree(ranks, tmp_path, 4, [*wide, f"precision.recipe={recipe}"], layouts, "decoder")


def _agree(ranks: Ranks, folder: Path, steps: int, changes: list[str], layouts: Layouts, model: str) -> None:
    (one,) = ranks.run(1, train, job_of(folder, "zero=0", *changes, model=model), steps, timeout_s=300)
    assert len(set(one.losses)) == steps
    for dp, layout in layouts:
        for trained in ranks.run(dp, train, job_of(folder, layout, *changes, model=model), steps, timeout_s=300):
            assert not unlike(trained, one), (dp, layout, unlike(trained, one)[:5])


def test_a_run_goes_on_with_the_same_bits_in_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    changes = ["precision.recipe=bf16", "data.batch_sequences=10", "run.steps=8", "monitor.evaluate_every=4"]
    ranks.run_places(1, run_job, job_of(tmp_path, "zero=0", *changes), tmp_path / "whole", timeout_s=120)
    first = job_of(tmp_path, "zero=2", *changes, "run.stop_at=4")
    assert ranks.run_places(2, run_job, first, tmp_path / "run", timeout_s=120) == [4, 4]
    then = job_of(tmp_path, "zero=3", *changes)
    assert ranks.run_places(3, run_job, then, tmp_path / "run", timeout_s=120) == [8] * 3
    assert same_bits(saved_tensors(tmp_path / "run"), saved_tensors(tmp_path / "whole"))
    told, whole = (read_events(tmp_path / run / "events.jsonl") for run in ("run", "whole"))
    assert _curves(told) == _curves(whole) and len(_curves(whole)) == 8 + 3
    assert not [event for event in told if isinstance(event, WarningIssued) and "bit for bit" in event.text]


def _curves(events: list[Event]) -> list[tuple[int, float, float | None]]:
    steps = [(e.step, e.loss, e.grad_norm) for e in events if isinstance(e, StepDone)]
    return steps + [(e.step, e.loss, None) for e in events if isinstance(e, EvaluationDone)]


def test_a_checkpoint_of_a_run_that_was_not_is_told_apart(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run_places(1, run_job, small_job(tmp_path, "run.steps=4", "run.stop_at=2"), tmp_path / "run", timeout_s=120)
    ranks.run_places(1, run_job, job_of(tmp_path, "zero=0", "run.steps=4"), tmp_path / "run", timeout_s=120)
    assert "made with reproducible = None, this run has layout" in (tmp_path / "run/events.jsonl").read_text()


def test_a_block_that_is_used_twice_is_refused_at_stage_3(ranks: Ranks, tmp_path: Path) -> None:
    model = "model={factory='parallel.sharded_models:Hard', vocab_size=260}"
    changes = [model, "precision.recipe=fp32", "data.batch_sequences=6"]
    _agree(ranks, tmp_path, 2, changes, [(2, "zero=2")], "decoder")
    with pytest.raises(RankFailureError, match=r"used twice in one forward.*use layout.zero = 2"):
        ranks.run(2, train, job_of(tmp_path, "zero=3", *changes), 2)


def test_running_statistics_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    model = "model={factory='train.trainable_user_models:WithBatchNorm', arguments={vocab_size=260}, vocab_size=260}"
    with pytest.raises(RankFailureError, match=r"training changes the buffer 'norm\.running_mean'"):
        ranks.run(2, train, job_of(tmp_path, "zero=0", model, "precision.recipe=fp32"), 2)


def test_without_it_other_bits_are_noticed(ranks: Ranks, tmp_path: Path) -> None:
    usual = [small_job(tmp_path, "precision.recipe=fp32") for _ in range(2)]
    one, two = (ranks.run(dp, train, job, STEPS)[0] for dp, job in zip((1, 2), usual, strict=True))
    assert set(unlike(one, two)) >= {"norms", *one.masters}
