"""A model's sizes without the model: parameters, FLOPs and saved activations of each block, in pure Python.
FLOPs count matrix products and attention, 2 m n k each, but no norms, activations or look-ups. Backward counts twice
the forward; work that an attention kernel or recomputation repeats is not counted. Saved activations are the tensors
that autograd holds at the end of the forward pass: every storage once, without parameters. `on_rank` is the model that
one of several tensor-parallel ranks computes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from motet.core.errors import InputError
from motet.core.units import DTYPE_BYTES
from motet.models import settings as model_settings
from motet.models.hf.hf_config import read_config, settings_from_config
from motet.models.kernels.head_sizes import takes_heads
from motet.models.spec.block_costs import decoder_block_specs, encoder_block_specs, encoder_decoder_block_specs
from motet.models.spec.layer_specs import (
    AttentionFlopsRule,
    AttentionSpec,
    BlockPolicy,
    BlockSpec,
    LayerSpec,
    MatmulSpec,
    MicroBatchShape,
    SameBlock,
    SavedActivation,
    SavedAttentionMatrix,
    SplitBy,
    SplitDegrees,
)
from motet.models.spec.trained_parameters import is_read_by_blocks, with_trained_parameters

_NOT_RECOMPUTED: BlockPolicy = "none"


@dataclass(frozen=True)
class ModelSpec:
    """The blocks of a model, in the order of the forward pass."""

    blocks: tuple[BlockSpec, ...]
    # Queries, keys and values are one product, as are gate and up: in motet's modules, not in those of transformers
    has_fused_products: bool = True
    split_problem: str | None = None  # Why tensor parallelism cannot be planned; None if it can

    @cached_property
    def _hash(self) -> int:
        return hash(self.blocks)

    def __hash__(self) -> int:
        """Computed once: specs are keys of caches."""
        return self._hash

    @property
    def parameter_count(self) -> int:
        return sum(block.parameter_count * block.repeat for block in self.blocks)

    @property
    def active_parameter_count(self) -> int:
        """Parameters that one token uses: only the experts that it is sent to, and everything else."""
        return sum(block.active_parameter_count * block.repeat for block in self.blocks)

    @cached_property
    def hidden(self) -> int:
        """The width of the residual stream."""
        return max((block.input.elements for block in self.blocks if block.input), default=0)

    @cached_property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """The attention of each kind of block."""
        operations = (operation for block in self.blocks for operation in block.layer.operations)
        return tuple(operation for operation in operations if isinstance(operation, AttentionSpec))

    @cached_property
    def has_tied_head(self) -> bool:
        """Whether its output head reads the table of its embedding, whose gradient waits for that of the embedding."""
        names = {parameter.name for block in self.blocks for parameter in block.layer.parameters}
        return "embedding.weight" in names and "head.weight" not in names

    @cached_property
    def inner_widths(self) -> frozenset[int]:
        """The features of feed-forward networks that tensor-parallel ranks split."""
        products = (each for block in self.blocks for each in block.layer.operations if isinstance(each, MatmulSpec))
        return frozenset(each.split.units[0] for each in products if each.split.split_by == "inner")

    @cached_property
    def expert_count(self) -> int | None:
        """The experts that tokens are sent to."""
        parameters = (parameter for block in self.blocks for parameter in block.layer.parameters)
        return next((parameter.shape[0] for parameter in parameters if parameter.active_fraction < 1), None)

    @cached_property
    def has_source(self) -> bool:
        """Whether it reads a source besides its tokens."""
        return any("source" in (attention.queries, attention.keys) for attention in self.attention)

    def forward_flops(self, shape: MicroBatchShape, attention: AttentionFlopsRule = "causal") -> int:
        return sum(block.forward_flops(shape, attention) * block.repeat for block in self.blocks)

    def training_flops(self, shape: MicroBatchShape, attention: AttentionFlopsRule = "causal") -> int:
        """FLOPs of forward and backward, which computes no gradients of frozen weights."""
        return sum(block.training_flops(shape, attention) * block.repeat for block in self.blocks)

    @property
    def policy_count(self) -> int:
        """The number of blocks that recomputation can choose."""
        return sum(block.repeat for block in self.blocks if block.input)

    def saved_bytes(self, shape: MicroBatchShape, dtype: str, policies: Sequence[BlockPolicy] | None = None) -> int:
        """Saved activations at the end of a forward pass in `dtype` (core.dtypes). `policies` are those of the blocks
        that recomputation can choose, in their order; by default nothing is recomputed."""
        return sum(tensor.bytes(shape, dtype) for tensor in self.saved(policies))

    def saved(self, policies: Sequence[BlockPolicy] | None = None) -> Iterator[SavedActivation | SavedAttentionMatrix]:
        """The tensors that are kept at the end of a forward pass."""
        for *_, tensors in self.saved_by_block(policies):
            yield from tensors

    def saved_by_block(
        self, policies: Sequence[BlockPolicy] | None = None
    ) -> Iterator[tuple[BlockSpec, int | None, tuple[SavedActivation | SavedAttentionMatrix, ...]]]:
        """The same by the block that keeps them, with its number if recomputation can choose it."""
        chosen = [*policies] if policies else [_NOT_RECOMPUTED] * self.policy_count
        is_recomputed, index = any(policy != "none" for policy in chosen), 0
        for block in self.blocks:
            yield block, None, block.arguments if is_recomputed else ()
            for repetition in range(block.repeat):
                if block.input is None:
                    yield block, None, block.saved("none", is_first=repetition == 0)
                    continue
                yield block, index, block.saved(chosen[index], is_first=repetition == 0)
                index += 1

    def on_rank(self, tensor: int, *, sequence: bool = False) -> "ModelSpec":
        """The model that one of `tensor` ranks computes; `sequence` splits the stream inside the blocks as well.
        Attention whose heads cannot be split, and a gated network whose width cannot, are whole on each rank."""
        operations = [operation for block in self.blocks for operation in block.layer.operations]
        not_split: set[SplitBy] = {
            "heads" if isinstance(operation, AttentionSpec) else operation.split.split_by
            for operation in operations
            if not operation.can_split(tensor, is_fused=self.has_fused_products)
        }
        degrees = SplitDegrees(tensor, sequence, frozenset(not_split))
        return replace(self, blocks=tuple(block.on_rank(degrees) for block in self.blocks))

    def on_stage(self, stage: range) -> "ModelSpec":
        """The model that a stage of a pipeline computes. Layers before the first block, or after a block, belong to
        that block; each stage keeps the tensors that all blocks read, such as masks and rotations."""
        blocks, after = list[BlockSpec](), 0
        for block in self.blocks:
            before = after
            if "{i}" in block.prefix:
                after += block.repeat
                held = range(max(before, stage.start), min(after, stage.stop))
                if held:
                    first = block.first_index + held.start - before
                    blocks.append(replace(block, repeat=len(held), first_index=first))
            elif max(after - 1, 0) in stage:
                blocks.append(block)
            elif after == 0:
                blocks.append(_read_by_blocks(SameBlock(block)))
        return replace(self, blocks=tuple(blocks))


@lru_cache(maxsize=1 << 10)
def _read_by_blocks(same: SameBlock) -> BlockSpec:
    """A block before all others with the tensors alone that the others read."""
    saved = tuple(filter(is_read_by_blocks, same.block.layer.saved))
    return replace(same.block, layer=LayerSpec(saved=saved))


def spec_from_settings(settings: model_settings.ModelSettings | model_settings.TransformerSettings) -> ModelSpec:
    """The spec of one of motet's architectures, or of the Hugging Face config that `factory = "hf:..."` names."""
    is_foreign = isinstance(settings, model_settings.UserModuleSettings)
    if isinstance(settings, model_settings.UserModuleSettings):
        if settings.hf_path is None:
            raise InputError(
                f"model.factory = {settings.factory!r}: sizes are known for motet's families and for hf: configs, "
                "not for the module that a function returns; `motet show model JOB --trace` finds them"
            )
        settings.check_layers_are_known()
        settings = settings_from_config({**read_config(settings.hf_path), **settings.arguments})
    block_specs: dict[type[model_settings.TransformerSettings], Callable[[Any], tuple[BlockSpec, ...]]] = {
        model_settings.DecoderSettings: decoder_block_specs,
        model_settings.EncoderSettings: encoder_block_specs,
        model_settings.EncoderDecoderSettings: encoder_decoder_block_specs,
    }
    make = next(block_specs[kind] for kind in type(settings).__mro__ if kind in block_specs)
    return ModelSpec(with_trained_parameters(make(settings), settings), has_fused_products=not is_foreign)


def shape_on_gpu(
    shape: MicroBatchShape, attention: Iterable[AttentionSpec], *, dtype: str, kernel: str
) -> MicroBatchShape:
    """A micro-batch that kernels of GPUs compute. With activations of 16 bits, a kernel takes the starts of documents
    where `precision.attention` allows it and it computes all of these heads."""
    may_take_starts = DTYPE_BYTES[dtype] == 2 and kernel in ("auto", "flash")
    takes_starts = may_take_starts and all(takes_heads(each.key_dim, each.value_dim) for each in attention)
    return replace(shape, variable_length=takes_starts, device="cuda")
