"""Roles of tensors, and the work that ranks repeat, for splits that are written by hand."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import pytest

from motet.models.spec.layer_specs import MicroBatchShape
from motet.models.spec.model_spec import spec_from_settings
from motet.parallel.model_sharding import (
    BoundaryComm,
    DimensionSplit,
    ModelInventory,
    ModelSharding,
    ShardRule,
    TensorInfo,
)
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.roles_of_tensors import (
    TensorRole,
    flops_of_weights,
    repeated_parameters,
    repeated_products,
    tensor_roles,
)
from motet.train.job import load_job
from parallel.sharded_inventory import BLOCK_SHAPES, inventory, model_sharding

DIMS = ParallelDims((("pp", 1), ("dp", 2), ("cp", 1), ("tp", 2)))
WHOLE = ShardRule(reason="3 heads cannot be split over tp = 2")


def layered_sharding(rules: Mapping[str, ShardRule] = {}, *, sequence: bool = False) -> ModelSharding:
    """The split of the small decoder, which communicates at its layers."""
    sharding = model_sharding(sequence=sequence)
    opens, closes = ("gather", "scatter") if sequence else ("copy", "sum")
    comms = [BoundaryComm("embed", "output", 0, closes, "tp", 1)]
    for block in ("blocks.0", "blocks.1", "blocks.2"):
        for first, *others, last in (("attn.q", "attn.kv", "attn.out"), ("mlp.up", "mlp.down")):
            shared = tuple(f"{block}.{name}" for name in others)
            comms.append(BoundaryComm(f"{block}.{first}", "input", 0, opens, "tp", 1, shared))
            comms.append(BoundaryComm(f"{block}.{last}", "output", 0, closes, "tp", 1))
    comms.append(BoundaryComm("head", "input", 0, opens, "tp", 1))
    return replace(sharding, rules={**sharding.rules, **rules}, boundary_comms=tuple(comms))


def roles(sharding: ModelSharding) -> dict[str, TensorRole]:
    return {role.name: role for role in tensor_roles(inventory(), sharding, DIMS)}


def test_repeated_blocks_are_one_role() -> None:
    found = roles(layered_sharding())
    assert list(found) == ["embed.weight", *(f"blocks.{{i}}.{name}" for name in BLOCK_SHAPES), "norm.weight"]
    assert {role.count for name, role in found.items() if name.startswith("blocks")} == {3}
    assert found["embed.weight"] == TensorRole(
        "embed.weight", 1, (10, 8), "vocabulary", (5, 8), ("dp",), "vocabulary", repeats_work=False
    )
    assert found["blocks.{i}.attn.kv.weight"] == TensorRole(
        *("blocks.{i}.attn.kv.weight", 3, (16, 8), "columns", (8, 8), ("dp", "tp"), "shared key and value"),
        repeats_work=False,
    )
    splits = {name: role.split for name, role in found.items()}
    assert splits["blocks.{i}.attn.out.weight"] == splits["blocks.{i}.mlp.down.weight"] == "rows"
    assert splits["blocks.{i}.mlp.up.weight"] == "columns" and splits["blocks.{i}.attn.out.bias"] == "whole"


def test_blocks_that_are_split_differently_have_their_numbers() -> None:
    names = [f"blocks.{block}.mlp.up.weight" for block in range(3)]
    found = roles(layered_sharding({names[1]: WHOLE}))
    role = found[names[1]]
    assert found["blocks.{0,2}.mlp.up.weight"].count == 2
    assert (role.split, role.local_shape, role.reason, role.repeats_work) == ("whole", (24, 8), WHOLE.reason, True)
    found = roles(layered_sharding({names[0]: WHOLE, names[1]: WHOLE}))
    assert found["blocks.{0-1}.mlp.up.weight"].count == 2 and found[names[2]].split == "columns"


def test_what_works_on_a_part_of_the_sequence_repeats_nothing() -> None:
    norm = roles(layered_sharding())["blocks.{i}.norm.weight"]
    assert norm.repeats_work and norm.partial_over == ("dp",)
    norm = roles(layered_sharding(sequence=True))["blocks.{i}.norm.weight"]
    assert not norm.repeats_work and norm.partial_over == ("dp", "tp")


def test_a_layer_whose_rows_alone_are_split() -> None:
    comms = [
        BoundaryComm("blocks.0.mlp.up", side, 0, how, "tp") for side, how in (("input", "split"), ("output", "sum"))
    ]
    name = "blocks.0.mlp.up.weight"
    sharding = ModelSharding({name: ShardRule((DimensionSplit(1, "tp"),))}, tuple(comms))
    assert roles(sharding)[name].split == "rows"


def test_a_table_that_no_layer_has_is_split_along_a_dimension() -> None:
    tensors = ModelInventory((TensorInfo("bias.weight", (32, 4), "float32", "trained"),))
    sharding = ModelSharding({"bias.weight": ShardRule((DimensionSplit(1, "tp"),))})
    assert [role.split for role in tensor_roles(tensors, sharding, DIMS)] == ["dimension 1"]


def test_the_repeated_fractions_are_those_of_the_whole_layers() -> None:
    attention = ["q", "kv", "out"]
    whole = {f"blocks.{block}.attn.{name}.weight": WHOLE for block in (0, 2) for name in attention}
    sharding = layered_sharding(whole)
    block_numel = {name: prod(shape) for name, shape in BLOCK_SHAPES.items()}
    small = sum(block_numel[name] for name in ("norm.weight", "attn.q_norm.weight", "attn.out.bias", "mix.weight"))
    matrices = sum(block_numel.values()) - small
    repeated = 2 * sum(block_numel[f"attn.{name}.weight"] for name in attention)
    assert repeated_parameters(inventory(), sharding) == (repeated + 3 * small + 8) / (3 * (matrices + small) + 88)
    # The embedding is tied to the head, so its weight is in a product, too.
    assert repeated_products(inventory(), sharding, {}) == repeated / (3 * matrices + 80)
    untied = ModelInventory(tuple(replace(tensor, aliases=()) for tensor in inventory().tensors))
    assert repeated_products(untied, sharding, {}) == repeated / (3 * matrices)


def test_known_flops_count_each_product_as_often_as_tokens_take_it() -> None:
    job = load_job("tiny")
    spec, shape = spec_from_settings(job.model), MicroBatchShape(2, 16)
    flops = flops_of_weights(spec, shape)
    assert flops["blocks.3.ffn.up.weight"] == 2 * 32 * 256 * 1376 and flops["embedding.weight"] == 2 * 32 * 256 * 4096
    layers = [name for name in flops if "attention" in name]
    tensors = ModelInventory(tuple(TensorInfo(name, (1, 1), "float32", "trained") for name in flops))
    rules = {name: WHOLE if name in layers else ShardRule((DimensionSplit(0, "tp"),)) for name in flops}
    attention = 4 * (256 * 512 + 256 * 256)
    share = attention / (attention + 4 * 3 * 256 * 688 + 256 * 4096)
    assert repeated_products(tensors, ModelSharding(rules), flops) == pytest.approx(share, rel=1e-15)
