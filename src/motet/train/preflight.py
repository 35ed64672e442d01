"""What can be refused before any rank is started, in a sentence each."""

import psutil

from motet.core.dtypes import DTYPE_BYTES
from motet.core.errors import InputError
from motet.core.units import format_bytes
from motet.data.prepared import Prepared
from motet.models.settings import DecoderSettings, EncoderSettings, ModuleSettings
from motet.models.spec import spec_from_settings
from motet.parallel.layout import Layout, resolve_layout
from motet.precision.recipe import RECIPES
from motet.train.job import Job

TORCH_BYTES = 64 << 20
"""What a process that has imported torch keeps for itself alone, at least (measured: 145 MiB on Linux)."""


def check_job(job: Job, ranks: int) -> Layout:
    """The layout in which so many ranks can train this job."""
    _refuse_planning_only(job)
    _check_objective(job)
    context = getattr(job.model, "context", None)
    if context is not None and job.data.sequence_length > context:
        raise InputError(
            f"data.sequence_length = {job.data.sequence_length} is more than model.context = {context}; "
            "shorten the sequences or raise model.context"
        )
    return resolve_layout(job.layout, ranks, job.data.batch_sequences)


def check_memory(job: Job, local_ranks: int) -> None:
    """Refuse what this machine's memory cannot hold by any means: torch and all weights, once in every rank."""
    dtype = RECIPES[job.precision.recipe].master
    count = 0 if isinstance(job.model, ModuleSettings) else spec_from_settings(job.model).parameters
    weights, there = count * DTYPE_BYTES[dtype], psutil.virtual_memory().total
    needed = local_ranks * (weights + TORCH_BYTES)
    if needed > there:
        raise InputError(
            f"job {job.name!r} takes {format_bytes(needed)} of memory at least: in each of {local_ranks} ranks "
            f"{format_bytes(weights)} of {dtype} weights and {format_bytes(TORCH_BYTES)} of torch itself; this machine "
            f"has {format_bytes(there)}, so take a smaller model or fewer ranks"
        )


def check_data(job: Job, data: Prepared) -> None:
    """Refuse tokens or classes that the model has no place for."""
    if job.model.vocab_size is not None:
        check_vocabulary(job, data.vocab_size, job.model.vocab_size)
    if isinstance(job.model, EncoderSettings) and job.model.head == "classify" and data.classes > job.model.classes:
        raise InputError(
            f"model.classes = {job.model.classes}, but the data has {data.classes}; set model.classes={data.classes}"
        )


def check_vocabulary(job: Job, tokens: int, vocab_size: int, key: str = "model.vocab_size") -> None:
    """Refuse a model that has no row for some token; it may well have more rows than there are tokens."""
    if tokens > vocab_size:
        raise InputError(
            f"{key} = {vocab_size} is less than the {tokens} tokens of data.tokenizer = {job.data.tokenizer!r}; "
            f"set {key}={tokens} or more, or take another tokenizer"
        )


def check_huggingface(job: Job, tokens: int, kind: str, vocab_size: int | None) -> None:
    """What only transformers can tell of an `hf:` model: what it is for, and its vocabulary."""
    fits = "spans" if kind == "encoder-decoder" else kind
    if job.data.objective != fits:
        raise InputError(
            f"data.objective = {job.data.objective!r} does not fit this model of transformers, whose kind is {kind!r}; "
            f"set data.objective={fits}"
        )
    if vocab_size is not None:
        check_vocabulary(job, tokens, vocab_size, "model.arguments.vocab_size")


def _refuse_planning_only(job: Job) -> None:
    if not isinstance(job.model, DecoderSettings):
        return
    for key in ("experts", "latent_attention"):
        if getattr(job.model, key) is not None:
            raise InputError(
                f"job {job.name!r} has [model.{key}], which can be planned but not trained yet; "
                "see its sizes with `motet show model`, or take a model without it"
            )


def _check_objective(job: Job) -> None:
    """Each of our models is for one objective; what somebody else's module is for, it knows itself."""
    if isinstance(job.model, ModuleSettings):
        return
    objectives = {"decoder": "causal", "encoder-decoder": "spans"}
    fits = job.model.head if isinstance(job.model, EncoderSettings) else objectives[job.model.family]
    if job.data.objective != fits:
        of = f" with head {job.model.head!r}" if isinstance(job.model, EncoderSettings) else ""
        raise InputError(
            f"data.objective = {job.data.objective!r} does not fit a model of family {job.model.family!r}{of}; "
            f"set data.objective={fits}"
        )
