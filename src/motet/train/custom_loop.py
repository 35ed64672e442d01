"""A module that is trained in a custom loop: settings, the split of its layers, and the engine that trains it."""

import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from motet.core.config_loading import SettingsT, settings_from_dict
from motet.core.errors import InputError, MotetError, check_input
from motet.memory.policy_choice import MemorySettings
from motet.memory.tiers.device_limit import DeviceLimit
from motet.models.layout_invariant_dropout import has_dropout
from motet.models.torch_private import is_in_backward
from motet.models.user_module import check_parameters
from motet.monitor.stdout_stderr import stderr_console
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings, check_communication
from motet.parallel.layout import Layout, LayoutSettings, parse_layout, resolve_layout
from motet.parallel.local_sgd.schedule import LocalSGDSettings
from motet.parallel.model_sharding import CONTEXT_DIMENSION, PIPELINE_DIMENSION, TENSOR_DIMENSION, ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.pipeline.stages.stage_module import PipelineStages
from motet.parallel.pipeline.stages.stage_proposal import propose_stages, with_wire_dtypes
from motet.parallel.process.process_group import (
    RankGroup,
    check_same_on_all_ranks,
    default_rank_group,
    module_signature,
)
from motet.parallel.proof.module_calls import tensors_in
from motet.parallel.tensor_parallel.sharding_proposal import (
    ProofForwards,
    check_split_share,
    proof_lengths,
    propose_sharding,
    whole_share_warning,
)
from motet.parallel.torch_private import tree_leaves, tree_map_only
from motet.precision.recipe import PrecisionSettings
from motet.train.config_rules import check_compositions, check_no_unused_settings
from motet.train.engine import TrainingEngine, build_engine
from motet.train.optimizer.module_plan import ParallelizeSettings
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.torch_optimizers import TorchOptimizer, optimizer_text, settings_of_torch_optimizer
from motet.train.pipeline.custom_batches import LossFunction, proof_forwards
from motet.train.proof.custom_rows import prove_rows
from motet.train.proposed_sharding import sharding_on_ranks


def parallelize(  # noqa: PLR0913  # sections of a job, by name
    module: nn.Module,
    layout: str | LayoutSettings = "",
    *,
    loss: LossFunction | None = None,
    example: Any = None,
    optimizer: Mapping[str, Any] | OptimizerSettings | TorchOptimizer | None = None,
    precision: str | Mapping[str, Any] | PrecisionSettings = "fp32",
    communication: Mapping[str, Any] | CommunicationSettings | None = None,
    outer: Mapping[str, Any] | LocalSGDSettings | None = None,
    memory: Mapping[str, Any] | MemorySettings | None = None,
) -> TrainingEngine:
    """Distribute a module over the ranks of the process group by a layout such as "zero=2 shard_group=4".
    `optimizer`, `communication`, `outer`, `memory` and `precision` are sections of a job; a string is the recipe. From
    an AdamW or SGD of torch, its class, or a partial of the class, motet takes all options, and clips no gradient.
    `layout.tp`, `layout.cp` and `layout.pp` need an `example`, with which the split is proven: a batch, or a list of
    batches. The loss is computed from it, or the module is called with it. Without a process group there is one
    rank."""
    _show_user_errors_as_sentences()
    layout = layout if isinstance(layout, LayoutSettings) else parse_layout(layout)
    servers = f"layout.data = {layout.data!r} has no servers in a custom loop; leave it out, or use `motet train`"
    check_input(not layout.uses_server_processes, servers)
    settings = ParallelizeSettings(
        layout,
        _optimizer_settings(optimizer, module),
        _to_settings(CommunicationSettings, communication, "communication"),
        _to_settings(LocalSGDSettings, outer, "outer"),
        _to_settings(
            PrecisionSettings, {"recipe": precision} if isinstance(precision, str) else precision, "precision"
        ),
        _to_settings(MemorySettings, memory, "memory"),
    )
    _check_numerics(settings.precision)
    check_no_unused_settings(settings, "parallelize")
    check_compositions(settings._asdict())
    group = _default_group(module)
    rows = group.world * layout.microbatches_of_step
    resolved = resolve_layout(layout, group.world, rows)
    check_communication(
        settings.communication,
        resolved.sharding,
        independent_replicas=settings.outer.every is not None,
        uses_cluster=resolved.dims.size(TENSOR_DIMENSION) > 1,
    )
    sections = zip(settings._fields, settings, strict=True)
    setting_lines = [f"{name}.{key} = {value!r}" for name, section in sections for key, value in section]
    check_same_on_all_ranks([*setting_lines, *module_signature(module)], group)
    _refuse_own_dropout(module, shares_rows=resolved.dims.size(TENSOR_DIMENSION, CONTEXT_DIMENSION) > 1)
    _describe_optimizer(settings.optimizer, module, group)
    compute = getattr(torch, settings.precision.resolved.compute)
    prove = partial(_prove_split, module, resolved, layout, loss=loss, example=example, compute=compute)
    sharding = _sharding_with_warning(module, prove, group, dims=resolved.dims)
    engine = build_engine(
        module, group, layout=resolved, settings=settings, batch_sequences=rows, loss=loss, model_sharding=sharding
    )
    engine.data_rank, engine.data_ranks = resolved.data_rank(group.rank), resolved.data_ranks
    _prepare_steps(engine, settings.memory.device_limit)
    _PARALLELIZED_MODULES.update(module.modules())
    return engine


def _optimizer_settings(
    optimizer: Mapping[str, Any] | OptimizerSettings | TorchOptimizer | None, module: nn.Module
) -> OptimizerSettings:
    if isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer):
        return settings_of_torch_optimizer(optimizer, module)
    settings = _to_settings(OptimizerSettings, optimizer, "optimizer")
    check_input(
        "schedule" not in settings.model_fields_set,
        "optimizer.schedule has no effect in a custom loop; give step a learning_rate=...",
    )
    return settings


def _describe_optimizer(settings: OptimizerSettings, module: nn.Module, group: RankGroup) -> None:
    if group.rank == 0:
        text = f"parallelize: {optimizer_text(settings, module)}"
        stderr_console().print(text, highlight=False, soft_wrap=True)


def _check_numerics(precision: PrecisionSettings) -> None:
    """Refuse settings that hold for the complete process, which a custom loop sets itself."""
    check_input(
        precision.recipe != "tf32",
        "precision.recipe = 'tf32' has no effect in a custom loop; use fp32, and call "
        "torch.set_float32_matmul_precision('high')",
    )
    check_input(
        not precision.emulate,
        "precision.emulate = true has no effect in a custom loop; leave it out, and train inside of "
        "motet.precision.numerics.float32_products(dtype)",
    )
    check_input(
        precision.attention == "auto",
        f"precision.attention = {precision.attention!r} has no effect in a custom loop; leave it out, and train inside "
        "of torch.nn.attention.sdpa_kernel(...)",
    )


def _sharding_with_warning(
    module: nn.Module, prove: Callable[[], ModelSharding], group: RankGroup, *, dims: ParallelDims
) -> ModelSharding:
    """The split that the first rank proves; it warns if a large share of the module stays whole."""
    sharding = sharding_on_ranks(prove, group, dims)
    if text := whole_share_warning(module, sharding, dims) if group.rank == 0 else "":
        warnings.warn(text, stacklevel=3)
    return sharding


def _prove_split(
    module: nn.Module,
    layout: Layout,
    settings: LayoutSettings,
    *,
    loss: LossFunction | None,
    example: Any,
    compute: torch.dtype,
) -> ModelSharding:
    """The proven split of a module, by running it, or its loss, on the example."""
    dims, sharding = layout.dims, ModelSharding()
    names = [name for name in (TENSOR_DIMENSION, CONTEXT_DIMENSION, PIPELINE_DIMENSION) if dims.size(name) > 1]
    words = " and ".join(f"layout.{name} = {dims.size(name)}" for name in names)
    check_input(
        example is not None,
        f"{words} splits layers, rows or blocks, and each split is proven by running the module; give parallelize an "
        "example=..., such as a batch",
    )
    run = partial(_first_output, module, loss)
    if TENSOR_DIMENSION in names:
        sharding = _prove_layers(module, settings, dims, run=run, example=example, has_loss=loss is not None)
        check_split_share(module, sharding, dims, required=settings.require_split)
    if CONTEXT_DIMENSION in names:
        check_input(loss is not None, f"{words}: ranks compute the losses of their tokens; give parallelize a loss=...")
        assert loss is not None
        calls = prove_rows(module, loss, example, ranks=dims.size(CONTEXT_DIMENSION))
        sharding = replace(sharding, attention=calls)
    if PIPELINE_DIMENSION not in names:
        return sharding
    check_input(loss is not None, f"{words}: the last stage computes the loss; give parallelize a loss=...")
    forwards = proof_forwards(module, run, example)
    stage_ranks = layout.pipeline_schedule(layout.sharding.microbatches).stage_ranks
    staged = propose_stages(module, forwards, sharding, dims=dims, stage_ranks=stage_ranks, cuts=settings.stages)
    return with_wire_dtypes(module, forwards[1].forward, staged, compute=compute)


def _prove_layers(
    module: nn.Module,
    settings: LayoutSettings,
    dims: ParallelDims,
    *,
    run: Callable[[Any], Tensor],
    example: Any,
    has_loss: bool,
) -> ModelSharding:
    """The proven split of the layers of a module."""
    try:
        batches = _proof_batches(example, dims, run)
    except Exception as error:
        name = "the loss" if has_loss else type(module).__name__
        raise InputError(
            f"parallelize: {name} fails on example=... with {type(error).__name__}: {error}; give a batch as a step "
            "gets it, or a list of such batches"
        ) from error
    rows = next(len(tensor) for tensor in tree_leaves(example) if isinstance(tensor, Tensor) and tensor.ndim)
    forwards = ProofForwards([partial(run, batch) for batch in batches], rows)
    return propose_sharding(module, forwards, dims, splits_sequence=settings.sp, rules=settings.rules)


def _proof_batches(example: Any, dims: ParallelDims, run: Callable[[Any], Tensor]) -> list[Any]:
    """Batches that can be run: those of a list, or the first tokens of one batch, if fewer tokens can be run too."""
    batches = example if isinstance(example, list) else [example]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for batch in batches:
            run(batch)
        lengths = {t.shape[1] for t in tree_leaves(batches[0]) if isinstance(t, Tensor) and t.ndim > 1}
        if len(batches) > 1 or not lengths:
            return batches
        longest = max(lengths)
        shorter = [_first_tokens(batches[0], longest, length) for length in proof_lengths(dims, longest)]
        try:
            for batch in shorter:
                run(batch)
        except Exception:  # noqa: BLE001  # a module that needs all tokens of a batch may raise anything
            return batches
        return shorter


def _first_output(module: nn.Module, loss: LossFunction | None, batch: Any) -> Tensor:
    if any(p.dtype == torch.float64 for p in module.parameters()):  # The dtype of proofs
        batch = tree_map_only(Tensor, lambda t: t.double() if t.dtype == torch.float32 else t, batch)
    if loss is not None:
        output: Any = loss(module, batch)
    elif isinstance(batch, Mapping):
        output = module(**batch)
    else:
        output = module(*batch) if isinstance(batch, tuple) else module(batch)
    return tensors_in(output)[0]


def _first_tokens(batch: Any, longest: int, length: int) -> Any:
    """The batch with all dimensions of the longest length cut, but that of rows."""

    def cut(tensor: Tensor) -> Tensor:
        for dim in (dim for dim in range(1, tensor.ndim) if tensor.shape[dim] == longest):
            tensor = tensor.narrow(dim, 0, length)
        return tensor

    return tree_map_only(Tensor, cut, batch)


def _show_user_errors_as_sentences() -> None:
    """Show a `MotetError` that ends the process as its sentence and the line of the user's program, without frames of
    motet."""
    others_hook = sys.excepthook
    if isinstance(others_hook, partial) and others_hook.func is _show_error:
        return
    sys.excepthook = partial(_show_error, others_hook=others_hook)


def _show_error(
    kind: type[BaseException], error: BaseException, trace: Any, *, others_hook: Callable[..., object]
) -> None:
    if not isinstance(error, MotetError):
        others_hook(kind, error, trace)
    else:
        frames = [f for f in traceback.extract_tb(trace) if not Path(f.filename).is_relative_to(_MOTET_FOLDER)]
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        group = default_rank_group(torch.device("cpu"))
        rank = f"[rank {group.rank}] " if group.world > 1 else ""
        stderr_console().print(f"{rank}motet: {error}{place}", highlight=False, soft_wrap=True)


_MOTET_FOLDER = Path(__file__).parents[1]


def _prepare_steps(engine: TrainingEngine, limit: int | None) -> None:
    """Let steps have a limit of the device, and refuse calls of the module where they cannot work."""
    if limit is not None:
        engine.step_limit = DeviceLimit(limit, engine.group.device, known=engine.recomputation.known_tensors)
    if engine.pipeline is not None:
        engine.module.register_forward_pre_hook(partial(_refuse_outside_of_stages, engine.pipeline.stages))


def _refuse_own_dropout(module: nn.Module, *, shares_rows: bool) -> None:
    config: Any = getattr(module, "config", None)  # The config of a transformers model
    settings_of_module = config.to_dict() if hasattr(config, "to_dict") else None
    check_input(
        not shares_rows or not has_dropout(module, settings_of_module),
        f"{type(module).__name__} has dropout, which in a custom loop is PyTorch's: ranks that split layers or rows "
        "would draw different masks for what they share; set it to 0, or train the module by a job (model.factory)",
    )


def _refuse_outside_of_stages(stages: PipelineStages, module: nn.Module, *_: object) -> None:
    check_input(
        stages.is_running or is_in_backward(),
        f"{type(module).__name__} is called by itself, but ranks of a pipeline hold some of its blocks; call it in the "
        "loss that step computes, or load a checkpoint without layout.pp",
    )


_PARALLELIZED_MODULES: WeakSet[nn.Module] = WeakSet()


def _to_settings(settings_class: type[SettingsT], value: Mapping[str, Any] | SettingsT | None, name: str) -> SettingsT:
    return value if isinstance(value, settings_class) else settings_from_dict(settings_class, dict(value or {}), name)


def _default_group(module: nn.Module) -> RankGroup:
    devices = {str(p.device): name for name, p in module.named_parameters()}
    places = ", ".join(f"{name} on {device}" for device, name in devices.items())
    check_input(len(devices) < 2, f"the parameters of the module are on several devices ({places}); move it to one")
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    check_input(trained, "the module has no parameter that requires a gradient; there is nothing to train")
    check_input(
        not any(inner in _PARALLELIZED_MODULES for inner in module.modules()),
        "the module, or a part of it, is parallelized already; continue with its engine",
    )
    check_parameters(dict(module.named_parameters()), "parallelize")
    return default_rank_group(next(module.parameters()).device)
