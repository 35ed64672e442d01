"""Training of small jobs whose blocks are compiled, on a rank of the pool."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from motet.models import torch_private
from motet.models.compilation import compiled_blocks
from motet.models.compilation.compiled_blocks import CompiledBlocks
from motet.parallel.process.process_group import RankGroup
from motet.train import compiled_job, config_rules, engine
from motet.train.job import Job
from train.runs import Trained, train
from train.tensor_parallel_runs import train_and_reassemble


class CompiledRun(NamedTuple):
    """A run, and the graphs of its blocks on this rank."""

    trained: Trained | None  # On the first rank
    graphs: int
    reason: str | None


def as_traced(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **_: Any) -> Any:
    """The kernels of torch in the order of a graph, which takes no compiler of C++; what backward keeps is what torch's
    compiler decides."""
    from torch._dynamo.backends.debugging import aot_eager_decomp_partition

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit
        return aot_eager_decomp_partition(graph, inputs)


@contextmanager
def compiling(*, code: bool) -> Iterator[None]:
    """A context in which blocks are compiled with `code` by torch's compiler, else by the kernels of their graphs."""
    torch._dynamo.reset()
    generate_code = torch_private.generate_code if code else as_traced
    with warnings.catch_warnings(), patch.object(torch_private, "generate_code", generate_code):
        warnings.simplefilter("ignore")
        yield


def train_as_settings_say(group: RankGroup, job: Job, steps: int = 3) -> Trained | None:
    """Train with eager blocks, or with those that `run.compile` chooses. Replicas that train independently have
    different values of a tensor, which cannot be put together."""
    return train(group, job, steps) if job.outer.every else train_and_reassemble(group, job, steps)


def train_compiled(
    group: RankGroup, job: Job, steps: int = 3, *, code: bool = False, traces_modes: bool = False
) -> CompiledRun:
    """Train with compiled blocks, also in float64, where the numbers of layouts can be compared; with `code` by torch's
    compiler, else by the kernels of its graphs. With `traces_modes` graphs have the mode that makes float32 in a module
    float64."""
    compiled = list[CompiledBlocks]()

    def keep(*call: Any) -> CompiledBlocks | None:
        blocks = compiled_job.compile_blocks_of_job(*call)
        compiled.extend([blocks] if blocks else [])
        return blocks

    with (
        compiling(code=code),
        patch.object(config_rules, "UNCOMPILED_DTYPES", ()),
        patch.object(engine, "compile_blocks_of_job", keep),
        patch.object(compiled_blocks, "without_function_modes", nullcontext) if traces_modes else nullcontext(),
    ):
        trained = train_as_settings_say(group, job, steps)
    (blocks,) = compiled
    return CompiledRun(trained, blocks.graphs, blocks.reason)


def train_foreign(group: RankGroup, job: Job, steps: int = 3) -> CompiledRun:
    """Train a module that asks for float32 in float64, as it does eagerly."""
    return train_compiled(group, job, steps, traces_modes=True)


def train_code(group: RankGroup, job: Job, steps: int = 3) -> CompiledRun:
    """Train with the code of torch's compiler."""
    return train_compiled(group, job, steps, code=True)
