"""The share of the parameters that tensor parallelism is meant to split, and splits."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from motet.core.errors import InputError
from motet.parallel.model_sharding import TENSOR_DIMENSION, ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.tensor_parallel.split_regions import RULE_OF_JOB

SMALL_SHARE = 0.05  # Such as a table of positions, of which nobody is warned
_NOT_COUNTED = re.compile(r"(?:^|[._])experts?(?:[._]|$)|\.adapter_[ab]$")  # Names; expert parallelism splits experts
_MOST_NAMES = 3


@dataclass(frozen=True)
class SplitShare:
    """Matrices that are trained: layers and tables, without experts, adapters and what the job keeps whole."""

    elements: int  # Of all of them
    unsplit: tuple[tuple[str, int, str], ...]  # (name, elements, why each rank has it as a whole), the largest first

    @property
    def value(self) -> float:
        """The share that ranks split; 1 if there is nothing to split."""
        return 1 - sum(elements for _, elements, _ in self.unsplit) / max(self.elements, 1)

    def describe_whole(self) -> str:
        """The names of the largest ones that are whole, and the reason of the first."""
        names = [name for name, _, _ in self.unsplit]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return f"{', '.join(names[:_MOST_NAMES])}{more}. {names[0]} stays whole: {self.unsplit[0][2]}"


def split_share(module: nn.Module, sharding: ModelSharding) -> SplitShare:
    """The share of a module, whose parameters may be on the meta device."""
    sizes = dict(_sizes_to_split(module, sharding))
    unsplit = [(name, sizes[name], sharding.rule(name).reason) for name in sizes if not sharding.rule(name).splits]
    return SplitShare(sum(sizes.values()), tuple(sorted(unsplit, key=lambda each: -each[1])))


def _sizes_to_split(module: nn.Module, sharding: ModelSharding) -> Iterator[tuple[str, int]]:
    for name, parameter in module.named_parameters():
        is_matrix = parameter.ndim == 2 and parameter.requires_grad
        if is_matrix and not _NOT_COUNTED.search(name) and sharding.rule(name).reason != RULE_OF_JOB:
            yield name, parameter.numel()


def check_split_share(module: nn.Module, sharding: ModelSharding, dims: ParallelDims, *, required: float) -> None:
    """Refuse a split of little: each rank would compute nearly all of the model."""
    degree = dims.size(TENSOR_DIMENSION)
    if degree == 1:
        return
    share = split_share(module, sharding)
    if share.value < required:
        raise InputError(
            f"layout.require_split = {required:g}: layout.tp = {degree} splits {share.value:.1%} of the parameters "
            "that it is meant to split, and each rank would hold the others as a whole. Leave layout.tp out, or go on "
            f"with layout.require_split={int(share.value * 100) / 100:g}. Whole would be {share.describe_whole()}"
        )


def whole_share_warning(module: nn.Module, sharding: ModelSharding, dims: ParallelDims) -> str:
    """A sentence about the share that ranks hold as a whole, or nothing where it is small."""
    share = split_share(module, sharding)
    if dims.size(TENSOR_DIMENSION) == 1 or share.value > 1 - SMALL_SHARE:
        return ""
    return (
        f"layout.tp = {dims.size(TENSOR_DIMENSION)} leaves {1 - share.value:.1%} of the parameters that it is meant to "
        f"split whole on each rank: {share.describe_whole()}"
    )
