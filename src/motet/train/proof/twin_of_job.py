"""The smaller twin of a job's model, on which splits and stages are proven at the cost of a small model.

The twin is made by the code that makes the model, from smaller sizes. It has as many blocks as it takes to have one of
each kind, and is matched with the model by forwards of both without memory.

The twin of a model whose sizes cannot be changed: few of its blocks and entries, at its own widths.

The memory of a proof that runs all of a model in float64, and a refusal where there is too little.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from motet.cluster.host_limits import read_memory_limits
from motet.core.batch import Batch
from motet.core.errors import InputError
from motet.core.units import format_bytes
from motet.models.build import TrainableModel, build_trainable_model
from motet.models.hf.hf_config import read_config
from motet.models.hf.hf_model import open_hf_checkpoint
from motet.models.parameter_values import set_values
from motet.models.settings import ModelSettings, TransformerSettings, UserModuleSettings
from motet.models.spec.shrink import SmallSizes
from motet.models.trace.model_trace import (
    OperatorRecorder,
    Recorder,
    UnrecordedForward,
    build_on_meta,
    explain_failures,
    run_recorded,
)
from motet.models.trace.record_reader import BatchSize
from motet.models.user_module import default_arguments, find_blocks, named_blocks
from motet.parallel.context_parallel.attention_calls import AttentionCall
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import CONTEXT_DIMENSION, TENSOR_DIMENSION
from motet.parallel.proof.context_proof import AttentionObserver
from motet.parallel.proof.module_calls import record_calls
from motet.parallel.proof.narrow_module import (
    blocks_to_keep,
    forms_of_blocks,
    keep_few_entries,
    pass_blocks,
    vocabulary_of,
)
from motet.parallel.proof.proof_values import LARGE_MODEL
from motet.parallel.proof.twin_match import TracedModule, TwinMatch, TwinMismatchError
from motet.train.job import Job
from motet.train.proof.context_batches import TWIN_WINDOW

_BLOCKS = (3, 4, 5, 6, 7, 8, 10, 12, 16, 24)  # Blocks of a twin, which is the smallest that has all kinds
_ROWS, _TOKENS, _SOURCE_TOKENS = 3, 13, 11  # Sizes of the forward in which twin and model are compared
_TRACE_SIZES = (_ROWS, _TOKENS, _SOURCE_TOKENS, _ROWS * _TOKENS, _ROWS * _SOURCE_TOKENS)
_HEAD_DIM, _ENTRIES = 8, 67
MOST_RANKS = 8  # The most ranks of a twin, if they divide its sizes as the job's ranks divide the model's


@dataclass(frozen=True)
class Twin:
    """A smaller model with the structure of a job's model."""

    job: Job
    model: TrainableModel
    match: TwinMatch
    layout: Layout  # Its ranks split the twin; they may be fewer than those of the job
    stages: tuple[range, ...]  # Its blocks, cut where blocks are like those at a cut of the model
    description: str  # The way in which it stands for the model

    @property
    def single_blocks(self) -> tuple[range, ...]:
        """Stages of one block each."""
        return tuple(range(i, i + 1) for i in range(len(self.match.twin.blocks)))


def layouts_of_twins(job: Job, full: TracedModule, layout: Layout) -> list[Layout]:
    """The layouts over whose ranks twins are split. If the job has more than `MOST_RANKS` tensor-parallel ranks, with
    which a proof takes long, the first layout has fewer. The last one is the job's layout.

    Fewer ranks stand for the job's if they divide all sizes that these divide, and no others.
    """
    degree = layout.dims.size(TENSOR_DIMENSION)
    sizes = {size for parameter in full.module.parameters() for size in parameter.shape} | {job.data.sequence_length}
    fewer = (
        n
        for n in range(MOST_RANKS, degree)
        if degree % n == 0 and all((size % n == 0) == (size % degree == 0) for size in sizes)
    )
    return [*(_with_tensor_ranks(layout, n) for n in islice(fewer, 1)), layout]


def _with_tensor_ranks(layout: Layout, degree: int) -> Layout:
    sizes = tuple((name, degree if name == TENSOR_DIMENSION else size) for name, size in layout.dims.sizes)
    return replace(layout, dims=replace(layout.dims, sizes=sizes))


def make_twin(
    job: Job, full: TracedModule, layout: Layout, *, stages: Sequence[range] = (), full_degree: int | None = None
) -> Twin:
    """The twin of a job's model for the ranks of a layout; raises TwinMismatchError where there is none.

    If the model is cut into stages, the twin has two neighbouring blocks like those at each cut. The twin of a layout
    with fewer tensor-parallel ranks than the job's `full_degree` has sizes that they divide as the job's ranks divide
    the sizes of the model.
    """
    degree, problem = layout.dims.size(TENSOR_DIMENSION), TwinMismatchError("its blocks are all of other kinds")
    is_user_code = isinstance(job.model, UserModuleSettings) and job.model.hf_path is None
    kept = {size for parameter in full.module.parameters() for size in parameter.shape}  # Sizes that the twin may share
    sizes = SmallSizes(
        degree=degree,
        large_degree=full_degree or degree,
        units_per_rank=2,
        head_dim=_HEAD_DIM,
        entries=max(_ENTRIES, 5 * degree),
        window=TWIN_WINDOW if layout.dims.size(CONTEXT_DIMENSION) > 1 else None,
        avoided=kept.union(_TRACE_SIZES),
    )
    for blocks in _BLOCKS:
        twin_job = job.model_copy(
            update={"model": _small_settings(job.model.without_stored_values(), replace(sizes, blocks=blocks))}
        )
        try:
            model = _build(twin_job, on_meta=not is_user_code)
        except InputError as error:
            raise TwinMismatchError(str(error)) from error
        small = trace_of_job(twin_job, model)
        try:
            match = TwinMatch(full, small, degree)
            cuts = sorted({match.border_like(stage.start) for stage in stages[1:]})
        except TwinMismatchError as error:
            problem = error
        else:
            starts = [0, *cuts, len(small.blocks)] if stages else []
            fewer_ranks = f", over {degree} of {full_degree} ranks" * (degree < (full_degree or degree))
            description = _description(match) + fewer_ranks
            return Twin(twin_job, model, match, layout, tuple(map(range, starts, starts[1:])), description)
        if len(small.blocks) >= len(full.blocks):
            break
    raise problem


def _description(match: TwinMatch) -> str:
    large, few = (sum(p.numel() for p in each.module.parameters()) for each in (match.full, match.twin))
    blocks = f"{len(match.twin.blocks)} of {len(match.full.blocks)} blocks"
    return f"proven on a smaller model of {blocks} and {few:,} of {large:,} parameters"


def _small_settings(model: ModelSettings, sizes: SmallSizes) -> ModelSettings:
    try:
        if isinstance(model, TransformerSettings):
            return type(model)(**{**model.model_dump(), **sizes.shrink_settings(model)})
        assert isinstance(model, UserModuleSettings)
        if model.hf_path is None:
            factory = model.factory
            arguments = sizes.shrink_config({**default_arguments(factory), **model.arguments})
        else:
            config = open_hf_checkpoint(model.hf_path, model.arguments).config.to_dict()
            in_file = read_config(Path(model.hf_path).expanduser())  # The file may have other names
            arguments = sizes.shrink_config({**config, **in_file, **model.arguments})
            path = model.hf_path  # Weights that are in the folder of a config do not fit
            factory = f"hf:{path if path.endswith('.json') else path.rstrip('/') + '/config.json'}"
    except ValueError as error:
        raise TwinMismatchError(" ".join(str(error).split())) from error
    except (TypeError, ZeroDivisionError, LookupError, AttributeError) as error:  # A list where others have a number
        raise TwinMismatchError(f"motet finds no smaller values of the settings of {_name_of(model)}") from error
    if not arguments:
        raise TwinMismatchError("no argument of model.factory is a size that motet knows")
    update = {"factory": factory, "arguments": {**model.arguments, **arguments}, "vocab_size": None}
    return model.model_copy(update=update)


def _name_of(model: ModelSettings) -> str:
    return model.factory if isinstance(model, UserModuleSettings) else str(getattr(model, "family", "model"))


def _build(job: Job, *, on_meta: bool) -> TrainableModel:
    dtype = getattr(torch, job.precision.resolved.master)
    return build_trainable_model(job.model, job.run.seed, dtype, torch.device("cpu"), on_meta=on_meta)


def trace_of_job(job: Job, model: TrainableModel) -> TracedModule:
    """A forward of a job's model without memory. A model whose parameters have values is made again without."""
    try:
        model = _without_memory(job, model)
        return TracedModule(model.module, _run_without_memory(job, model, OperatorRecorder(model.module)))
    except InputError as error:
        raise TwinMismatchError(str(error)) from error


def attention_of_job(job: Job, model: TrainableModel, way: int) -> tuple[AttentionCall, ...]:
    """The calls of attention in such a forward; `way` is the result of the model's check on tokens."""
    try:
        model = _without_memory(job, model)
        model.use_check(way)
        observer = AttentionObserver(model.module)

        def loss_sum(batch: Batch) -> Tensor:
            with observer.observing():
                return model.loss_sum(batch)

        _run_without_memory(job, replace(model, loss_sum=loss_sum), UnrecordedForward())
    except InputError as error:
        raise TwinMismatchError(str(error)) from error
    return tuple(observer.attention_calls)


def _without_memory(job: Job, model: TrainableModel) -> TrainableModel:
    if any(not parameter.is_meta for parameter in model.module.parameters()):
        return build_on_meta(job.model, getattr(torch, job.precision.resolved.master))
    return model


def _run_without_memory(job: Job, model: TrainableModel, recorder: Recorder) -> Recorder:
    source = _SOURCE_TOKENS if job.data.objective == "spans" else 0
    size = BatchSize(_ROWS, min(_TOKENS, model.context or _TOKENS), source)
    with explain_failures("it cannot run without memory"):
        return run_recorded(model, size, recorder, objective=job.data.objective)


# Values, gradients of the whole and of its parts, and the parts themselves, in float64 (measured: 35 for GPT-2).
_BYTES_PER_ELEMENT = 36


def bytes_of_proof(module: nn.Module) -> int:
    """The memory for the proof of a module, whose equal blocks share their memory if it is large."""
    elements = sum(parameter.numel() for parameter in module.parameters())
    if elements > LARGE_MODEL:
        blocks = [tuple((name, p.shape) for name, p in block.named_parameters()) for block in find_blocks(module)]
        sizes = {shapes: sum(shape.numel() for _, shape in shapes) for shapes in blocks}
        elements += sum(sizes.values()) - sum(sizes[shapes] for shapes in blocks)
    return elements * _BYTES_PER_ELEMENT


def check_memory_of_proof(module: nn.Module, reason: str) -> None:
    """Refuse a module that is too large to be proven; `reason` says why a smaller model does not stand for it."""
    needed, limit = bytes_of_proof(module), min(read_memory_limits(), key=lambda each: each.total_bytes)
    if needed > limit.total_bytes:
        raise InputError(
            f"layout.tp, layout.cp and layout.pp split a model after a proof, which takes {format_bytes(needed)} for "
            f"{type(module).__name__}, and {limit.name} {format_bytes(limit.total_bytes)}; no smaller model stands for "
            f"it: {reason}. Let model.factory take its sizes as arguments by their usual names, such as hidden_size, "
            "num_hidden_layers and num_attention_heads, so that motet can make a smaller one, or leave them out"
        )


def make_narrow_twin(
    job: Job, full: TracedModule, layout: Layout, *, stages: Sequence[range] = (), reason: str
) -> Twin:
    """The twin with few blocks; `reason` says why no smaller model does. Refuses blocks that are too large."""
    degree, dtype = layout.dims.size(TENSOR_DIMENSION), getattr(torch, job.precision.resolved.master)
    try:
        model = build_trainable_model(job.model, job.run.seed, dtype, torch.device("cpu"), on_meta=True)
        for parameter in model.module.parameters():
            if not parameter.is_meta:
                set_values(parameter, torch.empty_like(parameter, device="meta"))
    except InputError:
        model = build_on_meta(job.model, dtype)
    with record_calls(named_blocks(model.module)) as calls:
        trace_of_job(job, model)
    forms = forms_of_blocks(calls)
    if missing := [block for block in full.blocks if block not in forms]:
        raise TwinMismatchError(f"block {missing[0]} is not called again")
    kept = blocks_to_keep(full, forms, [stage.start for stage in stages[1:]])
    pass_blocks(model.module, kept, forms)
    parts = [model.module.get_submodule(name) for name, _ in full.parts("")]
    entries = few = model.vocab_size or vocabulary_of(parts)
    if entries is not None:
        few = keep_few_entries(parts, entries, degree)
        vocab_size, num_classes = (few if size == entries else size for size in (model.vocab_size, model.num_classes))
        model = replace(model, vocab_size=vocab_size, num_classes=num_classes)
    if len(kept) == len(full.blocks) and few == entries:
        raise TwinMismatchError(f"{reason}; and a proof would need all of its blocks and entries")
    check_memory_of_proof(model.module, reason)
    match = TwinMatch(full, trace_of_job(job, model), degree)
    blocks = f"{len(kept)} of {len(full.blocks)} blocks" if len(kept) < len(full.blocks) else f"all {len(kept)} blocks"
    sizes = blocks + f", {few} of {entries} entries" * (few != entries)
    return Twin(job, model, match, layout, (), f"proven block by block at full width ({sizes}), since {reason}")
