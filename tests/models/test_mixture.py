"""A mixture of experts against a plain loop over experts, its limits, and its edge cases."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import SIZES
from torch import Tensor
from torch.nn import functional as F

from motet.models.arch.mixture import experts as experts_module
from motet.models.arch.mixture.experts import Experts
from motet.models.arch.mixture.mixture_of_experts import MixtureOfExperts, dropped_assignments, row_capacity
from motet.models.settings import DecoderSettings, MixtureOfExpertsSettings

EXPERTS = {"count": 6, "per_token": 2, "hidden": 5}


def mixture(**values: Any) -> tuple[MixtureOfExperts, DecoderSettings]:
    """A mixture in float64 with values of every size."""
    balance = values.pop("balance", {})
    model = DecoderSettings.model_validate(
        {**SIZES, "gated": values.pop("gated", True), "experts": {**EXPERTS, **values}, "balance": balance}
    )
    assert model.experts is not None
    torch.manual_seed(1)
    module = MixtureOfExperts(model, model.experts).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module, model


def loop_over_experts(module: MixtureOfExperts, model: DecoderSettings, x: Tensor) -> Tensor:
    """The output by the definition: each token and each of its experts, one after the other."""
    experts, rows = model.experts, []
    assert experts is not None
    logits = x @ module.router.weight.T
    scores = logits.softmax(-1) if experts.scores == "softmax" else logits.sigmoid()
    correction = 0 if module.router.correction is None else module.router.correction
    for row in range(len(x)):
        loads, outputs = [0] * experts.count, []
        for token in range(x.shape[1]):
            score = scores[row, token]
            choice = (score + correction).tolist()
            size = experts.count // experts.groups
            groups = [sorted(choice[i * size : (i + 1) * size])[-2:] for i in range(experts.groups)]
            best = sorted(range(experts.groups), key=lambda i: -sum(groups[i]))[: experts.groups_per_token]
            left = [i for i in range(experts.count) if i // size in best]
            chosen = sorted(left, key=lambda i: -choice[i])[: experts.per_token]
            total = score[chosen].sum() if experts.normalize_weights else 1
            output = torch.zeros_like(x[row, token])
            for i in chosen:
                loads[i] += 1
                if experts.capacity is not None and loads[i] > row_capacity(experts, x.shape[1]):
                    continue
                up = module.experts.up[i] @ x[row, token]
                gate, up = up.chunk(2) if model.gated else (up, None)
                inner = F.silu(gate) * (1 if up is None else up)
                output = output + module.experts.down[i] @ inner * score[i] / total * experts.weight_scale
            outputs.append(output if module.shared is None else output + module.shared(x[row, token]))
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


CASES: list[dict[str, Any]] = [
    {},
    {"scores": "sigmoid", "weight_scale": 2.5, "shared": 2, "balance": {"kind": "bias"}},
    {"normalize_weights": False, "gated": False},
    {"groups": 3, "groups_per_token": 2, "per_token": 3, "shared": 1},
    {"capacity": 0.6, "drop": "last"},
]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


@pytest.mark.parametrize("values", CASES, ids=lambda values: "-".join(values) or "plain")
def test_outputs_and_gradients_are_those_of_a_loop_over_experts(values: dict[str, Any]) -> None:
    module, model = mixture(**values)
    if module.router.correction is not None:
        module.router.correction.copy_(torch.randn(6).double() * 0.3)
    x = torch.randn(3, 7, model.hidden, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, 7, model.hidden, dtype=torch.float64)
    tensors = [x, *module.parameters()]
    output, expected = module(x), loop_over_experts(module, model, x)
    assert relative(output, expected) < 1e-14
    assert output.grad_fn is not None
    for ours, by_loop in zip(
        torch.autograd.grad(output, tensors, grad), torch.autograd.grad(expected, tensors, grad), strict=True
    ):
        assert relative(ours, by_loop) < 1e-13


def test_the_correction_counts_for_the_choice_alone() -> None:
    module, model = mixture(scores="sigmoid", normalize_weights=False, balance={"kind": "bias"})
    x = torch.randn(2, 5, model.hidden, dtype=torch.float64)
    assert module.router.correction is not None
    module.router.correction[4] = 10
    logits, weights, chosen = module.router(x)
    assert (chosen[..., 0] == 4).all()
    assert torch.equal(weights, logits.sigmoid().gather(-1, chosen))


def test_logits_and_weights_are_in_float32_at_least() -> None:
    module, model = mixture()
    x = torch.randn(2, 5, model.hidden)
    logits, weights, _ = module.bfloat16().router(x.bfloat16())
    assert logits.dtype == weights.dtype == torch.float32
    assert torch.equal(logits, x.bfloat16().float() @ module.router.weight.float().T)
    assert module(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [0, 3])
def test_the_result_depends_on_every_weight_and_on_the_input(tokens: int) -> None:
    """Also where experts have no token, or no expert has one: other ranks wait for these gradients."""
    module, model = mixture()
    x = torch.randn(tokens, model.hidden, dtype=torch.float64, requires_grad=True)
    chosen = torch.ones(tokens, 2, dtype=torch.int64)
    chosen[:, 1] = 3
    weights = torch.rand(tokens, 2, dtype=torch.float64, requires_grad=True)
    gradients = torch.autograd.grad(
        module.experts(x, chosen, weights).sum(), [x, weights, *module.experts.parameters()]
    )
    for gradient in gradients[2:]:
        is_used = gradient.flatten(1).any(1)
        assert is_used.tolist() == [tokens > 0 and i in (1, 3) for i in range(6)]


# --- any routing -------------------------------------------------------------------------------------


@st.composite
def routings(draw: st.DrawFn) -> tuple[MixtureOfExpertsSettings, Tensor, Tensor]:
    """Experts of each token of some rows, all different for a token, and weights with ties."""
    rows, tokens, count = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    per_token = draw(st.integers(1, count))
    favoured = draw(st.booleans())  # All tokens to the same experts, and none to the others
    orders = st.permutations(range(count)) if not favoured else st.just([*range(count)])
    chosen = [[draw(orders)[:per_token] for _ in range(tokens)] for _ in range(rows)]
    shape = rows, tokens, per_token
    size = rows * tokens * per_token
    weights = draw(st.lists(st.sampled_from([0.25, 0.5, 0.75]), min_size=size, max_size=size))
    limits = {
        "capacity": draw(st.sampled_from([0.2, 0.5, 1.0, 1.3])),
        "drop": draw(st.sampled_from(["last", "lowest"])),
    }
    settings = MixtureOfExpertsSettings.model_validate(
        {"count": count, "per_token": per_token, "hidden": 4} | (limits if draw(st.booleans()) else {})
    )
    return settings, torch.tensor(chosen), torch.tensor(weights, dtype=torch.float64).view(shape)


def expected_drops(experts: MixtureOfExpertsSettings, chosen: Tensor, weights: Tensor) -> Tensor:
    """The rule, applied to one expert of a row after the other."""
    drops, capacity = torch.zeros_like(chosen, dtype=torch.bool), row_capacity(experts, chosen.shape[1])
    for row in range(len(chosen)):
        for expert in range(experts.count):
            places = [(t, k) for t, k in (chosen[row] == expert).nonzero().tolist()]
            if experts.drop == "lowest":
                places.sort(key=lambda place: -float(weights[row, place[0], place[1]]))
            for token, k in places[capacity:]:
                drops[row, token, k] = True
    return drops


@settings(deadline=None, max_examples=60)
@given(routings())
def test_any_routing_gives_each_token_its_experts_once(
    routing: tuple[MixtureOfExpertsSettings, Tensor, Tensor],
) -> None:
    experts, chosen, weights = routing
    if experts.capacity is not None:
        dropped = dropped_assignments(weights, chosen, experts)
        assert torch.equal(dropped, expected_drops(experts, chosen, weights))
        weights, chosen = weights.masked_fill(dropped, 0), chosen.masked_fill(dropped, experts.count)
    hidden = 3
    model = DecoderSettings.model_validate({**SIZES, "heads": 1, "hidden": hidden, "experts": experts.model_dump()})
    module = Experts(model, experts).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(*chosen.shape[:2], hidden, dtype=torch.float64)
    outputs = torch.stack(
        [
            F.linear(experts_module.gated_activation(F.linear(x, up), "silu"), down)
            for up, down in zip(module.up, module.down, strict=True)
        ]
        + [torch.zeros_like(x)],  # A dropped assignment
        dim=-2,
    )
    expected = (outputs.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, hidden)) * weights.unsqueeze(-1)).sum(-2)
    assert torch.allclose(module(x, chosen, weights), expected, rtol=1e-12, atol=1e-12)
