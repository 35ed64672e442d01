"""Modules whose blocks ranks split in a custom loop."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet import parallelize
from motet.core.errors import InputError, MotetError
from motet.parallel.process.process_group import RankGroup
from motet.precision.float64_mode import use_float64
from motet.train.engine import TrainingEngine
from motet.train.pipeline.custom_batches import batch_fingerprint, proof_forwards, sizes_of_batch
from ranks import Ranks
from refusals import refused

WIDTH, WORDS, STEPS, MICROBATCHES = 8, 23, 3, 4


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        output: Tensor = x + self.down(F.gelu(self.up(self.norm(x)))) + source.mean(1, keepdim=True)
        return output


class _Translator(nn.Module):
    """Blocks read a source of another length; the table is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(_Block() for _ in range(4))

    def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
        x, source = self.table(tokens), self.table(source)
        for block in self.blocks:
            x = block(x, source)
        return F.linear(x, self.table.weight)


def batch_of(step: int, row: int, rows: int = 2) -> dict[str, Tensor]:
    """Micro-batches of several lengths."""
    generator = torch.Generator().manual_seed(100 * step + row)
    length = 5 + (step + row) % 3
    tokens, source = (torch.randint(WORDS, (rows, n), generator=generator) for n in (length + 1, length + 4))
    return {"source": source, "tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def loss(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits, targets = module(batch["source"], batch["tokens"]), batch["targets"]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def engine_of(layout: str, **changed: Any) -> TrainingEngine:
    settings: dict[str, Any] = {"loss": loss, "example": batch_of(0, 0), "precision": "fp64"}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # Of the table, which stays whole
        return parallelize(_Translator().double(), layout, optimizer={"learning_rate": 0.01}, **settings | changed)


def steps_of(engine: TrainingEngine, first: int = 0, last: int = STEPS) -> list[tuple[float, float]]:
    """Each step has eight micro-batches, over all data-parallel ranks."""
    done = []
    for step in range(first, last):
        rows = range(engine.data_rank, 2 * MICROBATCHES, engine.data_ranks)
        stats = engine.step(*(batch_of(step, row) for row in rows))
        done.append((stats.loss, stats.grad_norm))
    return done


def train(_: RankGroup, layout: str) -> list[tuple[float, float]]:
    with use_float64():
        return steps_of(engine_of(layout))


ALONE = RankGroup(0, 1, None, torch.device("cpu"))


@pytest.mark.parametrize(
    ("layout", "ranks_needed"),
    [
        ("pp=2 microbatches=8", 2),
        ("pp=2 microbatches=8 chunks=2 schedule=zb-v", 2),
        ("pp=2 dp=2 zero=1 microbatches=4", 4),
        ("pp=2 tp=2 microbatches=8", 4),
    ],
)
def test_steps_of_a_pipeline_are_those_of_one_rank(ranks: Ranks, layout: str, ranks_needed: int) -> None:
    alone = train(ALONE, "")
    for rank_numbers in ranks.run(ranks_needed, train, layout):
        for numbers, expected in zip(rank_numbers, alone, strict=True):
            assert numbers == pytest.approx(expected, rel=1e-12)


def save(_: RankGroup, folder: str) -> None:
    with use_float64():
        engine = engine_of("pp=2 microbatches=8")
        steps_of(engine, last=2)
        engine.save(folder, 2)


def test_a_checkpoint_of_a_pipeline_is_read_by_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save, str(tmp_path))
    with use_float64():
        engine = engine_of("", example=None)
        assert engine.restore(tmp_path) == 2
        assert steps_of(engine, first=2) == [pytest.approx(train(ALONE, "")[2], rel=1e-12)]


def restore(_: RankGroup, folder: str) -> list[tuple[float, float]]:
    with use_float64():
        engine = engine_of("pp=2 microbatches=8 chunks=2")
        return steps_of(engine, first=engine.restore(folder))


def test_a_checkpoint_of_one_rank_is_read_by_a_pipeline(ranks: Ranks, tmp_path: Path) -> None:
    with use_float64():
        engine = engine_of("", example=None)
        steps_of(engine, last=2)
        engine.save(tmp_path, 2)
    for rank_numbers in ranks.run(2, restore, str(tmp_path)):
        assert rank_numbers == [pytest.approx(train(ALONE, "")[2], rel=1e-12)]


def messages(group: RankGroup) -> list[str]:
    """Everything that a user may do wrong, in one process group."""
    found = []
    with use_float64():
        engine = engine_of("pp=2 microbatches=2")
        batch, other = batch_of(0, 0), batch_of(0, 1)
        calls = [
            engine.begin_step,
            lambda: engine.backward(torch.zeros(())),
            lambda: engine.update(0.1, 1.0, 1.0),
            lambda: engine.module(batch["source"], batch["tokens"]),
            lambda: engine.step(batch if group.rank else other, batch),
            lambda: engine.step(*[batch] * (1 + group.rank)),
            lambda: engine.step({"text": "no tensor"}, {"text": "no tensor"}),
        ]
        for call in calls:
            with pytest.raises(InputError) as refusal:
                call()
            found.append(str(refusal.value))
        engine.step(batch, other)  # It works all the same
    return found


def test_what_a_pipeline_cannot_do_is_refused(ranks: Ranks) -> None:
    sentences = [
        "begin_step: ranks of a pipeline hold some of the blocks",
        "backward: ranks of a pipeline hold",
        "update: ranks of a pipeline hold",
        "_Translator is called by itself, but ranks of a pipeline hold some of its blocks",
        "step: ranks that share rows, or the blocks of a module, have different batches; give ranks with the same",
        "step: a rank has 1 micro-batches and another 2; in a pipeline give all ranks as many",
        "a batch of a pipeline is dict, in which no tensor with rows was seen",
    ]
    for found in ranks.run(2, messages):
        for text, sentence in zip(found, sentences, strict=True):
            assert sentence in text


def settings_refused(_: RankGroup) -> list[str]:
    found = []
    for changed in ({"example": None}, {"loss": None}, {"example": batch_of(0, 0, rows=1)}, {"example": [{}]}):
        with use_float64(), pytest.raises(MotetError) as refusal:
            engine_of("pp=2", **changed)
        found.append(str(refusal.value))
    with use_float64(), pytest.raises(MotetError) as refusal:
        engine_of("pp=2 chunks=3")
    return [*found, str(refusal.value)]


def test_settings_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    sentences = [
        "layout.pp = 2 splits layers, rows or blocks, and each split is proven by running the module; give parallelize",
        "layout.pp = 2: the last stage computes the loss; give parallelize a loss=...",
        "layout.pp: example=... has one row",
        "a batch of a pipeline is dict, in which no tensor",
        "layout.pp x layout.chunks = 6 stages, but _Translator has 4 blocks",
    ]
    first_refusals, second_refusals = ranks.run(2, settings_refused)
    for text, sentence in zip(first_refusals, sentences, strict=True):
        assert sentence in text
    assert set(second_refusals) == {"rank 0 refuses the run; see its error"}


def test_the_sizes_of_a_batch_are_those_of_its_tensors() -> None:
    assert sizes_of_batch((torch.zeros(3, 5), {"b": torch.zeros(3, 7, 2), "c": 4})) == {
        "rows": 3,
        "tokens": 5,
        "tokens 1": 7,
    }
    assert sizes_of_batch(torch.zeros(3)) == {"rows": 3}


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.tanh(self.linear(x))


def features(_: RankGroup, layout: str) -> list[float]:
    """Layers of a pipeline that get features in bfloat16."""
    torch.manual_seed(1)
    layers = (_Layer() for _ in range(4))
    model = nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 3))

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(module(batch[0]), batch[1])

    generator = torch.Generator().manual_seed(2)
    batches = [(torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(2)]
    engine = parallelize(model, layout, loss=loss, example=batches[0], precision="bf16")
    return [engine.step(*((x.bfloat16(), y) for x, y in batches)).loss for _ in range(2)]


def test_features_in_another_dtype_and_a_mean_as_the_loss(ranks: Ranks) -> None:
    for losses in ranks.run(2, features, "pp=2 microbatches=2"):
        assert losses == pytest.approx(features(ALONE, ""), rel=1e-2)


def test_examples_are_cut_as_far_as_a_loss_can_be_computed() -> None:
    """Features have a fixed number, tokens do not."""
    layer = nn.Linear(9, 1)
    forwards = proof_forwards(layer, lambda batch: layer(batch).sum(), torch.zeros(4, 9))
    assert [dict(each.sizes) for each in forwards] == [{"rows": 2, "tokens": 9}, {"rows": 1, "tokens": 9}]
    forwards = proof_forwards(layer, lambda batch: batch[0].sum(), (torch.zeros(4, 9), torch.zeros(4)))
    assert [each.sizes["tokens"] for each in forwards] == [7, 5, 6]
    sentence = "fails on the first rows of example=... .RuntimeError: "
    refused(sentence, proof_forwards, layer, lambda x: x.view(-1, 36), torch.zeros(4, 9))


def test_a_fingerprint_sees_values_and_their_order() -> None:
    batch = torch.arange(12).view(3, 4)
    seen = {batch_fingerprint((each,)) for each in (batch, batch + 1, batch.flip(0), batch.flip(1))}
    assert len(seen) == 4 and batch_fingerprint((batch, batch + 1)) != batch_fingerprint((batch + 1, batch))
