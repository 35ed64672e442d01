"""Checks of a job before any rank is started; each raises one sentence."""

import psutil

from motet.core.dtypes import DTYPE_BYTES
from motet.core.errors import check_input
from motet.core.units import format_bytes
from motet.data.corpus.token_store import PreparedData
from motet.models.settings import EncoderSettings, UserModuleSettings, check_can_be_trained
from motet.models.spec.model_spec import spec_from_settings
from motet.parallel.data_parallel.communication.communication_settings import check_communication
from motet.parallel.layout import Layout
from motet.parallel.parameter_server.server_settings import check_server_settings
from motet.train.config_rules import check_compositions
from motet.train.job import Job

# A lower bound for the memory of a process that has imported torch (measured: 145 MiB on Linux).
TORCH_PROCESS_BYTES = 64 << 20


def check_job(job: Job, ranks: int) -> Layout:
    """The layout in which `ranks` ranks can train this job."""
    check_model(job)
    check_compositions(dict(job))
    uses_server_processes = job.layout.uses_server_processes
    layout = job.layout_for((job.layout.server.work_items_per_step if uses_server_processes else None) or ranks)
    check_communication(job.communication, layout.sharding, independent_replicas=job.outer.every is not None)
    if uses_server_processes:
        check_server_settings(job.layout.server, ranks)
    return layout


def check_model(job: Job) -> None:
    """Refuse a model that cannot be trained, or does not fit the data."""
    check_can_be_trained(job.model)
    model, objective, length = job.model, job.data.objective, job.data.sequence_length
    if not isinstance(model, UserModuleSettings):
        expected, head = {"decoder": "causal", "encoder-decoder": "spans"}.get(model.family, ""), ""
        if isinstance(model, EncoderSettings):
            expected, head = model.head, f" with head {model.head!r}"
        check_input(
            objective == expected,
            f"data.objective = {objective!r} does not fit a model of family {model.family!r}{head}; "
            f"set data.objective={expected}",
        )
    context = getattr(model, "context", None)
    check_input(
        context is None or length <= context,
        f"data.sequence_length = {length} is more than model.context = {context}; shorten the sequences or raise "
        "model.context",
    )


def check_memory(job: Job, local_ranks: int) -> None:
    """Refuse a job whose weights, once in every rank, and processes exceed the memory of this machine."""
    dtype = job.precision.resolved.master
    parameter_count = 0 if isinstance(job.model, UserModuleSettings) else spec_from_settings(job.model).parameter_count
    weight_bytes, total_memory = parameter_count * DTYPE_BYTES[dtype], psutil.virtual_memory().total
    needed_bytes = local_ranks * (weight_bytes + TORCH_PROCESS_BYTES)
    needed, weights, torch, total = map(format_bytes, (needed_bytes, weight_bytes, TORCH_PROCESS_BYTES, total_memory))
    check_input(
        needed_bytes <= total_memory,
        f"job {job.name!r} takes {needed} of memory at least: in each of {local_ranks} ranks {weights} of {dtype} "
        f"weights and {torch} of torch itself; this machine has {total}, so take a smaller model or fewer ranks",
    )


def check_data(job: Job, data: PreparedData) -> None:
    """Refuse data with more tokens or classes than the model has."""
    if job.model.vocab_size is not None:
        check_vocabulary(job, data.vocab_size, job.model.vocab_size)
    if isinstance(job.model, EncoderSettings) and job.model.head == "classify":
        check_classes(data.classes, job.model.classes, "model.classes")


def check_vocabulary(job: Job, tokens: int, vocab_size: int, *, key: str = "model.vocab_size") -> None:
    """Refuse a model with fewer embedding rows than there are tokens; it may have more."""
    check_input(
        tokens <= vocab_size,
        f"{key} = {vocab_size} is less than the {tokens} tokens of data.tokenizer = {job.data.tokenizer!r}; "
        f"set {key}={tokens} or more, or take another tokenizer",
    )


def check_classes(needed: int, classes: int, key: str) -> None:
    """Refuse a model with fewer classes than the data has."""
    check_input(needed <= classes, f"{key} = {classes}, but the data has {needed}; set {key}={needed}")
