"""Dropout masks follow rows, whoever computes them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import SIZES as SMALL
from small_models import built
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from motet.core.batch import Batch
from motet.models import layout_invariant_dropout
from motet.models.build import TrainableModel
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode, Spans, draw_mask, has_dropout, row_split
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
    seen[2] = False  # A query that sees no key, such as padding
    mask = {"mask": seen, "bias": torch.randn(6, 6, dtype=torch.float64)}.get(hidden)
    given = {"attn_mask": mask, "is_causal": hidden == "causal", "scale": 0.4, "enable_gqa": grouped}
    expected = F.scaled_dot_product_attention(q, k, v, **given)
    mode, sites = LayoutInvariantDropoutMode(1), list[str]()
    with mode.for_rows(0, ROWS):
        mode.on_mask = lambda site, *_: sites.append(site)
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, **given), expected) and not sites
        barely = F.scaled_dot_product_attention(q, k, v, dropout_p=1e-12, **given)
        assert len(sites) == 1
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, **given)
    assert (barely - expected).abs().max() < 1e-11 and (dropped - expected).abs().max() > 0.1


def test_what_does_not_follow_rows_is_refused() -> None:
    attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    x = torch.ones(4, 5, 8)
    with LayoutInvariantDropoutMode(1).for_rows(0, ROWS):
        refused(r"not a multiple of the 4 rows", F.dropout, torch.ones(5, 3), 0.5)
        refused(r"nn.MultiheadAttention with dropout = 0.1", attention, x, x, x)
        refused(r"alpha dropout", F.alpha_dropout, x, 0.5, training=True)
        attention.eval()(x, x, x)
        nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x)
        assert torch.equal(F.alpha_dropout(x, 0.5, training=False), x)


# --- the site of a dropout ---------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(self.dropout(x))))


class Stack(nn.Module):
    """Blocks in this order, each called by `call`, and dropouts before, between and after them."""

    def __init__(
        self, order: tuple[int, ...] = (0, 1), call: Callable[[nn.Module, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.blocks, self.order, self.dropout = nn.ModuleList([Block(), Block()]), order, nn.Dropout(0.4)
        self.call = call or (lambda block, x: block(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        for index in self.order:
            x = self.dropout(self.call(self.blocks[index], x))
        return x


X = torch.linspace(-1, 1, 4 * 5 * 6, dtype=torch.float64).view(4, 5, 6)


def recorded(
    stack: nn.Module,
    call: Callable[[Tensor], Tensor] | None = None,
    x: Tensor = X,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The masks of a forward, and the output with the gradients of all parameters."""
    torch.manual_seed(0)
    for parameter in stack.double().parameters():
        nn.init.normal_(parameter)
    mode, masks = LayoutInvariantDropoutMode(1, stack), dict[str, Tensor]()

    def record(site: str, mask: Tensor, *_: Any) -> None:
        assert site not in masks
        masks[site] = mask

    with mode.for_rows(3, ROWS):
        mode.on_mask = record
        out = (call or stack)(x)
        backward(out.square().sum())
        assert len(mode._places) == 1
    return masks, [out, *(parameter.grad for parameter in stack.parameters() if parameter.grad is not None)]


def test_masks_are_named_by_block_and_number() -> None:
    names = [f"{place} dropout {n}" for place in ("block 0", "block 1") for n in (1, 2)]
    outside = [f"{place} dropout 1" for place in ("before the blocks", "after block 0", "after block 1")]
    masks, _ = recorded(Stack())
    assert sorted(masks) == sorted([*names, *outside])
    assert len({tuple(mask.flatten().tolist()) for mask in masks.values()}) == 7


def test_a_rank_with_some_blocks_draws_their_masks() -> None:
    stack = Stack()
    whole, _ = recorded(stack)
    alone, _ = recorded(stack, lambda x: stack.blocks[1](x))
    assert len(alone) == 2 and all(torch.equal(mask, whole[site]) for site, mask in alone.items())
    later, _ = recorded(stack, lambda x: stack.dropout(stack.blocks[1](x)))
    assert torch.equal(later["after block 1 dropout 1"], whole["after block 1 dropout 1"])


def test_each_call_of_a_block_has_another_mask() -> None:
    masks, _ = recorded(Stack(order=(0, 1, 0, 0)))
    calls = [masks[f"{name} dropout 1"] for name in ("block 0", "block 0 (call 2)", "block 0 (call 3)")]
    assert len(masks) == 13 and not torch.equal(calls[0], calls[1]) and not torch.equal(calls[1], calls[2])
    again, _ = recorded(Stack(order=(0, 1, 0, 0)))
    assert all(torch.equal(mask, again[site]) for site, mask in masks.items())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("in_one", [False, True])
def test_a_recomputed_block_draws_its_masks_again(
    reentrant: bool, in_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Tensor] = []

    def keep(*given: Any, **more: Any) -> Tensor:
        drawn.append(draw_mask(*given, **more))
        return drawn[-1]

    monkeypatch.setattr(layout_invariant_dropout, "draw_mask", keep)
    recompute = partial(checkpoint, use_reentrant=reentrant)
    x = X.clone().requires_grad_()
    plain = Stack((0, 1)) if not in_one else nn.Sequential(Block(), Block())
    masks, expected = recorded(plain, x=x)
    count, drawn[:] = len(drawn), []
    if in_one:
        again, found = recorded(plain, lambda x: recompute(plain, x), x=x)
    else:
        again, found = recorded(Stack((0, 1), recompute), x=x)
    assert all(map(torch.equal, expected, found)) and all(torch.equal(masks[site], again[site]) for site in masks)
    forward, backward = drawn[:count], drawn[count:]
    assert len(backward) == 4 and all(any(torch.equal(a, b) for b in forward) for a in backward)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_that_cannot_be_followed_is_refused(reentrant: bool) -> None:
    recompute, x = partial(checkpoint, use_reentrant=reentrant), X.clone().requires_grad_()
    refused(
        r"of a block that was called 2 times in the forward is recomputed", recorded, Stack((0, 1, 0), recompute), x=x
    )
    stack = Stack()
    refused(r"recomputed in backward outside of the model's", recorded, stack, lambda x: recompute(stack, x), x=x)
    stack.call = lambda block, x: recompute(block.forward, x)
    refused(r"or with a part of a block", recorded, stack, x=x)


class PartsRecomputed(nn.Module):
    """Functional dropouts, in a part of a block or after the blocks, which `call` computes."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks, self.linear, self.call = nn.ModuleList([nn.Linear(6, 6)]), nn.Linear(6, 6), call
        self.blocks[0].forward = lambda x: call(self.drop, x)

    def drop(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), 0.3)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_functional_dropouts_that_are_recomputed_are_refused_or_the_same(reentrant: bool) -> None:
    recompute, x = partial(checkpoint, use_reentrant=reentrant), X.clone().requires_grad_()
    text = r"recomputed in backward outside of the model's blocks or with a part of a block"
    refused(text, recorded, part := PartsRecomputed(recompute), x=x)
    refused(text, recorded, part, lambda x: recompute(part.drop, x), x=x)
    # Reentrant recomputation runs a backward inside of the backward.
    refused(text, recorded, part, lambda x: checkpoint(lambda x: part.blocks[0](x), x, use_reentrant=True), x=x)
    _, expected = recorded(part := PartsRecomputed(lambda compute, x: compute(x)), x=x)
    _, found = recorded(part, lambda x: recompute(part.blocks[0], x), x=x)
    assert all(map(torch.equal, expected, found))


def test_backward_has_all_options() -> None:
    mode, x = LayoutInvariantDropoutMode(1), torch.randn(4, 3, requires_grad=True)
    weight = torch.ones(3, requires_grad=True)
    with mode.for_rows(0, ROWS):
        y = F.dropout(x * weight, 0.4)
        y.backward(2 * torch.ones_like(y), retain_graph=True, inputs=[x])
        assert weight.grad is None and torch.equal(x.grad, torch.where(y == 0, 0.0, 2 / 0.6))
        torch.autograd.backward([y.sum(), y.sum()], inputs=weight)
        assert torch.allclose(weight.grad, 2 * y.sum(0)) and torch.equal(x.grad, torch.where(y == 0, 0.0, 2 / 0.6))


def test_no_hook_is_left() -> None:
    stack = Stack()
    recorded(stack)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in stack.blocks)


def test_split_activations_have_their_part_of_the_mask() -> None:
    whole, _ = recorded(stack := Stack())

    def half(shape: tuple[int, ...]) -> tuple[tuple[int, ...], Spans]:
        assert shape == (1, 5, 3)
        return (1, 5, 6), [[(0, 1)], [(0, 5)], [(0, 1), (4, 6)]]

    mode, masks = LayoutInvariantDropoutMode(1, stack), dict[str, Tensor]()
    with mode.for_rows(3, ROWS):
        mode.on_mask = lambda site, mask, *_: masks.update({site: mask})
        token = row_split.set(half)
        stack.dropout(X[..., :3])
        row_split.reset(token)
        stack.dropout(X)
    first, second = masks.values()
    assert torch.equal(first, whole["before the blocks dropout 1"][..., [0, 4, 5]]) and second.shape == X.shape


def test_gradients_of_gradients() -> None:
    def function(x: Tensor) -> Tensor:
        with LayoutInvariantDropoutMode(1).for_rows(0, ROWS):
            return F.dropout(x, 0.4) ** 3

    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, x) and torch.autograd.gradgradcheck(function, x)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(torch.func.grad(lambda x: function(x).sum())(x), expected)


def test_whether_anything_can_be_dropped() -> None:
    assert has_dropout(nn.Sequential(nn.Dropout(0.1))) and not has_dropout(nn.Sequential(nn.Dropout(0.0)))
    assert has_dropout(nn.Linear(2, 2), {"attention_dropout": 0.1})
    assert has_dropout(nn.Linear(2, 2), {"text_config": {"attention_dropout": 0.1}})
    assert has_dropout(nn.Linear(2, 2), {"router_jitter_noise": 0.01})
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
