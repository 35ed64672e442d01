"""Dropout masks follow rows, whoever computes them."""

import pytest
import torch
import torch.nn.functional as F
from small_models import SIZES as SMALL
from small_models import built
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.models.build import TrainableModel
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode, has_dropout
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings, ModelSettings
from motet.precision.float64_mode import use_float64
from refusals import refused

ROWS = torch.tensor([4, 9, 2, 7])
SIZES = {**SMALL, "dropout": 0.3, "init_std": 0.3}


def masks(step: int = 0, rows: Tensor = ROWS, seed: int = 1, sites: int = 2) -> list[Tensor]:
    with LayoutInvariantDropoutMode(seed).for_rows(step, rows):
        return [F.dropout(torch.ones(len(rows), 40, dtype=torch.float64), 0.25) for _ in range(sites)]


def test_a_mask_depends_on_seed_step_site_and_row() -> None:
    first, second = masks()
    assert set(first.unique().tolist()) == {0.0, 1 / 0.75}
    others = [(first, second), (first, masks(step=1)[0]), (first, masks(seed=2)[0]), (first[0], first[1])]
    assert not any(torch.equal(a, b) for a, b in others)
    for whole, halves in zip(masks(), zip(masks(rows=ROWS[:2]), masks(rows=ROWS[2:]), strict=True), strict=True):
        assert torch.equal(whole, torch.cat(halves))


def test_share_of_what_is_dropped() -> None:
    with LayoutInvariantDropoutMode(0).for_rows(0, ROWS):
        kept = F.dropout(torch.ones(4, 10_000), 0.1) > 0
    assert abs(kept.float().mean() - 0.9) < 5 * (0.09 / 40_000) ** 0.5


def test_flattened_rows_and_whole_channels() -> None:
    with LayoutInvariantDropoutMode(1).for_rows(0, ROWS):
        flat = F.dropout(torch.ones(4 * 10, 4, dtype=torch.float64), 0.25)
    assert torch.equal(flat.view(4, 40), masks()[0])
    with LayoutInvariantDropoutMode(1).for_rows(0, ROWS):
        channels = F.dropout2d(torch.ones(4, 20, 3, 3), 0.5)
    assert torch.equal(channels, channels[:, :, :1, :1].expand(4, 20, 3, 3)) and 0 < channels[:, :, 0, 0].mean() < 2


def test_nothing_is_dropped_unasked() -> None:
    x = torch.ones(4, 5)
    with LayoutInvariantDropoutMode(1).for_rows(0, ROWS):
        kept = [F.dropout(x, 0.0), F.dropout(x, 0.5, training=False), torch.dropout(x, 0.5, False)]
        assert all(torch.equal(y, x) for y in (*kept, nn.Dropout(0.5).eval()(x)))


def test_in_place_and_everything() -> None:
    with LayoutInvariantDropoutMode(1).for_rows(0, ROWS):
        x = torch.ones(4, 40, dtype=torch.float64)
        assert nn.Dropout(0.25, inplace=True)(x) is x and torch.equal(x, masks()[0])
        assert not F.dropout(torch.ones(4, 5), 1.0).any()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("hidden", ["nothing", "causal", "mask", "bias"])
def test_attention_in_the_open_is_attention(grouped: bool, hidden: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(4, 4, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 4, 2 if grouped else 4, 6, 8, dtype=torch.float64)
    seen = torch.rand(6, 6) > 0.5
    seen.fill_diagonal_(True)
    mask = {"mask": seen, "bias": torch.randn(6, 6, dtype=torch.float64)}.get(hidden)
    given = {"attn_mask": mask, "is_causal": hidden == "causal", "scale": 0.4, "enable_gqa": grouped}
    expected = F.scaled_dot_product_attention(q, k, v, **given)
    mode = LayoutInvariantDropoutMode(1)
    with mode.for_rows(0, ROWS):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, **given), expected) and mode.dropout_index == 0
        barely = F.scaled_dot_product_attention(q, k, v, dropout_p=1e-12, **given)
        assert mode.dropout_index == 1
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, **given)
    assert (barely - expected).abs().max() < 1e-11 and (dropped - expected).abs().max() > 0.1


def test_what_does_not_follow_rows_is_refused() -> None:
    attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    x = torch.ones(4, 5, 8)
    with LayoutInvariantDropoutMode(1).for_rows(0, ROWS):
        refused(r"no multiple of the 4 rows", F.dropout, torch.ones(5, 3), 0.5)
        refused(r"nn.MultiheadAttention with dropout = 0.1", attention, x, x, x)
        refused(r"alpha dropout", F.alpha_dropout, x, 0.5, training=True)
        attention.eval()(x, x, x)
        nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x)
        assert torch.equal(F.alpha_dropout(x, 0.5, training=False), x)


def test_whether_anything_can_be_dropped() -> None:
    assert has_dropout(nn.Sequential(nn.Dropout(0.1))) and not has_dropout(nn.Sequential(nn.Dropout(0.0)))
    assert has_dropout(nn.Linear(2, 2), {"attention_dropout": 0.1})
    assert has_dropout(nn.Linear(2, 2), {"text_config": {"attention_dropout": 0.1}})
    assert not has_dropout(nn.Linear(2, 2), {"attention_dropout": 0.0, "resid_dropout": None, "size": 4})


# --- whole models ------------------------------------------------------------------------------------
def batch(vocab: int, rows: slice = slice(None)) -> Batch:
    torch.manual_seed(0)
    tokens, targets, source = torch.randint(vocab, (3, 4, 7))
    return Batch(tokens[rows], targets[rows], torch.ones(4, 7)[rows], rows=ROWS[rows], source=source[rows])


def summed_gradients(model: TrainableModel, vocab: int, parts: list[slice]) -> tuple[float, list[Tensor]]:
    model.module.zero_grad()
    total = 0.0
    for part in parts:
        one = batch(vocab, part)
        with model.randomness(3, one.rows):
            loss = model.loss_sum(one)
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in model.module.parameters() if p.grad is not None]


def check_layouts_agree(model: TrainableModel, vocab: int) -> None:
    whole, grads = summed_gradients(model, vocab, [slice(0, 4)])
    assert abs(whole - summed_gradients(model, vocab, [slice(0, 4)])[0]) == 0
    for parts in ([slice(0, 2), slice(2, 4)], [slice(0, 1), slice(1, 4)]):
        total, others = summed_gradients(model, vocab, parts)
        assert abs(total - whole) < 1e-12 * whole
        for a, b in zip(grads, others, strict=True):
            assert (a - b).norm() <= 1e-12 * max(a.norm(), 1.0)
    model.module.eval()
    assert abs(whole - summed_gradients(model, vocab, [slice(0, 4)])[0]) > 1e-3


T5 = EncoderDecoderSettings(**SIZES, relative_buckets=8, relative_distance=6)


@pytest.mark.parametrize("settings", [DecoderSettings(**SIZES, kv_heads=2), EncoderSettings(**SIZES), T5])
def test_our_models_do_not_depend_on_the_split_of_the_batch(settings: ModelSettings) -> None:
    with use_float64():
        check_layouts_agree(built(settings, 1, torch.float64), 30)


def test_models_without_dropout_have_no_mode() -> None:
    with built(DecoderSettings(**SMALL)).randomness(0, ROWS) as entered:
        assert entered is None
