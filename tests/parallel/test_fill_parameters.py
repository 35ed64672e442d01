"""Parameters are filled with what a rank holds of them, whatever its shard is."""

import weakref
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from motet.models import weight_init
from motet.models.parameter_values import BoxReader, DrawnValues, ParameterValues, whole_box
from motet.models.settings import DecoderSettings
from motet.models.weight_init import VALUES_PER_CHUNK, TensorBox
from motet.parallel.data_parallel import flat_parameters as fill
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.layout import Layout, LayoutSettings, resolve_layout
from motet.parallel.model_sharding import DimensionSplit, ModelSharding, ShardRule
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.process.process_group import RankGroup
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.step_plan.plan import make_step_plan
from motet.precision.recipe import RECIPES
from motet.train.optimizer.module_plan import model_inventory
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.sharded_optimizer import build_sharded_optimizer

CPU = torch.device("cpu")
SETTINGS = DecoderSettings(vocab_size=30, context=16, layers=2, hidden=16, heads=4, ffn_hidden=24)


@st.composite
def specs(draw: st.DrawFn) -> ShardSpec:
    """Shards with up to three spans along each dimension, and padding."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    spans = []
    for length in shape:
        borders = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
        spans.append(tuple(zip(borders[::2], borders[1::2], strict=False)) or ((0, length),))
    padding = tuple(draw(st.integers(0, 2)) for _ in shape) if draw(st.booleans()) else ()
    return ShardSpec(shape, tuple(spans), padding)


def local_tensor(spec: ShardSpec, whole: torch.Tensor) -> torch.Tensor:
    """The elements of a rank, by the definition: the product of the spans, and zeros."""
    local = torch.zeros(spec.local_shape)
    index = [[i for span in spans for i in range(*span)] for spans in spec.spans]
    local[tuple(slice(len(each)) for each in index)] = whole[np.ix_(*index)]
    return local


@given(specs(), st.data(), st.sampled_from([1, 7, 1 << 20]))
@settings(max_examples=150, deadline=None)
def test_runs_of_any_shard(spec: ShardSpec, data: st.DataObject, read_numel: int) -> None:
    whole, reads = torch.arange(1.0, prod(spec.shape) + 1).view(spec.shape), np.zeros(spec.shape, int)
    local = local_tensor(spec, whole).flatten()
    bounds = st.tuples(st.integers(0, len(local)), st.integers(0, len(local))).map(sorted)
    runs = data.draw(st.lists(bounds, min_size=1, max_size=3))
    shards = [LocalShard(torch.Size(spec.local_shape), a, torch.full((b - a,), 9e9)) for a, b in runs]

    def read(box: TensorBox) -> torch.Tensor:
        at = tuple(slice(first, first + n) for first, n in zip(*box, strict=True))
        reads[at] += 1
        return whole[at]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "READ_NUMEL", read_numel)
        fill.fill_shards(shards, spec, read)
    for (a, b), shard in zip(runs, shards, strict=True):
        assert torch.equal(shard.values, local[a:b])
    assert reads.max() <= 1  # an element that several shards have is read once


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_boxes_of_drawn_values(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=4)))
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    lengths = tuple(data.draw(st.integers(1, n - first)) for n, first in zip(shape, offsets, strict=True))
    read = DrawnValues(SETTINGS, 3, {"blocks.0.ffn.down.weight": shape}).open("blocks.0.ffn.down.weight")
    whole = read(whole_box(shape))
    at = tuple(slice(first, first + n) for first, n in zip(offsets, lengths, strict=True))
    assert whole.shape == shape and torch.equal(read((offsets, lengths)), whole[at])


def test_a_split_into_columns_draws_each_chunk_once() -> None:
    shape, drawn = (512, 3 * VALUES_PER_CHUNK // 512), weight_init._standard_normal_chunk
    read = DrawnValues(SETTINGS, 3, {"blocks.0.attention.qkv.weight": shape}).open("blocks.0.attention.qkv.weight")
    spec = ShardSpec(shape, (((0, 512),), ((0, 64), (128, 192))))
    shard = LocalShard(torch.Size(spec.local_shape), 0, torch.zeros(512 * 128))
    drawn.cache_clear()
    fill.fill_shards([shard], spec, read)
    assert drawn.cache_info().misses == 3
    assert torch.equal(shard.values.view(512, 128), local_tensor(spec, read(whole_box(shape))))


class Numbered:
    """Element i of a parameter has the value i + 1."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def open(self, name: str) -> BoxReader:
        whole = torch.arange(1.0, prod(self.shapes[name]) + 1).view(self.shapes[name])
        return lambda box: whole[tuple(slice(first, first + n) for first, n in zip(*box, strict=True))]


SPLIT = ModelSharding(
    {
        "0.weight": ShardRule((DimensionSplit(0, "tp", (6, 2, 4)),), ("dp",)),  # fused parts
        "0.bias": ShardRule((DimensionSplit(0, "tp", (6, 2, 4)),), ("dp",)),
        "2.weight": ShardRule((DimensionSplit(1, "tp"),), ("dp",)),  # columns of the stored matrix
        "3.weight": ShardRule((DimensionSplit(0, "tp"),), ("dp",)),  # uneven, with padding
    }
)


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_module_on_the_meta_device_becomes_the_part_of_a_tensor_parallel_rank(rank: int, recipe: str) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 4), nn.Linear(4, 5))
    shapes, optimizer = {name: tuple(p.shape) for name, p in module.named_parameters()}, OptimizerSettings()
    layout = resolve_layout(LayoutSettings(), 1, 1)
    dims = ParallelDims((("dp", 1), ("tp", 2)))
    communication = CommunicationSettings()
    plan = make_step_plan(
        model_inventory(module, optimizer),
        Layout(dims, layout.sharding),
        RECIPES[recipe],
        settings=communication,
        batch_sequences=1,
        model_sharding=SPLIT,
    )
    values: ParameterValues = Numbered(shapes)
    group = RankGroup(rank, 2, None, CPU)
    built = build_sharded_optimizer(
        module, plan, optimizer, RECIPES[recipe], group=group, communication=communication, values=values
    )
    masters = built.sharded_parameters.local_shards(built.sharded_parameters.local_masters)
    for name, parameter in module.named_parameters():
        whole = torch.arange(1.0, prod(shapes[name]) + 1).view(shapes[name])
        wanted = local_tensor(plan.specs[name][rank], whole)
        assert torch.equal(parameter, wanted.to(parameter.dtype)) and not parameter.is_meta, name
        assert torch.equal(masters[name].values.float(), wanted.flatten()), name
    assert module[0].weight.shape == (6, 4) and module[2].weight.shape == (4, 6) and module[3].weight.shape == (3, 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_keeps_the_values_of_its_module(rank: int) -> None:
    """Others would hold the complete module besides their shards."""
    array, module = np.ones((3, 4), np.float32), nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.from_numpy(array)))
    memory = weakref.ref(array)
    del array
    values = fill.BroadcastValues(module, RankGroup(rank, 2, None, CPU))
    module.weight.data = torch.zeros(3, 4)
    assert (memory() is not None) == (rank == 0) and values.fingerprint == ""
