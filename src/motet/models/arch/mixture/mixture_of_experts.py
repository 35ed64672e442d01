"""A mixture of experts in place of a feed-forward network, and the limit of the load of each expert."""

from functools import partial
from math import ceil
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from motet.models.arch.attention_and_feed_forward import FeedForward
from motet.models.arch.mixture.experts import Experts
from motet.models.arch.mixture.router import Router
from motet.models.arch.mixture.row_tokens import on_whole_rows
from motet.models.settings import DecoderSettings, MixtureOfExpertsSettings


class MixtureOfExperts(nn.Module):
    """The weighted sum of the experts of each token, and a network for all tokens if some experts are shared."""

    def __init__(self, s: DecoderSettings, experts: MixtureOfExpertsSettings) -> None:
        super().__init__()
        self.router = Router(s.hidden, experts, has_correction=s.balance.kind == "bias")
        self.limit = CapacityLimit(experts) if experts.capacity is not None else None
        self.experts = Experts(s, experts)
        shared = s.model_copy(update={"ffn_hidden": experts.shared * experts.hidden})
        self.shared = FeedForward(shared) if experts.shared else None

    def forward(self, x: Tensor) -> Tensor:
        _, weights, chosen = self.router(x)
        if self.limit is not None:
            weights, chosen = self.limit(weights, chosen)
        result = self.experts(x, chosen, weights)
        return cast(Tensor, result if self.shared is None else result + self.shared(x))


class CapacityLimit(nn.Module):
    """Drops assignments of an expert beyond its capacity in a row, in training alone.

    weights and chosen experts, [R, T, K] each -> the same, with the weight 0 and the index E where an assignment is
    dropped. Other weights stay. A limit of each row, and not of a micro-batch, does not depend on the layout.
    """

    needs_whole_rows: ClassVar = True

    def __init__(self, experts: MixtureOfExpertsSettings) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        if not self.training:
            return weights, chosen
        is_dropped = on_whole_rows(partial(dropped_assignments, experts=self.experts), weights.detach(), chosen)
        return weights.masked_fill(is_dropped, 0), chosen.masked_fill(is_dropped, self.experts.count)


def row_capacity(experts: MixtureOfExpertsSettings, tokens: int) -> int:
    """The assignments that an expert takes of a row of this number of tokens, which is never more than its tokens."""
    assert experts.capacity is not None
    return ceil(min(tokens, experts.capacity * experts.per_token * tokens / experts.count))


def dropped_assignments(weights: Tensor, chosen: Tensor, experts: MixtureOfExpertsSettings) -> Tensor:
    """[R, T, K] -> whether each assignment is dropped. `last` keeps the first tokens of the row, `lowest` the highest
    weights, of equal ones those of the first tokens."""
    by_row = chosen.flatten(1)
    if experts.drop == "lowest":
        order = weights.flatten(1).sort(dim=1, descending=True, stable=True).indices
        sorted_experts, by_expert = by_row.gather(1, order).sort(dim=1, stable=True)
        order = order.gather(1, by_expert)
    else:
        sorted_experts, order = by_row.sort(dim=1, stable=True)
    places = torch.arange(by_row.shape[1], device=by_row.device).expand_as(by_row)
    ranks = places - torch.searchsorted(sorted_experts, sorted_experts)  # Less the first place of the same expert
    is_beyond = ranks >= row_capacity(experts, chosen.shape[1])
    return torch.empty_like(is_beyond).scatter_(1, order, is_beyond).view_as(chosen)
