"""Whether a rank compiles the blocks of its model, by `run.compile`, the device and the other settings of the job."""

import torch
from torch import nn

from motet.core.errors import check_input
from motet.models.compilation.compiled_blocks import CompiledBlocks, compile_blocks
from motet.models.layout_invariant_dropout import has_dropout
from motet.train.config_rules import (
    COMPARES_IN_FLOAT64,
    DRAWS_MASKS,
    environment_against_compiling,
    reason_against_compiling,
)
from motet.train.job import Job


def compile_blocks_of_job(module: nn.Module, job: Job, device: torch.device) -> CompiledBlocks | None:
    """The blocks of a module, to be compiled, or why they are not; None where nobody expects it."""
    choice = job.run.compile
    if choice == "off" or device.type == "meta" or (choice == "auto" and device.type != "cuda"):
        return None
    reason = reason_against_compiling(dict(job))
    layers = (name for name, part in module.named_modules() if not [*part.children()] and has_dropout(part))
    if reason is None and (layer := next(layers, None)) is not None:
        reason = f"the model has layers of dropout, such as {layer!r}: {DRAWS_MASKS}"
    reason = reason or environment_against_compiling()
    if reason is None:
        return compile_blocks(module, falls_back=choice == "auto")
    check_input(
        choice == "auto" or reason == COMPARES_IN_FLOAT64, f"run.compile = 'blocks': {reason}; set run.compile=off"
    )
    return CompiledBlocks.none(reason)
