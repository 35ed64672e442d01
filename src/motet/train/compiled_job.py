"""Whether a rank compiles the blocks of its model, by `run.compile`, the device and the other settings of the job."""

import torch
from torch import nn

from motet.models.compilation.compiled_blocks import CompiledBlocks, compile_blocks
from motet.models.layout_invariant_dropout import has_dropout
from motet.train.config_rules import HAS_DROPOUT, reason_against_compiling
from motet.train.job import Job


def compile_blocks_of_job(module: nn.Module, job: Job, device: torch.device) -> CompiledBlocks | None:
    """The blocks of a module, to be compiled, or why they are not; None where nobody expects it."""
    choice = job.run.compile
    if choice == "off" or device.type == "meta" or (choice == "auto" and device.type != "cuda"):
        return None
    reason = reason_against_compiling(dict(job))
    if reason is None and has_dropout(module, _config_values(module)):
        reason = HAS_DROPOUT
    if reason is None:
        return compile_blocks(module, falls_back=choice == "auto")
    return CompiledBlocks.none(reason)


def _config_values(module: nn.Module) -> dict[str, object]:
    """The config of a model of transformers, as plain values."""
    to_dict = getattr(getattr(module, "config", None), "to_dict", dict)
    values: dict[str, object] = to_dict()
    return values
