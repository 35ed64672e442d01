"""The split of a job's model over tensor-parallel ranks: proven by the first rank, which tells the others."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

from pydantic import TypeAdapter
from torch import Tensor

from motet.core.batch import Batch
from motet.core.errors import InputError, check_input
from motet.models.build import TrainableModel
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import TENSOR_DIMENSION, ModelSharding
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
    rows, degree = min(_PROOF_ROWS, job.data.batch_sequences), layout.dims.size(TENSOR_DIMENSION)
    batch = data.batch(0, range(rows))
    lengths = sorted({tokens.shape[1] for tokens in _tokens_by_field(batch).values()})
    check_input(
        not job.layout.sp or any(length % degree == 0 for length in lengths),
        f"layout.sp = true splits each sequence over layout.tp = {degree} ranks, which do not divide its "
        f"{' or '.join(map(str, lengths))} tokens; change data.sequence_length, or leave layout.sp out",
    )
    batches = [_first_tokens(batch, length, degree) for length in proof_lengths(layout.dims, lengths[-1])]
    examples = ProofForwards(
        [partial(model.loss_sum, each) for each in batches],
        rows,
        [] if model.has_own_loss else [partial(model.logits, each) for each in batches],
        vocab_size=model.vocab_size,
        prepare=model.check_on_tokens,
    )
    settings = job.layout
    return propose_sharding(model.module, examples, layout.dims, splits_sequence=settings.sp, rules=settings.rules)


def _tokens_by_field(batch: Batch) -> dict[str, Tensor]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if value is not None and value.ndim == 2}


def _first_tokens(batch: Batch, length: int, degree: int) -> Batch:
    """The first tokens of each row; of sequences that ranks do not divide, a number that they do not divide either."""
    by_field = _tokens_by_field(batch).items()
    return replace(batch, **{name: t[:, : length - bool(t.shape[1] % degree)] for name, t in by_field})
