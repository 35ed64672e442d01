"""The terms that balance the experts of one layer, for the tokens of this rank.

The loss of row r with T tokens is L_r = sum over experts of f_e P_e. f_e = E / (K T) times the number of assignments of
the row to expert e, a constant; P_e is the mean over the row's tokens of their normalised scores. It does not depend
on the rows that share a micro-batch, as a loss over the tokens of a micro-batch does.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from motet.models.settings import BalanceSettings

ScoreKind = Literal["softmax", "sigmoid"]


def normalized_scores(logits: Tensor, scores: ScoreKind) -> Tensor:
    """[..., E], which add up to 1 for each token, in float32 at least."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if scores == "softmax":
        return logits.softmax(-1)
    sigmoids = logits.sigmoid()
    return sigmoids / sigmoids.sum(-1, keepdim=True).clamp(min=torch.finfo(sigmoids.dtype).tiny)


def row_counts(chosen: Tensor, rows: int, experts: int) -> Tensor:
    """[R, E]: the assignments of each row to each expert, from the choice [..., K] of the tokens of all rows in order.
    An index of E is no assignment."""
    flat = chosen.reshape(rows, -1)
    counts = torch.zeros(rows, experts + 1, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(1, flat.to(torch.int64), torch.ones_like(flat, dtype=torch.int64))[:, :experts]


@dataclass(frozen=True)
class RowTerms:
    """The terms of the tokens of this rank. Each token has its share of the row, so ranks and stages add up theirs."""

    settings: BalanceSettings
    scores: ScoreKind
    per_token: int
    row_tokens: int  # Tokens of a complete row

    def values(self, logits: Tensor, counts: Tensor, targets: Tensor) -> Tensor:
        """[R]: for each row, its term times its targets. logits [..., E] of the tokens of all rows in order, counts
        [R, E] and targets [R] of complete rows."""
        rows, experts = counts.shape
        values = torch.zeros(rows, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
        if weight := self.settings.row_weight:
            fractions = counts.to(values.dtype) * (experts / (self.per_token * self.row_tokens))
            means = normalized_scores(logits, self.scores).reshape(rows, -1, experts).sum(1) / self.row_tokens
            values = values + weight * (fractions * means).sum(-1)
        if z_weight := self.settings.z_weight:
            squares = logits.to(values.dtype).logsumexp(-1).square().reshape(rows, -1)
            values = values + z_weight * squares.sum(1) / self.row_tokens
        return values * targets.to(values.dtype, copy=True)  # Predicted bytes have one of each layer, in float64 too


def entropies(logits: Tensor, scores: ScoreKind, rows: int) -> Tensor:
    """[R]: the sum over the row's tokens of the entropies of their scores."""
    probabilities = normalized_scores(logits.detach(), scores).reshape(rows, -1)
    return -torch.xlogy(probabilities, probabilities).sum(1)
