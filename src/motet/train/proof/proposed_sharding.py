"""The split of a job's model over tensor-parallel ranks: proven by the first rank, which tells the others."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from motet.collectives.execute.api import broadcast
from motet.core.batch import Batch, BatchSource
from motet.core.errors import InputError, check_input
from motet.core.trace import log_if_slow
from motet.models.build import TrainableModel, build_trainable_model
from motet.models.settings import UserModuleSettings
from motet.models.spec.model_spec import spec_from_settings
from motet.monitor.stdout_stderr import stderr_console
from motet.parallel.context_parallel.attention_calls import AttentionCall
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import (
    CONTEXT_DIMENSION,
    PIPELINE_DIMENSION,
    TENSOR_DIMENSION,
    ModelInventory,
    ModelSharding,
)
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.pipeline.stages.stage_balance import BlockCosts, check_stages, costs_of_spec
from motet.parallel.pipeline.stages.stage_proof import SizedForward
from motet.parallel.pipeline.stages.stage_proposal import cut_stages, propose_stages, with_wire_dtypes
from motet.parallel.process.process_group import RankGroup, broadcast_text, refuse_together
from motet.parallel.proof.context_proof import prove_context
from motet.parallel.proof.proof_values import random_values
from motet.parallel.proof.twin_match import TwinMismatchError
from motet.parallel.proof.twin_transfer import TwinTransfer
from motet.parallel.tensor_parallel.activation_sizes import with_activation_sizes
from motet.parallel.tensor_parallel.sharding_proposal import (
    ProofForwards,
    check_split_share,
    proof_lengths,
    propose_sharding,
    splits_layers,
)
from motet.train.job import Job, batch_shape
from motet.train.optimizer.module_plan import model_inventory
from motet.train.proof.context_batches import context_examples, window_examples
from motet.train.proof.module_key import proof_key
from motet.train.proof.proof_cache import EARLIER_RUN, StoredProof, open_proof_cache
from motet.train.proof.twin_of_job import (
    Twin,
    attention_of_job,
    check_memory_of_proof,
    layouts_of_twins,
    make_narrow_twin,
    make_twin,
    trace_of_job,
)

LARGEST_WITHOUT_TWIN = 16_000_000  # Parameters: such a model is small itself
_PROOF_ROWS = 2
_MODEL_SHARDING = TypeAdapter(ModelSharding)


def sharding_on_ranks(propose: Callable[[], ModelSharding], group: RankGroup, dims: ParallelDims) -> ModelSharding:
    """Give all ranks the split that the first one proposes, if they split layers, blocks or rows."""
    if dims.size(TENSOR_DIMENSION, PIPELINE_DIMENSION, CONTEXT_DIMENSION) == 1:
        return ModelSharding()
    problem, sharding = "", ModelSharding()
    try:
        sharding = propose() if group.rank == 0 else sharding
    except InputError as error:
        problem = str(error)
    refuse_together(problem, group)
    text = broadcast_text(_MODEL_SHARDING.dump_json(sharding).decode(), group)
    return _MODEL_SHARDING.validate_json(text)


def agreed_sharding(
    model: TrainableModel,
    propose: Callable[[TrainableModel], ModelSharding],
    known: ModelSharding | None,
    *,
    group: RankGroup,
    dims: ParallelDims,
) -> ModelSharding:
    """The split of the model. In a pipeline no rank can run the module's check on tokens, so the proof runs it."""
    way = torch.zeros(1, dtype=torch.int64, device=group.device)

    def check_on_tokens() -> int:
        way[0] = model.check_on_tokens() if model.check_on_tokens else 0
        return int(way[0])

    def use_check(value: int) -> None:
        way[0] = value
        model.use_check(value)

    proven = replace(model, check_on_tokens=check_on_tokens, use_check=use_check)
    sharding = sharding_on_ranks(lambda: propose(proven), group, dims) if known is None else known
    if sharding.stages:
        if known is not None and group.rank == 0:
            with random_values(model.module), torch.no_grad():
                check_on_tokens()
        broadcast(way, group)
        model.use_check(int(way[0]))
    return sharding


def sharding_of_model(job: Job, model: TrainableModel, data: BatchSource, *, layout: Layout) -> ModelSharding:
    """The proven split of a model, whose parameters may be on the meta device.

    A model beyond a size is proven by its smaller twin, once for all runs; others by few tokens of the job's data.
    """
    if sum(parameter.numel() for parameter in model.module.parameters()) <= LARGEST_WITHOUT_TWIN:
        sharding = _proven(job, model, data, layout=layout)
    else:
        sharding = _sharding_of_large_model(job, model, layout)
    check_split_share(model.module, sharding, layout.dims, required=job.layout.require_split)
    if layout.sharding.reproducible_batch_size is not None:
        _check_sums_of_one_rank(sharding)
    return sharding


def _sharding_of_large_model(job: Job, model: TrainableModel, layout: Layout) -> ModelSharding:
    """The split that was proven in an earlier run, or else a new one, which is kept."""
    custom = job.model if isinstance(job.model, UserModuleSettings) and job.model.hf_path is None else None
    factory = custom.factory.partition(":")[0] if custom else ""
    cache, key = open_proof_cache(), proof_key(model.module, *_proof_settings(job, layout), factory=factory)
    if key is not None and (known := cache.read(key)) is not None:
        model.use_check(known.way)
        sharding = _MODEL_SHARDING.validate_json(known.sharding)
        return replace(sharding, proof=sharding.proof + EARLIER_RUN)
    try:
        with log_if_slow(_log, f"proving how ranks split the model of job {job.name!r} (once for all runs) ..."):
            sharding, way = _sharding_by_twin(job, model, layout)
    except TwinMismatchError as mismatch:
        check_memory_of_proof(model.module, str(mismatch))
        check = _CheckOnTokens(model)
        proven = _proven(job, replace(model, check_on_tokens=check.run), RandomBatches(job, model), layout=layout)
        sharding, way = replace(proven, proof=f"proven by runs of all of it, since {mismatch}"), check.way
    if key is not None:
        cache.write(StoredProof.of(key, _MODEL_SHARDING.dump_json(sharding).decode(), way=way))
    model.use_check(way)
    return sharding


def _log(text: str) -> None:
    stderr_console().print(text, highlight=False, soft_wrap=True)


def _proof_settings(job: Job, layout: Layout) -> list[object]:
    """Settings that the proof of a split depends on, besides the module."""
    precision = job.precision.resolved
    return [
        job.model.model_dump(mode="json"),
        job.layout.model_dump(mode="json", include={"sp", "rules", "stages"}),
        layout.dims.size(TENSOR_DIMENSION),
        (job.data.objective, job.data.sequence_length, min(_PROOF_ROWS, job.data.batch_sequences)),
        (precision.master, precision.compute),
        _stage_ranks(layout) if layout.dims.size(PIPELINE_DIMENSION) > 1 else (),
        (layout.dims.size(CONTEXT_DIMENSION) > 1, job.data.restart_documents),
    ]


def _sharding_by_twin(job: Job, model: TrainableModel, layout: Layout) -> tuple[ModelSharding, int]:
    """The split that is proven on a smaller twin, and the result of the twin's check on tokens."""
    full, stages, stage_ranks = trace_of_job(job, model), tuple[range, ...](), tuple[int, ...]()
    observe = partial(attention_of_job, job, model)
    if layout.dims.size(PIPELINE_DIMENSION) > 1:
        stage_ranks = _stage_ranks(layout)
        stages = cut_stages(full.module, full.blocks, len(stage_ranks), cuts=job.layout.stages, costs=_costs(job))
        check_stages(stages, len(full.blocks), type(full.module).__name__)
    degree, problem = layout.dims.size(TENSOR_DIMENSION), TwinMismatchError()
    for twin_layout in layouts_of_twins(job, full, layout):
        try:
            twin = make_twin(job, full, twin_layout, stages=stages, full_degree=degree)
            return _sharding_of_twin(twin, degree, observe, stages=stages, stage_ranks=stage_ranks)
        except TwinMismatchError as mismatch:
            problem = mismatch
    twin = make_narrow_twin(job, full, layout, stages=stages, reason=str(problem))
    return _sharding_of_twin(twin, degree, observe, stages=stages, stage_ranks=stage_ranks)


def _sharding_of_twin(
    twin: Twin,
    degree: int,
    observe: Callable[[int], tuple[AttentionCall, ...]],
    *,
    stages: Sequence[range],
    stage_ranks: Sequence[int],
) -> tuple[ModelSharding, int]:
    """The split of a model over `degree` ranks, from that of its twin, which is proven here; and the check's result,
    with which `observe` gives the calls of attention of the model itself."""
    check, data = _CheckOnTokens(twin.model), RandomBatches(twin.job, twin.model)
    checked = replace(twin.model, check_on_tokens=check.run)
    with one_thread():
        try:
            proven = _proven(twin.job, checked, data, layout=twin.layout, cuts=twin.single_blocks if stages else ())
        except InputError:
            if not twin.stages:
                raise
            proven = _proven(twin.job, checked, data, layout=twin.layout, cuts=twin.stages)
    twin_degree = twin.layout.dims.size(TENSOR_DIMENSION)
    attention = observe(check.way) if proven.attention else ()
    sharding = TwinTransfer(twin.match, proven, degree, twin_degree, attention).sharding(stages, stage_ranks)
    return replace(sharding, proof=twin.description), check.way


@dataclass
class _CheckOnTokens:
    """A model's check on few tokens, and its result."""

    model: TrainableModel
    way: int = 0

    def run(self) -> int:
        self.way = self.model.check_on_tokens() if self.model.check_on_tokens else 0
        return self.way


@contextmanager
def one_thread() -> Iterator[None]:
    """A context of one thread, in which products of a few rows and columns do not wait for others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _proven(
    job: Job, model: TrainableModel, data: BatchSource, *, layout: Layout, cuts: Sequence[range] = ()
) -> ModelSharding:
    """The split of a model by runs of all of it; `cuts` are stages in place of those of the layout."""
    rows, degree = min(_PROOF_ROWS, job.data.batch_sequences), layout.dims.size(TENSOR_DIMENSION)
    batch = data.batch(0, range(rows))
    lengths = sorted({tokens.shape[1] for tokens in _tokens_by_field(batch).values()})
    batches = [_first_tokens(batch, length, degree) for length in proof_lengths(layout.dims, lengths[-1])]
    examples = ProofForwards(
        [partial(model.loss_sum, each) for each in batches],
        rows,
        [] if model.has_own_loss else [partial(model.logits, each) for each in batches],
        vocab_size=model.vocab_size,
        prepare=model.check_on_tokens,
    )
    settings, module, sharding = job.layout, model.module, ModelSharding()
    if splits_layers(layout.dims):
        sharding = propose_sharding(module, examples, layout.dims, splits_sequence=settings.sp, rules=settings.rules)
        sharding = with_activation_sizes(sharding, module, model.loss_sum, batch=batch)
    if layout.dims.size(CONTEXT_DIMENSION) > 1:
        sharding = replace(sharding, attention=_proven_attention(job, model, batch, layout=layout))
    if layout.dims.size(PIPELINE_DIMENSION) == 1:
        return sharding
    return _with_stages(job, model, batch, sharding=sharding, layout=layout, cuts=cuts)


def _proven_attention(job: Job, model: TrainableModel, batch: Batch, *, layout: Layout) -> tuple[AttentionCall, ...]:
    """The calls of attention of a model whose tokens meet nowhere else."""
    packs = job.data.restart_documents and job.data.objective != "classify"
    prove = partial(
        prove_context,
        model.module,
        model.loss_sum,
        ranks=layout.dims.size(CONTEXT_DIMENSION),
        prepare=model.check_on_tokens,
    )
    last = min(job.data.sequence_length, model.context or job.data.sequence_length) - 1
    knows = packs or not isinstance(job.model, UserModuleSettings) or job.model.hf_path is not None
    calls = prove(context_examples(batch, packs=packs, last_position=last, knows_documents=knows))
    if longer := window_examples(batch, calls, packs=packs):
        prove(longer)
    return calls


def _with_stages(
    job: Job, model: TrainableModel, batch: Batch, *, sharding: ModelSharding, layout: Layout, cuts: Sequence[range]
) -> ModelSharding:
    """The same sharding with proven stages, by few tokens of a batch in several shapes."""
    rows, longest = batch.sizes["rows"], batch.sizes["tokens"]
    source = batch.sizes.get("source tokens", 1)
    shapes = [(rows, min(longest, 7), min(source, 5)), (1, min(longest, 5), min(source, 6)), (rows, min(longest, 6), 4)]
    examples = [batch.first_tokens(*shape) for shape in shapes]
    forwards = [SizedForward(partial(model.loss_sum, each), each.sizes) for each in examples]
    staged = propose_stages(
        model.module,
        forwards,
        sharding,
        dims=layout.dims,
        stage_ranks=range(len(cuts)) if cuts else _stage_ranks(layout),
        cuts=",".join(f"{blocks.start}-{blocks.stop - 1}" for blocks in cuts) or job.layout.stages,
        costs=_costs(job),
        prepare=model.check_on_tokens,
    )
    compute = getattr(torch, job.precision.resolved.compute)
    return with_wire_dtypes(model.module, forwards[1].forward, staged, compute=compute)


def _stage_ranks(layout: Layout) -> tuple[int, ...]:
    """The pipeline rank of each stage."""
    return tuple(layout.pipeline_schedule(layout.sharding.microbatches).stage_ranks)


def _costs(job: Job) -> BlockCosts | None:
    """The costs of the blocks, or None where the sizes of the products are not known."""
    try:
        return costs_of_spec(spec_from_settings(job.model), batch_shape(job, 1), job.precision.resolved.compute)
    except InputError:
        return None


def _check_sums_of_one_rank(sharding: ModelSharding) -> None:
    """Refuse stages that add up parts of a gradient which one rank computes from a sum of these parts."""
    read_by_many = [
        wire.argument for wires in sharding.wires for wire in wires if wire.is_constant and wire.needs_gradient
    ]
    copied = [name for name, stages in sharding.stage_tensors.items() if len(stages) > 2]
    reason = f"blocks of several stages read argument {read_by_many[0]!r}" if read_by_many else ""
    reason = reason or (f"more than two stages hold {copied[0]}" if copied else "")
    check_input(
        not reason,
        f"run.reproducible = 'layout': {reason}, whose gradient stages add up in another order than one rank; leave "
        "layout.pp or run.reproducible out",
    )


def _tokens_by_field(batch: Batch) -> dict[str, Tensor]:
    return {name: value for name, value in batch.tensors().items() if value.ndim == 2}


def _first_tokens(batch: Batch, length: int, degree: int) -> Batch:
    """The first tokens of each row; of sequences that ranks do not divide, a number that they do not divide either."""
    by_field = _tokens_by_field(batch).items()
    cut: dict[str, Any] = {name: t[:, : length - bool(t.shape[1] % degree)] for name, t in by_field}
    return replace(batch, **cut)


def sharding_of_job(job: Job, layout: Layout) -> tuple[ModelInventory, ModelSharding]:
    """The tensors of a job's model and their split, proven on random tokens, without data or a process group."""
    dtype, device = getattr(torch, job.precision.resolved.master), torch.device("cpu")
    model = build_trainable_model(job.model, job.run.seed, dtype, device, on_meta=True)
    inventory = model_inventory(model.module, job.optimizer)
    return inventory, sharding_of_model(job, model, RandomBatches(job, model), layout=layout)


@dataclass(frozen=True)
class RandomBatches:
    """A `BatchSource` of random tokens in the shapes of a job's data."""

    job: Job
    model: TrainableModel

    def batch(self, step: int, rows: range) -> Batch:
        shape, generator = batch_shape(self.job, len(rows)), torch.Generator().manual_seed(step)
        entries, classes = self.model.vocab_size or 2, self.model.num_classes or 2

        def draw(below: int, *sizes: int) -> Tensor:
            return torch.randint(below, sizes, generator=generator)

        is_classified = self.job.data.objective == "classify"
        targets = draw(classes, *((shape.rows,) if is_classified else (shape.rows, shape.length)))
        return Batch(
            draw(entries, shape.rows, shape.length),
            targets,
            torch.ones(targets.shape),
            torch.tensor(rows),
            source=draw(entries, shape.rows, shape.source_length) if shape.source_length else None,
        )
