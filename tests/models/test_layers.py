"""The layers with a backward of their own, and attention, against plain formulas and finite differences."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from motet.models.arch import attention_core
from motet.models.arch.attention_core import (
    ScoreOptions,
    attend,
    attention_exchange,
    dot_product_attention,
    tiled_attention,
)
from motet.models.arch.attention_mask import AttentionMask, bidirectional_mask, causal_mask
from motet.models.arch.layers import (
    ACTIVATIONS,
    LayerNorm,
    RMSNorm,
    RotaryEmbedding,
    apply_activation,
    apply_rotary,
    gated_activation,
    rms_norm,
)
from motet.models.settings import ActivationName, RopeScalingSettings


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def doubles(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


# --- norms -------------------------------------------------------------------------------------------
def test_rms_norm_is_its_formula_and_its_gradient_that_of_finite_differences() -> None:
    x, weight = doubles(3, 2, 8), doubles(8)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    assert (rms_norm(x, weight, 1e-3) - expected).abs().max() < 1e-14
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, weight.detach(), 1e-3), (x,))
    assert torch.autograd.gradcheck(lambda w: rms_norm(x.detach(), w, 1e-3), (weight,))


def _tiled(x: Tensor) -> Tensor:
    q = x.bfloat16()[None, None]
    return attention_core.tiled_attention(q, q, q, None, causal=True, scale=0.3)


@pytest.mark.parametrize(
    "function",
    [lambda x: rms_norm(x, torch.ones(8).double(), 1e-3), lambda x: gated_activation(x, "silu"), _tiled],
)
def test_a_second_derivative_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    """It would miss the terms that a backward computes without autograd."""
    x = doubles(3, 8)
    (gradient,) = torch.autograd.grad((function(x) * 2).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="trying to differentiate twice"):
        gradient.pow(2).sum().backward()


def test_rms_norm_of_a_slice_of_something_larger() -> None:
    x, weight = doubles(2, 5, 6, 4), doubles(4)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x[:, :, :3], w, 1e-5), (x, weight))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norms_in_bfloat16_have_statistics_in_float32(norm: str) -> None:
    """The gradient is off by roundings of single values, not by one of a whole row."""
    x, weight, grad = (torch.randn(shape).bfloat16() for shape in ((64, 256), (256,), (64, 256)))

    def gradient(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaf = x.clone().to(dtype).requires_grad_()
        layer = RMSNorm(256, 1e-5) if norm == "rms" else LayerNorm(256, 1e-5, bias=False)
        layer.weight = torch.nn.Parameter(weight.to(dtype))
        y = layer(leaf)
        assert y.dtype == dtype
        (y * grad.to(dtype)).sum().backward()
        assert leaf.grad is not None
        return y.detach().double(), leaf.grad.double()

    for low, exact in zip(gradient(torch.bfloat16), gradient(torch.float64), strict=True):
        # Of 256 independent roundings of at most 2^-9 nothing is left along the row itself.
        along = ((low - exact) * exact).sum(1) / exact.square().sum(1)
        assert along.abs().max() < 2**-9 and (low - exact).norm() < 2**-8 * exact.norm()


# --- activations -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_gated_activation(name: ActivationName) -> None:
    x = doubles(3, 4, 10)
    first, second = x.chunk(2, -1)
    assert (gated_activation(x, name) - apply_activation(first, name) * second).abs().max() < 1e-15
    assert torch.autograd.gradcheck(lambda x: gated_activation(x, name), (x,))


def test_activations_are_what_their_names_say() -> None:
    x = doubles(50, grad=False)
    expected = {"silu": F.silu(x), "gelu": F.gelu(x), "gelu_tanh": F.gelu(x, approximate="tanh")}
    expected |= {"relu": x.clamp(min=0), "relu_squared": x.clamp(min=0) ** 2}
    assert all(torch.equal(apply_activation(x, name), y) for name, y in expected.items())
    assert expected.keys() == ACTIVATIONS.keys()


# --- rotary positions --------------------------------------------------------------------------------
def test_scores_of_turned_heads_depend_on_the_distance_alone() -> None:
    q, k = doubles(8, grad=False), doubles(8, grad=False)
    rotary = RotaryEmbedding(8, 100.0, RopeScalingSettings(original_context=8))

    def score(at: int, other: int) -> Tensor:
        turned = apply_rotary(torch.stack((q, k)).unsqueeze(1), rotary.rotations_at(torch.tensor([at, other]), q.dtype))
        return (turned[0] * turned[1]).sum()

    assert abs(score(3, 7) - score(1003, 1007)) < 1e-13 and abs(score(3, 7) - score(3, 8)) > 1e-3


def test_rotary_keeps_dtype_and_norm_and_has_a_gradient() -> None:
    x = doubles(2, 5, 3, 6)
    table = RotaryEmbedding(4, 10.0).rotations_at(torch.arange(5), x.dtype)
    assert torch.allclose(apply_rotary(x, table).norm(dim=-1), x.norm(dim=-1), rtol=1e-14, atol=0)
    assert torch.equal(apply_rotary(x, table)[..., 4:], x[..., 4:])
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, table), (x,))
    low = x.detach().bfloat16()
    assert apply_rotary(low, RotaryEmbedding(4, 10.0).rotations_at(torch.arange(5), low.dtype)).dtype == torch.bfloat16


# --- attention ---------------------------------------------------------------------------------------
def by_formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, bias: Tensor | float = 0.0) -> Tensor:
    """q [R, T, h, D], k and v [R, S, kv, D], seen [R, h, T, S]."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("rthd,rshd->rhts", q, k) * scale + bias
    return torch.einsum("rhts,rshd->rthd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v).flatten(2)


def heads(length: int) -> list[Tensor]:
    return [torch.randn(2, length, count, 8, dtype=torch.float64) for count in (4, 2, 2)]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("with_documents", [False, True])
def test_causal_attention(window: int | None, with_documents: bool) -> None:
    q, k, v = heads(9)
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 9]) if with_documents else None
    at = torch.arange(9)
    seen = ((at[None, :] <= at[:, None]) & (at[:, None] - at[None, :] < (window or 100))).expand(2, 4, 9, 9)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    pattern = causal_mask(documents, window=window)
    is_flag = pattern.dense(9, 9, dtype=q.dtype, device=q.device) is None
    assert is_flag == (documents is None and window in (None, 100))  # the fast path where it can be
    assert (dot_product_attention(q, k, v, pattern, scale=0.3) - by_formula(q, k, v, seen, 0.3)).abs().max() < 1e-14


def test_attention_to_another_sequence_stays_within_documents_and_is_never_empty() -> None:
    q, _, _ = heads(5)
    _, k, v = heads(7)
    documents, sources = torch.tensor([[0, 0, 1, 1, 9]] * 2), torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)
    out = dot_product_attention(q, k, v, bidirectional_mask(documents, sources), scale=1.0)
    seen = (documents[:, None, :, None] == sources[:, None, None, :]).expand(2, 4, 5, 7)
    assert (out - by_formula(q, k, v, seen, 1.0))[:, :4].abs().max() < 1e-14 and out.isfinite().all()
    assert dot_product_attention(q, k, v, bidirectional_mask(None, None), scale=1.0).shape == (2, 5, 32)


def test_learned_biases_are_added_within_the_pattern() -> None:
    q, k, v = heads(6)
    bias = doubles(1, 4, 6, 6)
    pattern = AttentionMask(causal=True, bias=bias)
    expected = by_formula(q, k, v, torch.ones(6, 6, dtype=torch.bool).tril(), 1.0, bias)
    assert (dot_product_attention(q, k, v, pattern, scale=1.0) - expected).abs().max() < 1e-14
    dot_product_attention(q, k, v, pattern, scale=1.0).sum().backward()
    assert bias.grad is not None and bias.grad.norm() > 0


@pytest.mark.parametrize(
    "mask", [causal_mask(), causal_mask(window=3), AttentionMask()], ids=["causal", "window", "all"]
)
def test_capped_scores_and_sinks(mask: AttentionMask) -> None:
    """Gemma 2 bounds the scores; in GPT-OSS a learned logit of each head joins the softmax and has no value."""
    q, k, v = (x.transpose(1, 2) for x in heads(6))
    sinks, bias = doubles(4), mask.dense(6, 6, dtype=q.dtype, device=q.device)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1) if mask.causal and bias is None else torch.zeros(6, 6).bool()
    hidden = hidden if bias is None else bias.isinf()
    scores = 2 * torch.tanh(q @ k.repeat_interleave(2, 1).mT * 3.0 / 2)
    weights = scores.masked_fill(hidden, float("-inf")).exp()
    values = v.repeat_interleave(2, 1)
    capped = attend(q, k, v, mask=mask, options=ScoreOptions(3.0, softcap=2.0))
    assert (capped - weights / weights.sum(-1, keepdim=True) @ values).abs().max() < 1e-14
    with_sinks = attend(q, k, v, mask=mask, options=ScoreOptions(3.0, softcap=2.0, sinks=sinks))
    total = weights.sum(-1, keepdim=True) + sinks.exp().view(1, 4, 1, 1)
    assert (with_sinks - weights / total @ values).abs().max() < 1e-14
    with_sinks.square().sum().backward()
    assert sinks.grad is not None and sinks.grad.abs().min() > 0
    assert attend(q, k, v, mask=mask, options=ScoreOptions(1.0, sinks=sinks, dropout=1.0)).abs().max() == 0


def test_an_exchange_computes_attention_where_it_is_set() -> None:
    class Exchange:
        def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, options: ScoreOptions) -> Tensor:
            return 2 * q

    q, k, v = heads(5)
    token = attention_exchange.set(Exchange())
    try:
        assert torch.equal(dot_product_attention(q, k, v, causal_mask(), scale=1.0), 2 * q.flatten(2))
    finally:
        attention_exchange.reset(token)


def test_gradient_of_attention_in_bfloat16() -> None:
    """Whichever way it is computed here: two roundings of 2^-8 from that of float64."""
    given, grads = [x.bfloat16() for x in heads(150)], []
    for dtype in (torch.bfloat16, torch.float64):
        q, k, v = (x.clone().to(dtype).requires_grad_() for x in given)
        dot_product_attention(q, k, v, AttentionMask(causal=True), scale=0.3).square().sum().backward()
        grads.append([x.grad.double() for x in (q, k, v)])
    for low, exact in zip(*grads, strict=True):
        assert (low - exact).norm() < 2**-7 * exact.norm()


@pytest.mark.parametrize("length", [5, 128, 150, 300])
@pytest.mark.parametrize("kind", ["causal", "full", "documents", "rows"])
def test_gradient_of_attention_in_tiles(length: int, kind: str) -> None:
    """Float64, where the formula equals torch's to rounding: blocks, groups of heads, and biases fall in place."""
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in heads(length))
    bias = None
    if kind in ("documents", "rows"):
        rows = 2 if kind == "rows" else 1
        documents = torch.randint(3, (rows, length)).sort(1).values
        bias = causal_mask(documents).dense(length, length, dtype=q.dtype, device=q.device)
    causal, grad = kind != "full", torch.randn(q.shape, dtype=q.dtype)
    expected = F.scaled_dot_product_attention(q, k, v, bias, 0.0, causal and bias is None, scale=0.3, enable_gqa=True)
    ours = tiled_attention(q, k, v, bias, causal=causal, scale=0.3)
    assert torch.equal(ours, expected)
    expected_gradients, our_gradients = (torch.autograd.grad(y, (q, k, v), grad) for y in (expected, ours))
    for a, b in zip(our_gradients, expected_gradients, strict=True):
        assert (a - b).norm() < 1e-14 * b.norm()
