"""The layers of a job whose experts are balanced, with the scores of their routers and their corrections."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from motet.core.errors import InputError
from motet.models.settings import BalanceSettings, DecoderSettings, ModelSettings, UserModuleSettings
from motet.models.trace.model_trace import build_on_meta
from motet.parallel.process.module_inventory import mark_load_buffer
from motet.train.balance.router_trial import correction_of, score_kind_of
from motet.train.balance.routers import RoutedLayer, check_has_layers, experts_by_shape, find_routed_layers
from motet.train.balance.terms import ScoreKind
from motet.train.job import Job


@dataclass(frozen=True)
class BalancedLayer:
    """A routed layer, the scores of its router, and the buffer that corrects its choice."""

    layer: RoutedLayer
    scores: ScoreKind
    correction: str | None = None


def balance_of_model(settings: ModelSettings) -> BalanceSettings | None:
    """The balance of a model; None where nothing is counted."""
    if isinstance(settings, DecoderSettings):
        return settings.balance if settings.experts else None
    return settings.balance if isinstance(settings, UserModuleSettings) else None


def find_balanced_layers(job: Job, module: nn.Module) -> tuple[BalancedLayer, ...]:
    """The balanced layers of a job's model; none where nothing is counted. Refuses routers that draw random numbers,
    and a balance that a router cannot have."""
    settings, dtype = balance_of_model(job.model), getattr(torch, job.precision.resolved.master)
    if settings is None and not experts_by_shape(module):
        return ()
    if settings is None:
        _refuse_noise(job, dtype)
        return ()
    layers = find_routed_layers(job.model, dtype, job.data.objective)
    check_has_layers(layers, job.model)
    trials = dict[object, tuple[ScoreKind, str | None]]()
    for layer in layers:
        if (kind := _kind(module, layer)) not in trials:
            name = correction_of(module, layer) if settings.kind == "bias" else None
            relative = name and name.removeprefix(layer.name)
            trials[kind] = score_kind_of(module, layer), relative
    balanced = []
    for layer in layers:
        scores, relative = trials[_kind(module, layer)]
        balanced.append(BalancedLayer(layer, scores, relative and layer.name + relative))
    return tuple(balanced)


def balanced_layers_of_job(job: Job) -> tuple[BalancedLayer, ...]:
    """The balanced layers of a job, from its files alone; refuses what ranks would refuse."""
    return find_balanced_layers(job, build_on_meta(job.model, getattr(torch, job.precision.resolved.master)).module)


def _kind(module: nn.Module, layer: RoutedLayer) -> object:
    """Routers of one kind have the same code and sizes, so one trial is enough."""
    router = module.get_submodule(layer.router)
    tensors = tuple((name, tensor.shape) for name, tensor in router.state_dict(keep_vars=True).items())
    return type(router), tensors, layer.router.removeprefix(layer.name), layer.count, layer.per_token


def _refuse_noise(job: Job, dtype: torch.dtype) -> None:
    """Refuse routers that draw random numbers, where the model can run without memory; others train as before."""
    try:
        find_routed_layers(job.model, dtype, job.data.objective)
    except InputError as error:
        if "draws random numbers" in str(error):
            raise


def register_loads(module: nn.Module, layers: Sequence[BalancedLayer]) -> None:
    """Give each router a buffer for the loads of its experts in the last step. Called before ranks shard the module."""
    for each in layers:
        router, parameter = module.get_submodule(each.layer.router), next(module.parameters())
        device = torch.device("cpu") if parameter.is_meta else parameter.device
        router.register_buffer("load", torch.zeros(each.layer.count, dtype=torch.int64, device=device))
        mark_load_buffer(router, "load")
        if each.correction is not None:
            owner, _, name = each.correction.rpartition(".")
            mark_load_buffer(module.get_submodule(owner), name)
