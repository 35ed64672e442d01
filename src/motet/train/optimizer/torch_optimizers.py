"""Settings that do what an optimizer of torch would do, and the line that describes an optimizer."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from motet.core.config_loading import settings_from_dict
from motet.core.errors import check_input
from motet.train.optimizer.module_plan import group_parameters
from motet.train.optimizer.optimizer_settings import OptimizerSettings

# An optimizer of torch, or its class, or a partial of the class with its arguments.
TorchOptimizer = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_SHARED_OPTIONS = {
    torch.optim.AdamW: ("adamw", ("betas", "eps")),
    torch.optim.Adam: ("adamw", ("betas", "eps")),
    torch.optim.SGD: ("sgd", ("momentum", "nesterov")),
}
_MISSING_OPTIONS = ("amsgrad", "maximize", "dampening", "differentiable")


def settings_of_torch_optimizer(optimizer: TorchOptimizer, module: nn.Module) -> OptimizerSettings:
    """The settings with torch's own defaults: decay of all parameters of a group, and no clipping."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer([p for p in module.parameters() if p.requires_grad])
    name = type(optimizer).__name__
    check_input(
        type(optimizer) in _SHARED_OPTIONS,
        f"parallelize: optimizer {name} is not built into motet; use torch.optim.AdamW, SGD, or Adam without decay",
    )
    check_input(
        not optimizer.state,
        f"parallelize: {name} has taken steps, whose state is not taken over; give a new one, or its class",
    )
    groups, (kind, shared) = optimizer.param_groups, _SHARED_OPTIONS[type(optimizer)]
    for option in (*shared, *_MISSING_OPTIONS):
        values = [group.get(option) for group in groups]
        differ = f"groups of {name} have {option} = {values[0]} and others; give all groups the same"
        check_input(all(value == values[0] for value in values), f"parallelize: {differ}")
        problem = f"{name} with {option} = {values[0]} is not built into motet; leave {option} out"
        check_input(option not in _MISSING_OPTIONS or not values[0], f"parallelize: {problem}")
    decays = [float(group["weight_decay"]) for group in groups]
    is_coupled = type(optimizer) is torch.optim.Adam and any(decays) and not groups[0].get("decoupled_weight_decay")
    check_input(
        not is_coupled,
        f"parallelize: Adam adds weight_decay = {max(decays):g} to gradients, which is not built into motet; use "
        "torch.optim.AdamW, or weight_decay=0",
    )
    rates, members = [float(group["lr"]) for group in groups], _names_of_groups(groups, module, name)
    base = max(rates)
    tree: dict[str, Any] = {
        "name": kind,
        "learning_rate": base,
        "weight_decay": max(decays),
        "clip_norm": None,
        **{option: groups[0][option] for option in shared if kind == "adamw" or groups[0][option]},
        "groups": [
            {"match": names, "learning_rate_scale": rate / base if base else 1.0, "weight_decay": decay}
            for names, rate, decay in zip(members, rates, decays, strict=True)
        ],
    }
    return settings_from_dict(OptimizerSettings, tree, "optimizer")


def _names_of_groups(groups: Iterable[Mapping[str, Any]], module: nn.Module, optimizer: str) -> list[list[str]]:
    names = {id(p): name for name, p in module.named_parameters()}
    members = [[names.get(id(p), "") for p in group["params"]] for group in groups]
    in_groups = {name for group in members for name in group}
    check_input(
        "" not in in_groups, f"parallelize: {optimizer} has a parameter that is not of the module; make it anew"
    )
    missing = [name for name, p in module.named_parameters() if p.requires_grad and name not in in_groups]
    check_input(
        not missing,
        f"parallelize: {optimizer} does not have {', '.join(missing[:3])}, which would be trained; add it, or set its "
        "requires_grad to False",
    )
    return members


def optimizer_text(settings: OptimizerSettings, module: nn.Module) -> str:
    """The optimizer of a module in one line: its options, and which parameters decay."""
    adamw, sgd = f"betas {settings.betas[0]:g} and {settings.betas[1]:g}, eps {settings.eps:g}", ""
    if settings.momentum:
        sgd = f"{'Nesterov ' * settings.nesterov}momentum {settings.momentum:g}"
    decays = dict[float, list[str]]()
    rates = set[float]()
    for (scale, decay), members in group_parameters(module, settings).items():
        decays.setdefault(decay, []).extend(members)
        rates.add(settings.learning_rate * scale)
    parts = [
        "AdamW" if settings.name == "adamw" else "SGD",
        "learning rate " + " and ".join(f"{rate:g}" for rate in sorted(rates, reverse=True)),
        adamw if settings.name == "adamw" else sgd,
        *(f"weight decay {decay:g} of {_short_list(names)}" for decay, names in sorted(decays.items(), reverse=True)),
        "no clipping" if settings.clip_norm is None else f"gradients clipped to norm {settings.clip_norm:g}",
    ]
    return ", ".join(filter(None, parts))


def _short_list(names: list[str]) -> str:
    shown = ", ".join(names[:2])
    return f"{len(names)} parameters ({shown}{', ...' if len(names) > 2 else ''})"
