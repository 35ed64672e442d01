"""A tensor that differs, and what the reference knows that it could be made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from motet.parity.diagnose.contribution_fit import MicroBatchContribution
from motet.parity.diagnose.located_difference import LocatedDifference
from motet.parity.diagnose.optimizer_update import ExpectedOptimizerUpdate
from motet.parity.diagnose.single_device_recompute import MicroBatchResult
from motet.parity.record.tensor_recorder import TensorKind


@dataclass(frozen=True)
class MismatchEvidence:
    """The values of a hypothesis; the collector leaves empty what the kind of the tensor does not have."""

    value: Tensor
    expected: Tensor
    rank: int | None = None  # None: the value is of all ranks together
    known_factors: Mapping[str, float] = field(default_factory=dict)  # What factors may come from: `dp` -> 4
    kind: TensorKind = "gradient"
    name: str = ""
    contributions: Sequence[MicroBatchContribution] = ()  # Their sum is expected
    previous_contributions: Sequence[MicroBatchContribution] = ()  # Those of the step before
    alternatives: Mapping[str, Tensor] = field(default_factory=dict)  # Description -> what it might be instead
    alternative_rows: Mapping[str, Tensor] = field(default_factory=dict)  # Description -> [rows, elements of each]
    value_before_step: Tensor | None = None
    source_tensors: Mapping[str, Tensor] = field(default_factory=dict)  # Name -> tensor that it might be a slice of
    results: Sequence[MicroBatchResult] = ()  # Losses and counts that a scalar is the sum or the mean of
    token_count: int = 0  # Tokens of the batch, targets or not
    optimizer: "OptimizerEvidence | None" = None
    located: LocatedDifference | None = None  # None: the tensor was computed from others, no rank recorded it

    @property
    def source(self) -> LocatedDifference:
        assert self.located is not None, "hypotheses of kinds that are only recorded"
        return self.located

    def as_numbers(self) -> "MismatchEvidence":
        """The same, with masks as numbers."""
        if self.value.dtype != torch.bool:
            return self
        return replace(
            self,
            value=self.value.double(),
            expected=self.expected.double(),
            alternatives={words: tensor.double() for words, tensor in self.alternatives.items()},
            alternative_rows={words: rows.double() for words, rows in self.alternative_rows.items()},
            value_before_step=None if self.value_before_step is None else self.value_before_step.double(),
        )


class OptimizerEvidence(NamedTuple):
    """What a moment or a master is updated with."""

    state_name: str  # master, exp_avg, ...
    update: ExpectedOptimizerUpdate
    gradient: MismatchEvidence  # The gradient of the update, in place of a value that is not recorded
    other_gradients: Mapping[str, Tensor]  # Description -> the gradient of another parameter
    state_before: Mapping[str, Tensor]  # Name -> tensor of the state before the step
