"""While jobs are trained, dropout masks are equal element by element over ranks, micro-batches and recomputation."""

import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from motet.models import layout_invariant_dropout
from motet.models.dropout_mask import apply_mask, draw_mask
from motet.models.user_module import find_blocks
from motet.parallel.process.process_group import RankGroup
from motet.train.build import TrainingComponents, build_components, precision_context
from motet.train.job import Job
from ranks import Ranks
from train import trainable_user_models
from train.runs import same_bits, small_job, train

Site = tuple[int, str]  # Step, and the name of the dropout
Masks = dict[Site, dict[int, Tensor]]  # Of each row
STEPS, ROWS = 2, 8


def train_and_record(
    group: RankGroup, job: Job, change: Callable[[TrainingComponents], None] | None = None
) -> tuple[Masks, list[float], dict[str, Tensor]]:
    """The masks that this rank draws in forwards, the losses, and the parameters afterwards."""
    masks: Masks = {}
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        if change:
            change(parts)
        mode: Any = parts.model.randomness.__self__

        def record(site: str, mask: Tensor, *_: Any) -> None:
            for row, mask_of_row in zip(mode.rows, mask.chunk(len(mode.rows)), strict=True):
                assert row not in masks.setdefault((mode.step, site), {})
                masks[mode.step, site][row] = mask_of_row.clone()

        mode.on_mask, train_step = record, parts.make_train_step(job)
        losses = [train_step.step(step, 0.01).loss for step in range(STEPS)]
        parameters = {name: p.detach().clone() for name, p in parts.model.module.named_parameters()}
    return masks, losses, parameters


def job_of(folder: Path, model: str, *changes: str) -> Job:
    dropout = ["model.dropout=0.1"] if model == "decoder" else []
    return small_job(folder, f"data.batch_sequences={ROWS}", *dropout, *changes, model=model)


def over_ranks(results: list[tuple[Masks, list[float], Any]]) -> Masks:
    merged: Masks = {}
    for masks, *_ in results:
        for site, rows in masks.items():
            assert not merged.setdefault(site, {}).keys() & rows.keys()
            merged[site] |= rows
    return merged


def check_equal(masks: Masks, expected: Masks) -> None:
    assert masks.keys() == expected.keys() and {site[0] for site in masks} == set(range(STEPS))
    for site, rows in masks.items():
        assert rows.keys() == expected[site].keys() == set(range(ROWS))
        assert all(torch.equal(mask, expected[site][row]) for row, mask in rows.items()), site


def _agree(ranks: Ranks, folder: Path, model: str, layouts: list[tuple[int, int]]) -> None:
    expected = over_ranks(ranks.run(1, train_and_record, job_of(folder, model)))
    distinct = {mask.numpy().tobytes() for rows in expected.values() for mask in rows.values()}
    assert len(expected) >= STEPS * 6 and len(distinct) == len(expected) * ROWS
    for dp, microbatches in layouts:
        job = job_of(folder, model, f"layout.microbatches={microbatches}", "layout.zero=1")
        check_equal(over_ranks(ranks.run(dp, train_and_record, job)), expected)


@pytest.mark.parametrize("model", ["decoder", "gpt2"])
def test_masks_are_equal_over_ranks_and_microbatches(ranks: Ranks, tmp_path: Path, model: str) -> None:
    _agree(ranks, tmp_path, model, [(1, 4), (2, 2)])


@pytest.mark.proof
@pytest.mark.parametrize("model", ["decoder", "bert", "t5", "gpt2"])
def test_masks_are_equal_in_every_layout(ranks: Ranks, tmp_path: Path, model: str) -> None:
    _agree(ranks, tmp_path, model, [(dp, microbatches) for dp in (1, 2, 4) for microbatches in (1, 2, 4)][1:-1])


class Recomputed(nn.Module):
    """A block that keeps only its inputs."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.recompute = block, partial(checkpoint, use_reentrant=reentrant)

    def forward(self, *args: Any) -> Any:
        return self.recompute(self.block, *args)


def _recompute_blocks(reentrant: bool, parts: TrainingComponents) -> None:
    for block in find_blocks(parts.model.module):
        for owner in parts.model.module.modules():
            if isinstance(owner, nn.ModuleList):
                for index, item in enumerate(owner):
                    owner[index] = Recomputed(item, reentrant) if item is block else item


@pytest.mark.parametrize(("model", "reentrant"), [("decoder", False), ("decoder", True), ("t5", False)])
def test_recomputed_blocks_have_the_same_masks(
    tmp_path: Path, model: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, single = job_of(tmp_path, model, "layout.microbatches=2"), RankGroup(0, 1, None, torch.device("cpu"))
    drawn: list[Tensor] = []
    masks, losses, parameters = train_and_record(single, job)

    def keep(*given: Any, **more: Any) -> Tensor:
        drawn.append(draw_mask(*given, **more))
        return drawn[-1]

    monkeypatch.setattr(layout_invariant_dropout, "draw_mask", keep)
    recomputed_masks, recomputed_losses, recomputed = train_and_record(
        single, job, partial(_recompute_blocks, reentrant)
    )
    check_equal(recomputed_masks, masks)
    assert recomputed_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(parameters.values(), recomputed.values(), strict=True))
    in_blocks = [rows for (_, site), rows in masks.items() if site.startswith("block")]
    # Of each site two micro-batches draw in the forward, and those of blocks again.
    assert len(drawn) == 2 * (len(masks) + len(in_blocks)) > 2 * len(masks)
    assert len({mask.numpy().tobytes() for mask in drawn}) == 2 * len(masks)


def _train_with_nested_backwards(group: RankGroup, job: Job) -> tuple[int, list[float], dict[str, Tensor]]:
    """The number of threads that draw masks, the losses, and the parameters afterwards."""
    threads = set[int]()

    def draw(*given: Any, **more: Any) -> Tensor:
        threads.add(threading.get_ident())
        return apply_mask(*given, **more)

    def nested(block: nn.Module, x: Tensor, depth: int = 64, **more: Any) -> Any:
        return checkpoint(partial(nested, block, depth=depth - 1), x, use_reentrant=True) if depth else block(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_invariant_dropout, "apply_mask", draw)
        patch.setattr(trainable_user_models, "checkpoint", nested)
        trained = train(group, job, STEPS)
    return len(threads), trained.losses, trained.parameters


def test_a_thread_of_autograd_draws_the_same_masks(ranks: Ranks, tmp_path: Path) -> None:
    """Autograd has threads for a GPU, and for backwards nested 60 deep. A process with them cannot fork."""
    job = small_job(tmp_path, model="recomputed")
    ((threads, losses, parameters),) = ranks.run(1, _train_with_nested_backwards, job)
    expected = train(RankGroup(0, 1, None, torch.device("cpu")), job, STEPS)
    assert threads > 1 and losses == expected.losses and same_bits(parameters, expected.parameters)
