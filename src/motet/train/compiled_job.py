"""Whether a rank compiles the blocks of its model, by `run.compile`, the device and the other settings of the job."""

import torch
from torch import nn

from motet.models.compilation.compiled_blocks import CompiledBlocks, compile_blocks
from motet.models.layout_invariant_dropout import has_dropout
from motet.parallel.techniques import conflict_with
from motet.train.config_rules import effective_settings
from motet.train.job import Job

UNCOMPILED_DTYPES = ("float64",)


def compile_blocks_of_job(module: nn.Module, job: Job, device: torch.device) -> CompiledBlocks | None:
    """The blocks of a module, to be compiled, or why they are not; None where nobody expects it."""
    choice = job.run.compile
    if choice == "off" or device.type == "meta" or (choice == "auto" and device.type != "cuda"):
        return None
    if job.precision.resolved.compute in UNCOMPILED_DTYPES:
        return CompiledBlocks.none("float64 is for comparisons of numbers, which compiled code rounds in another order")
    reason = conflict_with("compiled blocks", effective_settings(dict(job)))
    if reason is None and has_dropout(module, _config_values(module)):
        reason = "the model has dropout, whose masks must not depend on the layout, and are drawn outside of graphs"
    if reason is None:
        return compile_blocks(module, falls_back=choice == "auto")
    return CompiledBlocks.none(reason)


def _config_values(module: nn.Module) -> dict[str, object]:
    """The config of a model of transformers, as plain values."""
    to_dict = getattr(getattr(module, "config", None), "to_dict", dict)
    values: dict[str, object] = to_dict()
    return values
