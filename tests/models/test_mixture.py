"""A mixture of experts against a plain loop over experts, its limits, and its edge cases."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import SIZES, built
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from motet.memory.recompute import Recomputation
from motet.models.arch.key_value_cache import KeyValueCache
from motet.models.arch.mixture import experts as experts_module
from motet.models.arch.mixture.experts import Experts
from motet.models.arch.mixture.mixture_of_experts import MixtureOfExperts, dropped_assignments, row_capacity
from motet.models.settings import DecoderSettings, MixtureOfExpertsSettings
from motet.models.user_module import find_blocks

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
    {"groups": 3, "groups_per_token": 1, "scores": "sigmoid", "balance": {"kind": "bias"}},
    {"capacity": 0.6, "drop": "last"},
]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


@pytest.mark.parametrize("values", CASES, ids=lambda values: "-".join(values) or "plain")
def test_outputs_and_gradients_are_those_of_a_loop_over_experts(values: dict[str, Any]) -> None:
    module, model = mixture(**values)
    if module.router.correction is not None:
        module.router.correction.copy_(torch.randn(6).double() * 0.3 - 1)  # Most corrected scores are negative
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
    rows, tokens, count = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(2, 5))
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


def test_the_capacity_is_a_factor_of_the_even_share_of_a_row_rounded_up() -> None:
    def capacity(factor: float, tokens: int) -> int:
        values = {"count": 8, "per_token": 3, "hidden": 4, "capacity": factor, "drop": "last"}
        return row_capacity(MixtureOfExpertsSettings.model_validate(values), tokens)

    assert [capacity(1.0, 16), capacity(1.25, 16), capacity(1.0, 17), capacity(0.1, 1)] == [6, 8, 7, 1]


def test_a_dropped_assignment_has_no_weight_and_no_expert_in_training_alone() -> None:
    module, model = mixture(capacity=0.5, drop="last")
    limit, x = module.limit, torch.randn(1, 6, model.hidden, dtype=torch.float64)
    assert limit is not None
    weights = torch.rand(1, 6, 2, dtype=torch.float64) + 0.1
    chosen = torch.tensor([0, 1]).expand(1, 6, 2)
    kept, experts = limit(weights, chosen)
    assert torch.equal(kept[:, :1], weights[:, :1]) and not kept[:, 1:].any()
    assert torch.equal(experts[:, :1], chosen[:, :1]) and (experts[:, 1:] == 6).all()
    assert all(map(torch.equal, limit.eval()(weights, chosen), (weights, chosen)))
    with torch.no_grad():  # A result that overflows, times a weight of 0, would be no number
        module.experts.up[-1], module.experts.down[-1] = 1e200, 1e200
        assert module.experts(x, experts, kept).isfinite().all()


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


# --- recomputation, and generation -------------------------------------------------------------------

DECODERS: list[dict[str, Any]] = [
    {"experts": {**EXPERTS, "shared": 1, "capacity": 0.9, "drop": "lowest"}},
    {
        "experts": {**EXPERTS, "scores": "sigmoid", "groups": 3, "groups_per_token": 2, "first_dense_layers": 1},
        "balance": {"kind": "bias"},
        "latent_attention": {
            "query_rank": 9,
            "key_value_rank": 7,
            "rotary_head_dim": 2,
            "plain_head_dim": 5,
            "value_head_dim": 3,
        },
    },
]


def gradients(values: dict[str, Any], policy: Any) -> tuple[list[Tensor], int]:
    """The gradients of a decoder whose blocks have this policy, and the FLOPs of its products."""
    model = built(DecoderSettings.model_validate({**SIZES, **values}), dtype=torch.float64)
    Recomputation(find_blocks(model.module), [policy] * 2)
    tokens = torch.arange(24).view(2, 12)
    with FlopCounterMode(display=False) as counter:
        model.module(tokens).square().sum().backward()
    return [
        parameter.grad for parameter in model.module.parameters() if parameter.grad is not None
    ], counter.get_total_flops()


@pytest.mark.parametrize("values", DECODERS, ids=["capacity", "latent attention"])
def test_recomputation_has_the_same_bits_and_selective_repeats_no_product(values: dict[str, Any]) -> None:
    (plain, flops), (selective, same_flops), (full, more_flops) = (
        gradients(values, policy) for policy in ("none", "selective", "full")
    )
    assert len(plain) == len(selective) == len(full) > 15
    assert all(map(torch.equal, selective, plain)) and all(map(torch.equal, full, plain))
    assert same_flops == flops < more_flops


@pytest.mark.parametrize("values", DECODERS, ids=["capacity", "latent attention"])
def test_the_cache_gives_the_logits_of_complete_rows(values: dict[str, Any]) -> None:
    """Evaluation drops no assignment."""
    model = built(DecoderSettings.model_validate({**SIZES, **values}), dtype=torch.float64)
    module, tokens, cache = model.module.eval(), torch.arange(24).view(2, 12), KeyValueCache(12)
    assert model.next_logits is not None
    with torch.no_grad():
        complete = module(tokens)
        for start, stop in ((0, 5), (5, 6), (6, 9), (9, 12)):
            step = model.next_logits(tokens[:, start:stop], cache)
            assert relative(step, complete[:, stop - 1]) < 1e-13
