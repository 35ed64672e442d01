"""The vectors of stacked experts are no matrices to the optimizer, although they have two dimensions."""

import pytest
import torch
from torch import nn

from motet.models.spec.stacked_experts import stacked_vectors
from motet.train.optimizer.module_plan import grouped_parameters, model_inventory
from motet.train.optimizer.optimizer_settings import OptimizerSettings


class StackedExperts(nn.Module):
    """Parameters as those of GPT-OSS."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.zeros(experts, 4, 6)), nn.Parameter(torch.zeros(experts, 6))
        self.down, self.down_bias = nn.Parameter(torch.zeros(experts, 3, 4)), nn.Parameter(torch.zeros(experts, 4))


def decayed(module: nn.Module) -> set[str]:
    keys, parameters = grouped_parameters(module, OptimizerSettings(weight_decay=0.1))
    return {name for name, (group, _) in parameters.items() if keys[group][1]}


@pytest.mark.parametrize("trains_weights", [True, False])
def test_biases_of_experts_are_not_decayed(trains_weights: bool) -> None:
    model = nn.ModuleDict({"router": nn.Linear(4, 5), "experts": StackedExperts(5)})
    for name in ("experts.up", "experts.down"):
        model.get_parameter(name).requires_grad = trains_weights
    weights = {"experts.up", "experts.down"} if trains_weights else set[str]()
    assert decayed(model) == {"router.weight", *weights}
    groups = {each.name: each.optimizer_group for each in model_inventory(model, OptimizerSettings()).trained}
    assert groups["experts.up_bias"] == groups["router.bias"] != groups["router.weight"]


def test_other_matrices_are_decayed() -> None:
    """Nothing is stacked without three dimensions, with other lengths, or for one expert."""
    pair = nn.ParameterDict({"a": torch.zeros(5, 6), "b": torch.zeros(5, 4)})
    model = nn.ModuleDict({"pair": pair, "convolution": nn.Conv1d(6, 5, 3), "one": StackedExperts(1)})
    vectors = {"convolution.bias"}
    assert decayed(model) == {name for name, _ in model.named_parameters()} - vectors
    assert stacked_vectors({"a.up": (5, 4, 6), "a.bias": (5, 6), "a.sinks": (7, 2)}) == set()
