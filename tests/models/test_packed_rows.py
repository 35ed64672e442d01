"""Documents packed into one row give the loss of the documents one by one, and padding gives none."""

from dataclasses import replace

import pytest
import torch
from small_models import SIZES as SMALL
from small_models import built
from torch import Tensor

from motet.core.batch import Batch
from motet.models.build import TrainableModel
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings, ModelSettings
from motet.precision.float64_mode import use_float64

SIZES = {**SMALL, "init_std": 0.3}
MODELS: dict[str, ModelSettings] = {
    "rotary": DecoderSettings(**SIZES, kv_heads=2),
    "window": DecoderSettings(**SIZES, sliding_window=3),
    "learned": DecoderSettings(**SIZES, positions="learned", norm="layer", bias=True, gated=False, activation="gelu"),
    "encoder": EncoderSettings(**SIZES),
    "encoder-decoder": EncoderDecoderSettings(**SIZES, relative_buckets=8, relative_distance=6),
}
LENGTHS = (5, 4, 3)


def trained(settings: ModelSettings) -> TrainableModel:
    return built(settings, 3, torch.float64)


def documents_of(seed: int) -> list[Batch]:
    """One row each; every second target counts."""
    torch.manual_seed(seed)
    batches = []
    for length in LENGTHS:
        tokens = torch.randint(30, (1, length))
        weights = torch.arange(length).remainder(2).float().unsqueeze(0)
        source, targets = torch.randint(30, (1, length + 1)), torch.randint(30, (1, length))
        batches.append(Batch(tokens, targets, weights, rows=torch.tensor([0]), source=source))
    return batches


def join(parts: list[Tensor], filling: int = 0) -> Tensor:
    return torch.cat([*parts, parts[0].new_zeros(1, filling)], 1)


def packed(batches: list[Batch], filling: int) -> Batch:
    """One row of all of them, and some positions that belong to none."""
    lengths = [b.tokens.shape[1] for b in batches]
    sources = [b.source for b in batches if b.source is not None]
    positions = torch.cat([torch.arange(n) for n in (*lengths, filling)])
    numbers = torch.cat([torch.full((n,), i) for i, n in enumerate((*lengths, filling))])
    return Batch(
        tokens=join([b.tokens for b in batches], filling),
        targets=join([b.targets for b in batches], filling),
        weights=join([b.weights for b in batches], filling),
        rows=torch.tensor([0]),
        positions=positions.unsqueeze(0),
        documents=numbers.unsqueeze(0),
        source=join(sources),
        source_documents=torch.cat([torch.full((1, s.shape[1]), i) for i, s in enumerate(sources)], 1),
    )


@pytest.mark.parametrize("filling", [0, 3])
@pytest.mark.parametrize("name", list(MODELS))
def test_packed_documents_are_as_the_documents_alone(name: str, filling: int) -> None:
    with use_float64():
        model, batches = trained(MODELS[name]), documents_of(1)
        alone = torch.stack([model.loss_sum(b) for b in batches]).sum()
        together = model.loss_sum(packed(batches, filling))
        assert together.dtype == torch.float64 and abs(alone - together) < 1e-12 * alone
        grads = [torch.autograd.grad(loss, list(model.module.parameters())) for loss in (alone, together)]
        for a, b in zip(*grads, strict=True):
            assert (a - b).norm() <= 1e-12 * max(a.norm(), 1.0)
        # and it is the documents that keep them apart
        joined = replace(packed(batches, filling), documents=None, positions=None, source_documents=None)
        assert abs(model.loss_sum(joined) - alone) > 1e-3


@pytest.mark.parametrize("name", list(MODELS))
def test_loss_is_the_weighted_sum_of_the_logits_cross_entropies(name: str) -> None:
    with use_float64():
        model, batch = trained(MODELS[name]), documents_of(2)[0]
        logits = model.logits(batch)
        assert logits.shape == (1, LENGTHS[0], 30)
        logs = logits.log_softmax(-1).gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
        assert abs(model.loss_sum(batch) + (logs * batch.weights).sum()) < 1e-13


@pytest.mark.parametrize("name", list(MODELS))
def test_a_batch_without_targets_has_loss_and_gradients_of_zero(name: str) -> None:
    model, batch = trained(MODELS[name]), documents_of(2)[0]
    loss = model.loss_sum(replace(batch, weights=torch.zeros_like(batch.weights)))
    loss.backward()
    assert loss == 0 and all(p.grad is None or not p.grad.any() for p in model.module.parameters())


def test_a_class_of_each_row() -> None:
    with use_float64():
        model = trained(EncoderSettings(**SIZES, head="classify", classes=3))
        torch.manual_seed(0)
        tokens, targets = torch.randint(30, (4, 6)), torch.tensor([0, 2, 1, 1])
        batch = Batch(tokens, targets, torch.tensor([1.0, 1.0, 0.0, 1.0]), rows=torch.arange(4))
        logits = model.logits(batch)
        assert logits.shape == (4, 3)
        assert abs(model.loss_sum(batch) + logits.log_softmax(-1)[torch.arange(4), targets][[0, 1, 3]].sum()) < 1e-13
        assert model.module.get_parameter("pooler.weight").shape == (16, 16)
