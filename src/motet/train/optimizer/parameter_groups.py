"""Groups of parameters with one learning-rate scale and one weight decay, and the inventory that names them."""

import fnmatch

from torch import nn

from motet.core.errors import check_input
from motet.parallel.model_inventory import ModelInventory
from motet.parallel.process.module_inventory import inventory_of_module
from motet.train.optimizer.optimizer_settings import OptimizerSettings

# (learning-rate scale, weight decay): parameters with the same key share one flat tensor.
ParameterGroupKey = tuple[float, float]
ParameterGroups = dict[ParameterGroupKey, dict[str, nn.Parameter]]


def group_parameters(named: dict[str, nn.Parameter], settings: OptimizerSettings) -> ParameterGroups:
    """Parameters by learning-rate scale and weight decay, in the order of the module."""
    groups: ParameterGroups = {}
    unmatched = {pattern for group in settings.groups for pattern in group.match}
    for name, parameter in named.items():
        scale, decay = 1.0, settings.weight_decay if parameter.ndim > 1 else 0.0
        for group in settings.groups:
            hits = {pattern for pattern in group.match if fnmatch.fnmatchcase(name, pattern)}
            unmatched -= hits
            if hits:
                scale = group.learning_rate_scale
                decay = settings.weight_decay if group.weight_decay is None else group.weight_decay
                break
        groups.setdefault((scale, decay), {})[name] = parameter
    first, examples = min(unmatched, default=""), ", ".join(list(named)[:3])
    sentence = f"optimizer.groups: no trainable parameter's name matches {first!r}; names look like {examples}"
    check_input(not unmatched, sentence)
    return groups


def model_inventory(module: nn.Module, settings: OptimizerSettings) -> ModelInventory:
    """The tensors of a module, with the optimizer groups of the parameters that are trained."""
    _, in_order = grouped_parameters(module, settings)
    return inventory_of_module(module, {name: group_id for name, (group_id, _) in in_order.items()})


def grouped_parameters(
    module: nn.Module, settings: OptimizerSettings
) -> tuple[list[ParameterGroupKey], dict[str, tuple[int, nn.Parameter]]]:
    """The keys of the groups, and the group and the parameter of each name."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    groups = group_parameters(named, settings)
    group_ids = {name: group_id for group_id, members in enumerate(groups.values()) for name in members}
    return list(groups), {name: (group_ids[name], p) for name, p in named.items()}
