"""Checks of a job before any rank is started; each raises one sentence."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from motet.cluster.host_limits import has_gpu_driver, read_memory_limits
from motet.core.direct_io import check_free_space
from motet.core.errors import InputError, check_input
from motet.core.trace import log_if_slow
from motet.core.units import DTYPE_BYTES
from motet.memory.tiers.scratch_folder import check_folder
from motet.models.hf.decoder_files import find_decoder_tensors
from motet.models.hf.hf_config import read_config
from motet.models.hf.peft_files import check_peft_folder
from motet.models.settings import (
    DecoderSettings,
    EncoderDecoderSettings,
    EncoderSettings,
    UserModuleSettings,
    check_can_be_trained,
)
from motet.models.spec.model_spec import spec_from_settings
from motet.parallel.context_parallel.context_checks import check_context_heads, check_context_sequence
from motet.parallel.data_parallel.communication.communication_settings import check_communication
from motet.parallel.layout import Layout, LayoutSettings
from motet.parallel.model_sharding import TENSOR_DIMENSION, ModelInventory, inventory_of_spec
from motet.parallel.parameter_server.protocol.messages import slice_parameters
from motet.parallel.parameter_server.server_settings import check_server_settings, extra_process_count
from motet.parallel.step_plan.plan import StepPlan
from motet.precision.attention_kernels import attention_problem
from motet.train.config_rules import (
    COMPARES_IN_FLOAT64,
    check_compositions,
    environment_against_compiling,
    reason_against_compiling,
)
from motet.train.job import Job, batch_shape
from motet.train.job_step_plan import predicted_stages, step_plan_of_job
from motet.train.memory_check.predicted_ranks import check_device_limit
from motet.train.memory_check.step_prediction import (
    CPU_PLACES,
    MemoryNeed,
    bytes_elsewhere,
    layout_memory_problem,
    memory_need,
    memory_problem,
    model_spec,
    predict_host_activations,
)

if TYPE_CHECKING:  # Planning checks jobs too, and starts without numpy and tokenizers
    from motet.data.corpus.token_store import PreparedData
    from motet.models.build import TrainableModel

_EXPERT_KEYS = ("expert", "moe", "router")  # Parts of the names that transformers gives to settings of mixtures


def check_job(job: Job, ranks: int) -> Layout:
    """The layout in which `ranks` ranks can train this job."""
    check_input(
        not job.run.share_device,
        "run.share_device = true sends all communication of ranks on one device through the CPU, for the checks of "
        "scripts/gpu.py alone; leave it out, and start as many ranks as there are devices",
    )
    check_input(
        job.memory.tiers == "explicit",
        "memory.tiers = 'auto' is chosen where `motet train` starts the ranks of one machine; set memory.optimizer to "
        "device, host or disk here",
    )
    check_model(job)
    check_compositions(dict(job))
    _check_sequence_split(job)
    uses_server_processes = job.layout.uses_server_processes
    layout = job.layout_for((job.layout.server.work_items_per_step if uses_server_processes else None) or ranks)
    check_communication(
        job.communication,
        layout.sharding,
        independent_replicas=job.outer.every is not None,
        uses_cluster=layout.dims.size(TENSOR_DIMENSION) > 1 or job.memory.optimizer != "device",
    )
    _check_context(job, layout)
    _check_attention(job)
    if uses_server_processes:
        check_server_settings(job.layout.server, ranks)
        _check_server_count(job)
        _check_server_experts(job)
    _check_replica_corrections(job)
    if not isinstance(job.model, UserModuleSettings):
        predicted_stages(job, layout)  # Refuses stages that do not fit the blocks
    return layout


def _check_context(job: Job, layout: Layout) -> None:
    """Refuse context parallelism that the sequences or the heads of a model of known sizes do not fit."""
    if layout.cuts_rows:
        check_context_sequence(layout, batch_shape(job, 1), setting="data.sequence_length")
        spec = model_spec(job)
        check_context_heads(layout, spec.attention if spec else ())


def _check_attention(job: Job) -> None:
    """Refuse a kernel of attention that does not fit the model; on a CPU, one that cannot add learned scores."""
    on_gpu = job.run.device == "cuda" or _may_have_gpus(job)
    spec = model_spec(job) if on_gpu else None
    adds_bias = isinstance(job.model, EncoderDecoderSettings)
    heads = spec.attention if spec else ()
    is_deterministic = job.run.reproducible is not None
    problem = attention_problem(
        job.precision, heads, on_gpu=on_gpu, adds_bias=adds_bias, is_deterministic=on_gpu and is_deterministic
    )
    check_input(not problem, problem)


def _check_server_count(job: Job) -> None:
    """Refuse more servers than slices where settings alone say which parameters are trained in which group."""
    model, server = job.model, job.layout.server
    if not (isinstance(model, UserModuleSettings) or job.optimizer.groups):
        trained = inventory_of_spec(spec_from_settings(model)).trained
        sizes = {tensor.name: (tensor.optimizer_group, prod(tensor.shape)) for tensor in trained}
        slice_parameters(sizes, server.slice_numel(job.precision.resolved.compute), server.count)


def _check_server_experts(job: Job) -> None:
    """Refuse experts whose loads would be added over the workers of a step, where workers take steps by themselves."""
    check_input(
        isinstance(job.model, DecoderSettings) or getattr(job.model, "balance", None) is None,
        "layout.data = 'parameter_server': the loads of experts are sums over the ranks that take a step together, "
        "which workers of servers do not; set layout.server.transport=collectives, or leave [model.balance] out",
    )


def _check_replica_corrections(job: Job) -> None:
    """Refuse corrections of experts that would follow the loads of one of several independent replicas."""
    check_input(
        job.outer.every is None or getattr(getattr(job.model, "balance", None), "kind", None) != "bias",
        f"outer.every = {job.outer.every} lets each replica take its steps alone, with other loads of experts, and "
        "model.balance.kind = 'bias' moves one correction by the loads of all; use model.balance.kind = 'row', or "
        "leave [outer] out",
    )


def check_model(job: Job) -> None:
    """Refuse a model that cannot be trained, or does not fit the data."""
    check_can_be_trained(job.model)
    if isinstance(job.model, DecoderSettings) and job.model.weights is not None:
        find_decoder_tensors(job.model)
    check_peft_folder(job.model)
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
    if isinstance(model, UserModuleSettings):
        key, context = _huggingface_size(model, "max_position_embeddings", "n_positions")
        context = None if objective == "spans" else context  # A source may be shorter, and T5 has no positions
    else:
        key, context = "model.context", getattr(model, "context", None)
    check_input(
        context is None or length <= context,
        f"data.sequence_length = {length} is more than {key} = {context}; shorten the sequences or raise {key}",
    )


def check_experts(job: Job, log: Callable[[str], None]) -> None:
    """Refuse a mixture of transformers whose routers draw random numbers, or cannot have the balance of the job.

    The model runs without memory, which takes seconds: here only if its file names experts, and on the ranks anyway.
    """
    model = job.model
    if not isinstance(model, UserModuleSettings) or not model.hf_path:
        return
    keys = {**read_config(model.hf_path), **model.arguments}
    if model.balance is not None or any(part in key for key in keys for part in _EXPERT_KEYS):
        from motet.train.balance.balanced_layers import balanced_layers_of_job  # torch is loaded here

        with log_if_slow(log, "running the model without memory, for its routers"):
            balanced_layers_of_job(job)


def _huggingface_size(model: UserModuleSettings, *names: str) -> tuple[str, int | None]:
    """A size of a Hugging Face model by the first of the names that its config has, and its setting in a job."""
    values = {**read_config(model.hf_path), **model.arguments} if model.hf_path else {}
    name = next((name for name in names if isinstance(values.get(name), int)), names[0])
    return f"model.arguments.{name}", values.get(name)


def check_split(job: Job, ranks: int) -> None:
    """Refuse tensor parallelism that divides so little of a model of motet's own that ranks would refuse it."""
    layout, model = job.layout_for(ranks), job.model
    degree, required = layout.dims.size(TENSOR_DIMENSION), job.layout.require_split
    if degree == 1 or isinstance(model, UserModuleSettings) or model.adapters or model.frozen or job.layout.rules:
        return
    spec = spec_from_settings(model)
    matrices = {tensor.name: tensor.shape for tensor in inventory_of_spec(spec).trained if len(tensor.shape) == 2}
    width = next((shape[1] for name, shape in matrices.items() if name.endswith("ffn.down.weight")), degree)
    units = {"attention": ("model.heads", model.heads), "ffn": ("model.ffn_hidden", width)}
    indivisible = {kind: f"{key} = {n}" for kind, (key, n) in units.items() if n % degree and degree % n}
    sizes = {name: prod(shape) for name, shape in matrices.items()}
    whole_size = sum(size for name, size in sizes.items() if any(f".{kind}." in name for kind in indivisible))
    share = whole_size / sum(sizes.values())
    check_input(
        1 - share >= required or not indivisible or bool(spec.expert_count),
        f"layout.tp = {degree} does not divide {' or '.join(indivisible.values())}, so each rank would hold "
        f"{share:.0%} of the matrices as a whole; take a layout.tp that does, or layout.require_split="
        f"{int(100 - 100 * share) / 100:g}",
    )


def _check_sequence_split(job: Job) -> None:
    """Refuse sequences of which the ranks of sequence parallelism can split neither tokens nor source tokens evenly."""
    ranks, length = job.layout.dims.size(TENSOR_DIMENSION) if job.layout.sp else 1, job.data.sequence_length

    def token_counts(sequence_length: int) -> list[int]:
        data = job.data.model_copy(update={"sequence_length": sequence_length})
        shape = batch_shape(job.model_copy(update={"data": data}), 1)
        return [count for count in (shape.source_length, shape.length) if count]

    if all(count % ranks for count in token_counts(length)):
        lengths = length // ranks * ranks, -(-length // ranks) * ranks
        choices = (
            " or ".join(str(each) for each in lengths if each) if job.data.objective != "spans" else "another length"
        )
        tokens = " or ".join(map(str, token_counts(length)))
        raise InputError(
            f"layout.sp = true splits the {tokens} tokens of a sequence over layout.tp = {ranks} ranks, which does not "
            f"divide {tokens}; use data.sequence_length = {choices}, or leave layout.sp out"
        )


def check_memory(job: Job, local_processes: range, workers: int) -> None:
    """Refuse a job whose local processes, by their numbers, need more memory than this machine or a limit allows, or
    whose steps are predicted to pass `memory.device_limit`.

    A model that a factory makes is checked in its ranks, and so is one on GPUs, or one whose layers ranks split.
    """
    check_device_limit(job, workers)
    if job.memory.folder is not None:
        check_folder(Path(job.memory.folder))
    limits, nothing = tuple(read_memory_limits()), [dict[str, int]()] * len(local_processes)
    problem = memory_problem(f"job {job.name!r}", nothing, limits)
    if problem or not _knows_host_memory(job):
        check_input(not problem, problem)
        return
    inventory = inventory_of_spec(spec_from_settings(job.model))
    if job.layout.uses_server_processes:
        needs = list(_server_process_needs(job, inventory, workers))
        problem = memory_problem(
            f"layout.data = {job.layout.data!r}", [needs[process] for process in local_processes], limits
        )
    else:
        layout, recipe = job.layout_for(workers), job.precision.resolved
        plan = step_plan_of_job(job, layout, inventory, model_sharding=predicted_stages(job, layout))
        problem = layout_memory_problem(
            plan,
            layout,
            recipe,
            optimizer=job.optimizer,
            local_ranks=local_processes,
            limits=limits,
            places=replace(
                CPU_PLACES,
                activations_on_host=lambda rank: predict_host_activations(job, plan, layout, rank=rank).peak_bytes,
            ),
        )
        _check_disk(job, plan, local_processes)
    check_input(not problem, problem)


def check_compiler(job: Job) -> None:
    """Refuse compiled blocks that a job cannot have, or on CPU ranks of a machine without a compiler of C++."""
    reason = reason_against_compiling(dict(job)) if job.run.compile == "blocks" else None
    remedy = "set model.dropout=0" if reason and reason.startswith("model.dropout") else "leave that out"
    check_input(
        reason in (None, COMPARES_IN_FLOAT64), f"run.compile = 'blocks': {reason}; {remedy}, or set run.compile=off"
    )
    if job.run.compile != "blocks" or reason is not None:
        return
    problem = environment_against_compiling()
    check_input(problem is None, f"run.compile = 'blocks': {problem}; unset it, or set run.compile=off")
    name = os.environ.get("CXX", "g++")  # noqa: TID251  (the convention of compilers, which torch follows)
    check_input(
        _may_have_gpus(job) or shutil.which(name),
        f"run.compile = 'blocks' on CPU ranks needs a C++ compiler, and {name or 'the empty CXX'} is not on the PATH; "
        "install it (on Debian: apt-get install g++), name another by the variable CXX, or set run.compile=off",
    )


def _may_have_gpus(job: Job) -> bool:
    """Whether ranks may compute on GPUs of this machine."""
    return job.run.device != "cpu" and has_gpu_driver()


def _knows_host_memory(job: Job) -> bool:
    """Whether the memory that local ranks need of the host is predicted before they start."""
    is_split = job.layout.dims.size(TENSOR_DIMENSION) > 1
    return not (_may_have_gpus(job) or is_split or isinstance(job.model, UserModuleSettings))


def knows_memory(job: Job) -> bool:
    """Whether `check_memory` refuses steps that do not fit on the device of a rank."""
    has_limit = job.memory.device_limit is not None and model_spec(job) is not None
    return has_limit or _knows_host_memory(job)


def _check_disk(job: Job, plan: StepPlan, local_ranks: range) -> None:
    """Refuse a folder on whose disk the states of the local ranks have no room."""
    if job.memory.folder is None or job.memory.optimizer != "disk":
        return
    folder = Path(job.memory.folder)
    needed_by = partial(bytes_elsewhere, plan, job.precision.resolved, job.optimizer)
    needed = sum(needed_by(rank=rank % plan.dims.ranks)["disk"] for rank in local_ranks)
    remedy = "make room, shard the states (layout.zero), or set memory.folder to another disk"
    check_free_space(folder, needed, remedy)


def _server_process_needs(job: Job, inventory: ModelInventory, workers: int) -> Iterator[MemoryNeed]:
    """The needs of the coordinator, the servers and the workers; servers have even shares on average."""
    server, recipe = job.layout.server, job.precision.resolved
    alone = job.model_copy(update={"layout": LayoutSettings(microbatches=job.layout.microbatches)})
    need = memory_need(step_plan_of_job(alone, alone.layout_for(1), inventory), recipe, job.optimizer, rank=0)
    masters = sum(prod(tensor.shape) for tensor in inventory.trained) * DTYPE_BYTES[recipe.master]
    state = {"master parameters": masters, "moments": need["moments"]}
    yield {**need, "gradients": 0, "gathered and unreduced tensors": 0}
    shares = {name: server.copies * size // server.count for name, size in state.items()}
    yield from [shares] * (extra_process_count(server) - 1)
    worker = {name: need[name] for name in ("parameters", "gradients")}
    colocated = server.count if server.placement == "colocated" else 0
    yield from (worker | (shares if index < colocated else {}) for index in range(workers))


def check_data(job: Job, data: "PreparedData") -> None:
    """Refuse data with more tokens or classes than the model has."""
    key, vocab_size = "model.vocab_size", job.model.vocab_size
    if isinstance(job.model, UserModuleSettings) and job.model.hf_path:
        key, vocab_size = _huggingface_size(job.model, "vocab_size")
    if vocab_size is not None:
        check_vocabulary(job, data.vocab_size, vocab_size, key=key)
    if isinstance(job.model, EncoderSettings) and job.model.head == "classify":
        check_classes(data.classes, job.model.classes, "model.classes")


def check_huggingface_model(job: Job, data: "PreparedData", model: "TrainableModel") -> None:
    """Refuse data that does not fit a model of transformers, whose sizes are known once it is built."""
    check_objective(job, model)
    if model.vocab_size is not None:
        check_vocabulary(job, data.vocab_size, model.vocab_size, key="model.arguments.vocab_size")
    if model.objective == "classify" and model.num_classes is not None:
        check_classes(data.classes, model.num_classes, "model.arguments.num_labels")


def check_objective(job: Job, model: "TrainableModel") -> None:
    """Refuse an objective that does not fit a model of transformers."""
    check_input(
        model.objective in (None, job.data.objective),
        f"data.objective = {job.data.objective!r} does not fit this model of transformers, which is for "
        f"{model.objective!r}; set data.objective={model.objective}",
    )


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
