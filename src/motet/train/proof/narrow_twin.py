"""The twin of a model whose sizes cannot be changed: few of its blocks and entries, at its own widths."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from motet.core.errors import InputError
from motet.models.blocks import named_blocks
from motet.models.build import build_trainable_model
from motet.models.meta_parameters import set_values
from motet.models.trace.model_trace import build_on_meta
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import TENSOR_DIMENSION
from motet.parallel.proof.module_calls import record_calls
from motet.parallel.proof.narrow_module import (
    blocks_to_keep,
    forms_of_blocks,
    keep_few_entries,
    pass_blocks,
    vocabulary_of,
)
from motet.parallel.proof.twin_match import TracedModule, TwinMatch, TwinMismatchError
from motet.train.job import Job
from motet.train.proof.proof_memory import check_memory_of_proof
from motet.train.proof.twin_of_job import Twin, trace_of_job


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
