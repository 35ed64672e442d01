"""The split of a module over tensor-parallel ranks: proposed, proven, and put together as one value.

The share of the parameters that tensor parallelism is meant to split, and splits.
"""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from motet.core.errors import InputError, check_input
from motet.parallel.model_sharding import (
    LOSS,
    TENSOR_DIMENSION,
    ActivationSplit,
    DimensionSplit,
    ModelSharding,
    ShardRule,
)
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.proof.module_calls import ModuleCall, record_calls
from motet.parallel.proof.part_proof import Forward
from motet.parallel.proof.proof_values import random_values
from motet.parallel.tensor_parallel.sequence.sequence_split import (
    SequenceSplit,
    prove_sequence_split,
    splits_of_outputs,
)
from motet.parallel.tensor_parallel.split_proof import prove_splits
from motet.parallel.tensor_parallel.split_regions import RULE_OF_JOB, LayerSplit, SplitRegion
from motet.parallel.tensor_parallel.vocabulary.vocabulary_proof import VocabularySplit, prove_vocabulary


def splits_layers(dims: ParallelDims) -> bool:
    """Whether ranks split the weights of layers."""
    return dims.size(TENSOR_DIMENSION) > 1


def proof_lengths(dims: ParallelDims, longest: int) -> list[int]:
    """Two lengths of sequences for a proof, which the ranks of `dims` divide if sequences are long enough."""
    degree = dims.size(TENSOR_DIMENSION)
    multiples = [length for length in (2 * degree, 3 * degree, degree) if length <= longest][:2]
    return multiples if len(multiples) == 2 else [longest, max(1, longest - 1)]


@dataclass(frozen=True)
class ProofForwards:
    """Forwards of a module with which its splits are proven, for rows of two lengths."""

    forwards: Sequence[Forward]  # Forwards to the output or the loss, as training computes it
    rows: int = 1
    # Forwards to the input of the loss: then logits stay on the ranks that have their vocabulary.
    logits: Sequence[Forward] = ()
    vocab_size: int | None = None  # Vocabulary of the input, if it is known
    prepare: Callable[[], object] | None = None  # Called before the first forward


def propose_sharding(
    module: nn.Module,
    examples: ProofForwards,
    dims: ParallelDims,
    *,
    splits_sequence: bool = False,
    rules: Mapping[str, LayerSplit] | None = None,
) -> ModelSharding:
    """The proven split of a module over the tensor-parallel ranks of `dims`."""
    degree, forwards = dims.size(TENSOR_DIMENSION), examples.forwards
    if examples.prepare is not None:
        with random_values(module), torch.no_grad():
            examples.prepare()
    vocabulary = prove_vocabulary(
        module,
        examples.logits or forwards,
        degree,
        input_entries=examples.vocab_size,
        gathers_logits=not examples.logits,
    )
    taken = {comm.module for comm in vocabulary.boundary_comms} - {""}
    splits = prove_splits(module, forwards, degree, overrides=rules, excluded=taken, rows=examples.rows)
    stream = SequenceSplit()
    if splits_sequence:
        stream = prove_sequence_split(module, forwards, splits, degree=degree, rows=examples.rows)
        reasons = (
            "; ".join(f"{each.module or 'the model'}: {each.reason}" for each in stream.unsplit) or "it has no blocks"
        )
        check_input(
            stream.blocks, f"layout.sp = true finds nothing to split in this model ({reasons}); leave layout.sp out"
        )
    in_stream = tuple(f"{block}." for block in stream.blocks)
    outside = [region for region in splits.regions if not region.rows[0].startswith(in_stream)]
    comms = [*vocabulary.boundary_comms, *stream.boundary_comms, *(c for r in outside for c in r.comms())]
    observed = (examples.logits or forwards)[0]  # A fused loss does not call the head
    names = {name for comm in comms for name in (comm.module, *comm.shared_by)}
    names |= {name.rpartition(".")[0] for region in splits.regions for name in region.rules}
    names |= {name for comm in vocabulary.boundary_comms for name in _modules_around(comm.module)}
    calls = _first_calls(module, names, observed)
    unsplit_entries = [each for each in vocabulary.whole_regions if each.module]  # A head without a module has no name
    unsplit_rules = {
        name: ShardRule(reason=each.reason)
        for each in (*stream.unsplit, *splits.whole_regions, *unsplit_entries)
        for name in _parameters_of(module, each.module)
    }
    split = {name: rule for region in splits.regions for name, rule in region.rules.items()}
    return ModelSharding(
        rules={**unsplit_rules, **stream.rules, **split, **vocabulary.rules},
        boundary_comms=tuple(sorted(comms, key=lambda comm: calls[comm.module].place[comm.side == "output"])),
        attributes=tuple(dict.fromkeys(attribute for region in splits.regions for attribute in region.attributes)),
        input_widths=tuple(dict.fromkeys(width for region in splits.regions for width in region.input_widths)),
        activations=(
            *stream.activations,
            *(entry for region in outside for entry in _activations(module, region, calls)),
            *_logits_entries(module, vocabulary, calls),
            *dict.fromkeys(entry for region in splits.regions for entry in _activations_between(region, calls)),
        ),
        head_tensors=vocabulary.head_tensors,
        unsplit_streams=tuple((each.module, each.reason) for each in stream.unsplit),
    )


def _parameters_of(module: nn.Module, name: str) -> list[str]:
    """The logical names of the parameters of a part of a module."""
    parameters = set(module.get_submodule(name).parameters())
    return [logical for logical, parameter in module.named_parameters() if parameter in parameters]


def _activations(module: nn.Module, region: SplitRegion, calls: Mapping[str, ModuleCall]) -> Iterator[ActivationSplit]:
    """The splits of the outputs of a region's layers on its ranks."""
    layers = [layer for group in region.columns for layer in group]
    for layer, splits in splits_of_outputs(module, region, layers, calls=calls):
        yield ActivationSplit(layer, "output", splits)
    yield from (ActivationSplit(row, "output") for row in region.rows)


def _modules_around(name: str) -> list[str]:
    """The names of the modules that hold a module, but for the model itself."""
    return list(itertools.accumulate(name.split(".")[:-1], "{}.{}".format))


def _logits_entries(
    module: nn.Module, vocabulary: VocabularySplit, calls: Mapping[str, ModuleCall]
) -> Iterator[ActivationSplit]:
    """The splits of logits that stay on their entries' ranks: where the head, or a module around it, returns them."""
    for head in (comm.module for comm in vocabulary.boundary_comms if comm.argument == LOSS):
        name = vocabulary.head_tensors[0]
        shape, splits = module.get_parameter(name).shape, vocabulary.rules[name].splits
        along_entries = tuple(split.moved(-1, shape[split.dim]) for split in splits)
        around = [
            n for n in _modules_around(head) if n in calls and _output_shape(calls[n])[-1:] == (shape[splits[0].dim],)
        ]
        yield from (ActivationSplit(output, "output", along_entries) for output in (head, *around, "[logits]"))


def _activations_between(region: SplitRegion, calls: Mapping[str, ModuleCall]) -> Iterator[ActivationSplit]:
    """The splits of activations at modules between the layers of a region: tables of heads, and norms of each head."""
    layers = {*region.rows, *(layer for group in region.columns for layer in group)}
    for name, rule in region.rules.items():
        owner, is_partial = name.rpartition(".")[0], TENSOR_DIMENSION in rule.partial_over
        has_layers = any(layer == owner or layer.startswith(f"{owner}.") for layer in layers)
        if rule.splits and not has_layers and owner in calls:  # It reads indices, which every rank has
            dim = len(_output_shape(calls[owner])) - 1
            yield ActivationSplit(owner, "input")
            yield ActivationSplit(owner, "output", tuple(replace(split, dim=dim) for split in rule.splits))
        elif is_partial and not rule.splits and owner not in layers:
            yield ActivationSplit(owner, "input", (DimensionSplit(2, TENSOR_DIMENSION),))


def _output_shape(call: ModuleCall) -> torch.Size:
    return call.output.shape if isinstance(call.output, Tensor) else torch.Size()


def _first_calls(module: nn.Module, names: Collection[str], forward: Forward) -> dict[str, ModuleCall]:
    """The first call of each module in a forward."""
    modules = {name: module.get_submodule(name) for name in names}
    with torch.no_grad(), random_values(module), record_calls(modules, copies=False) as calls:
        forward()
    after_all = 2 * sum(map(len, calls.values()))
    # The loss may be computed outside of the module
    return {name: of[0] for name, of in calls.items()} | {"": ModuleCall({}, {}, (-1, after_all))}


SMALL_SHARE = 0.05  # Share without a warning, such as that of a table of positions
_NOT_COUNTED = re.compile(r"(?:^|[._])experts?(?:[._]|$)|\.adapter_[ab]$")  # Names; expert parallelism splits experts


@dataclass(frozen=True)
class SplitShare:
    """Trained matrices: layers and tables, without experts, adapters and layers that the job keeps whole."""

    elements: int  # Elements of all of them
    unsplit: tuple[tuple[str, int, str], ...]  # (name, elements, why each rank has it as a whole), the largest first

    @property
    def value(self) -> float:
        """The share that ranks split; 1 if there is nothing to split."""
        return 1 - sum(elements for _, elements, _ in self.unsplit) / max(self.elements, 1)

    def describe_whole(self) -> str:
        """The name of the largest whole matrix, the number of others, and its reason."""
        more = f" and {len(self.unsplit) - 1} more stay" if len(self.unsplit) > 1 else " stays"
        return f"{self.unsplit[0][0]}{more} whole: {self.unsplit[0][2]}"


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
    """Refuse a split of few parameters: each rank would compute nearly all of the model."""
    degree = dims.size(TENSOR_DIMENSION)
    if degree == 1:
        return
    share = split_share(module, sharding)
    if share.value < required:
        raise InputError(
            f"layout.require_split = {required:g}: layout.tp = {degree} splits {share.value:.1%} of the parameters "
            "that it is meant to split; take another layout.tp, or "
            f"layout.require_split={int(share.value * 100) / 100:g} ({share.describe_whole()})"
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
