"""Sequence parallelism: what may be split along tokens is proven, trains the same, and sends what theory says."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from stream_models import UNSPLIT, StreamBlock, StreamModel, TokenConvolution, TokenNorm
from torch import Tensor, nn

from motet.models.arch.decoder import CausalDecoder
from motet.models.arch.encoder import BidirectionalEncoder
from motet.models.arch.encoder_decoder import EncoderDecoderModel
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings
from motet.parallel.model_sharding import BoundaryComm, DimensionSplit, ShardRule
from motet.parallel.tensor_parallel.sequence.sequence_split import SequenceSplit, prove_sequence_split
from motet.parallel.tensor_parallel.split_regions import ProvenSplits, SplitRegion
from motet.precision.float64_mode import use_float64

SIZES = {"vocab_size": 50, "context": 32, "layers": 2, "hidden": 16, "heads": 4, "ffn_hidden": 24, "dropout": 0.1}


def region(module: str, columns: Sequence[Sequence[str]], row: str) -> SplitRegion:
    """A region by hand: columns by the tensor that they read, and one row layer."""
    names = [tuple(f"{module}.{name}" for name in group) for group in columns]
    rules = {f"{name}.{part}": ShardRule((DimensionSplit(0, "tp"),)) for g in names for name in g for part in PARTS}
    rules |= {f"{module}.{row}.weight": ShardRule((DimensionSplit(1, "tp"),)), f"{module}.{row}.bias": ShardRule()}
    return SplitRegion(module, tuple(names), (f"{module}.{row}",), rules)


PARTS = ("weight", "bias")


def regions_of(module: nn.Module) -> ProvenSplits:
    regions = []
    for name, inner in module.named_modules():
        layers = {n for n, _ in inner.named_children()}
        for columns, row in (([["qkv"]], "output"), ([["query"], ["key_value"]], "output"), ([["up"]], "down")):
            if layers >= {*(n for group in columns for n in group), row}:
                regions.append(region(name, columns, row))
    return ProvenSplits(tuple(regions))


def with_values(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    with use_float64():
        module = make()
        for parameter in module.parameters():
            parameter.data = 0.4 * torch.randn(parameter.shape)
    return module


def forwards(module: nn.Module, *lengths: tuple[int, ...]) -> list[Callable[[], Tensor]]:
    def forward(*lengths: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum(lengths))
        output: Tensor = module(*(torch.randint(0, 20, (2, length), generator=generator) for length in lengths))
        return output.square().sum()

    return [partial(forward, *each) for each in lengths]


def proven(make: Callable[[], nn.Module], *lengths: tuple[int, ...], degree: int = 2) -> SequenceSplit:
    module = with_values(make)
    return prove_sequence_split(module, forwards(module, *lengths), regions_of(module), degree=degree, rows=2)


def texts(comms: Sequence[BoundaryComm]) -> list[str]:
    return [f"{comm.module} {comm.side} {comm.argument}: {comm.operation} {comm.dim}" for comm in comms]


MODELS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "decoder": (lambda: CausalDecoder(DecoderSettings(**SIZES, kv_heads=2, query_key_norm=True)), [(8,), (16,)]),
    "encoder": (lambda: BidirectionalEncoder(EncoderSettings(**SIZES)), [(8,), (16,)]),
    "encoder-decoder": (lambda: EncoderDecoderModel(EncoderDecoderSettings(**SIZES)), [(8, 8), (8, 16)]),
}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_streams_of_our_models_are_split(name: str, degree: int) -> None:
    make, lengths = MODELS[name]
    split = proven(make, *lengths, degree=degree)
    stacks = ["encoder.blocks", "decoder.blocks"] if name == "encoder-decoder" else ["blocks"]
    expected = []
    for stack in stacks:
        expected.append(f"{stack}.0 input 0: split 1")
        for block in range(2):
            cross = [("cross", "query", "output")] if stack == "decoder.blocks" else []
            for part, column, row in (("attention", "qkv", "output"), *cross, ("ffn", "up", "down")):
                expected.append(f"{stack}.{block}.{part}.{column} input 0: gather 1")
                if part == "cross":  # What the encoder returns is whole on all ranks
                    expected.append(f"{stack}.{block}.cross.key_value input 0: copy -1")
                expected.append(f"{stack}.{block}.{part}.{row} output 0: scatter 1")
        expected.append(f"{stack}.1 output 0: gather 1")
    assert texts(split.boundary_comms) == expected and not split.unsplit
    norms = {name for name, _ in with_values(make).named_parameters() if "blocks" in name and "_norm" in name}
    assert set(split.rules) == norms
    assert {rule.partial_over for rule in split.rules.values()} == {("dp", "cp", "tp")}


@pytest.mark.parametrize("name", UNSPLIT)
def test_a_stream_that_mixes_tokens_stays_whole(name: str) -> None:
    make, reason = UNSPLIT[name]
    split = proven(make, (8,), (12,))
    (whole,) = split.unsplit
    assert (split.blocks, split.boundary_comms, split.rules) == ((), (), {})
    assert whole.module == "blocks" and "its residual stream is not split" in whole.reason and reason in whole.reason


@pytest.mark.parametrize("inner", [TokenNorm, TokenConvolution])
def test_a_module_that_mixes_tokens_gets_the_whole_sequence(inner: Callable[[], nn.Module]) -> None:
    split = proven(lambda: StreamModel(lambda: StreamBlock(inner=inner())), (8,), (12,))
    assert texts(split.boundary_comms)[:5] == [
        "blocks.0 input 0: split 1",
        "blocks.0.inner input 0: replicate 1",
        "blocks.0.inner output 0: split 1",
        "blocks.0.mlp.up input 0: gather 1",
        "blocks.0.mlp.down output 0: scatter 1",
    ]
    assert [whole.module for whole in split.unsplit] == ["blocks.0.inner", "blocks.1.inner"]
    assert not any("inner" in name for name in split.rules)


def test_a_length_that_ranks_do_not_divide_is_not_split() -> None:
    (whole,) = proven(StreamModel, (8,), (9,)).unsplit
    assert "2 ranks cannot split activations of shape [(2, 9, 8)] along dimension 1" in whole.reason
