"""The split of a job's model over tensor-parallel ranks: proven by the first rank, which tells the others."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

from pydantic import TypeAdapter

from motet.core.batch import Batch
from motet.core.errors import InputError
from motet.models.build import TrainableModel
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.process.process_group import RankGroup
from motet.parallel.process.rank_consistency import broadcast_text, refuse_together
from motet.parallel.tensor_parallel.sharding_proposal import (
    ProofForwards,
    proof_lengths,
    propose_sharding,
    splits_layers,
)
from motet.train.job import Job
from motet.train.step import BatchSource

_PROOF_ROWS = 2
_MODEL_SHARDING = TypeAdapter(ModelSharding)


def sharding_on_ranks(propose: Callable[[], ModelSharding], group: RankGroup, dims: ParallelDims) -> ModelSharding:
    """Let all ranks have what the first one proposes, if they split layers."""
    if not splits_layers(dims):
        return ModelSharding()
    problem, sharding = "", ModelSharding()
    try:
        sharding = propose() if group.rank == 0 else sharding
    except InputError as error:
        problem = str(error)
    refuse_together(problem, group)
    text = broadcast_text(_MODEL_SHARDING.dump_json(sharding).decode(), group)
    return _MODEL_SHARDING.validate_json(text)


def sharding_of_model(job: Job, model: TrainableModel, data: BatchSource, *, layout: Layout) -> ModelSharding:
    """The proven split of a model, whose parameters may be on the meta device, by few tokens of the job's data."""
    rows = min(_PROOF_ROWS, job.data.batch_sequences)
    batch = data.batch(0, range(rows))
    batches = [_first_tokens(batch, length) for length in proof_lengths(layout.dims, batch.tokens.shape[1])]
    examples = ProofForwards(
        [partial(model.loss_sum, each) for each in batches],
        rows,
        [] if model.has_own_loss else [partial(model.logits, each) for each in batches],
        vocab_size=model.vocab_size,
        prepare=model.check_on_tokens,
    )
    settings = job.layout
    return propose_sharding(model.module, examples, layout.dims, splits_sequence=settings.sp, rules=settings.rules)


def _first_tokens(batch: Batch, length: int) -> Batch:
    cut = {
        field.name: t[:, :length]
        for field in fields(batch)
        if (t := getattr(batch, field.name)) is not None and t.ndim == 2
    }
    return replace(batch, **cut)
