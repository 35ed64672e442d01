"""Gradients and parameters on their way, compressed; and what a server does with gradients that are late."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from motet.collectives.compression.codecs import parse_codec
from motet.parallel.data_parallel.buckets import build_buckets
from motet.parallel.parameter_server.process import server_process
from motet.parallel.parameter_server.process.server_process import (
    ParameterSlicingPlan,
    ParameterStore,
    PushPullCompression,
    PushPullCompressor,
    message_seed,
    tensor_bytes,
)
from motet.parallel.parameter_server.protocol.messages import UpdateScalars, partition_buckets
from motet.precision.recipe import RECIPES
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.sharded_optimizer import make_torch_optimizer
from refusals import refused

SIZE, RATE = 512, 0.1
SGD = OptimizerSettings(name="sgd", learning_rate=RATE, weight_decay=0.0)
BUCKETS = build_buckets({"w": (0, SIZE)}, 1, SIZE)
PLAN = ParameterSlicingPlan(BUCKETS, partition_buckets(BUCKETS, SIZE, 1), RECIPES["fp64"], ((1.0, 0.0),))


def drawn(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def store_of(partition: ParameterSlicingPlan, settings: OptimizerSettings = SGD) -> ParameterStore:
    store = ParameterStore(partition, lambda groups: make_torch_optimizer(groups, settings))
    store.load_slice_state(0, {"master": drawn(0)})
    return store


def pulled(partition: ParameterSlicingPlan, store: ParameterStore) -> Tensor:
    message = bytearray(store.value_for_worker(0, "w0"))
    return server_process.decompress(partition.compression.pull_codec, message, drawn(0))


def push(store: ParameterStore, work_item: int, gradient: Tensor, factor: float = 1.0) -> None:
    store.add_push(0, work_item, bytearray(tensor_bytes(gradient)), worker="w0")
    store.apply_update(0, [work_item], UpdateScalars(RATE, factor, is_applied=True))


@pytest.mark.parametrize(
    "codec", ["int8", "int4", "float8", "sign", "topk:keep=0.1", "randomk:keep=0.2,unbiased=false"]
)
def test_what_a_push_loses_comes_with_a_later_one(codec: str) -> None:
    """The sum of all that arrives is the sum of all that was given, but for what the last one lost."""
    compression_plan = PushPullCompression(push_codec=parse_codec(codec), seed=5)
    compressor = PushPullCompressor(parse_codec(codec), compression_plan)
    given, arrived = torch.zeros_like(drawn(0)), torch.zeros_like(drawn(0))
    for work_item in range(30):
        gradient = drawn(work_item)
        given += gradient
        message = bytearray(tensor_bytes(compressor.compress(3, work_item, gradient)))
        assert len(message) == parse_codec(codec).wire_bytes([SIZE], "float64")
        seed = message_seed(compression_plan.seed, 3, work_item)
        arrived += server_process.decompress(compression_plan.push_codec, message, gradient, seed=seed)
    (error,) = compressor.errors.values()
    assert torch.allclose(arrived + error, given, atol=1e-4 * float(given.abs().max()))
    without = PushPullCompressor(parse_codec(codec), replace(compression_plan, has_error_feedback=False))
    without.compress(3, 0, drawn(0))
    assert without.errors == {}


@pytest.mark.parametrize("codec", ["int8", "topk:keep=0.1", "randomk:keep=0.2,unbiased=false"])
def test_a_message_that_is_not_finite_leaves_the_error_as_it_was(codec: str) -> None:
    compressor = PushPullCompressor(parse_codec(codec), PushPullCompression())
    compressor.compress(0, 0, drawn(0))
    before, bad = compressor.errors[0].clone(), drawn(1)
    bad[100] = float("inf")
    compressor.compress(0, 1, bad)
    assert torch.equal(compressor.errors[0], before) and before.any()


def test_draws_follow_from_the_seed_the_number_and_the_slice() -> None:
    def message(seed: int, number: int, slice_id: int) -> Tensor:
        codec = parse_codec("int4:rounding=stochastic")
        return PushPullCompressor(codec, PushPullCompression(seed=seed)).compress(slice_id, number, drawn(0))

    assert torch.equal(message(1, 2, 3), message(1, 2, 3))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(message(1, 2, 3), message(*other))


@pytest.mark.parametrize("codec", ["int8", "int4", "float8"])
def test_pulled_parameters_are_right_on_average(codec: str) -> None:
    """They stay where they are while nothing is learned; what is pulled goes around them."""
    partition = replace(PLAN, compression=PushPullCompression(pull_codec=parse_codec(codec)))
    store = store_of(partition)
    found = []
    for work_item in range(40):
        found.append(pulled(partition, store))
        push(store, work_item, torch.zeros_like(drawn(0)))
    mean, once = torch.stack(found).mean(0), (found[0] - drawn(0)).abs().max()
    assert float(once) > 0
    assert float((mean - drawn(0)).abs().max()) < 0.2 * float(once)


def test_a_second_server_goes_on_with_the_same_bits() -> None:
    partition = replace(PLAN, compression=PushPullCompression(parse_codec("int8"), parse_codec("int4")))
    compressor = PushPullCompressor(parse_codec("int8"), partition.compression)
    first = store_of(partition)
    for work_item in range(3):
        push(first, work_item, compressor.compress(0, work_item, drawn(work_item)))
    second = store_of(partition)
    second.load_slice_state(0, {name: tensor.clone() for name, tensor in first.full_slice_state(0).items()})
    for work_item in range(3, 6):
        assert bytes(first.value_for_worker(0)) == bytes(second.value_for_worker(0))
        message = compressor.compress(0, work_item, drawn(work_item))
        push(first, work_item, message)
        push(second, work_item, message)
    assert torch.equal(first.slice_state(0)["master"], second.slice_state(0)["master"])
    assert bytes(first.value_for_worker(0)) == bytes(second.value_for_worker(0))


def test_a_late_gradient_is_corrected() -> None:
    """The correction is its square times the change of the parameters since the worker's pull (arXiv:1609.08326)."""
    partition = replace(PLAN, delay_compensation=0.5)
    store = store_of(partition)
    before = pulled(partition, store)
    store.add_push(0, 0, bytearray(tensor_bytes(drawn(7))), worker="another")
    store.apply_update(0, [0], UpdateScalars(RATE, 1.0, is_applied=True))
    now = store.slice_state(0)["master"].clone()
    assert torch.allclose(now, before - RATE * drawn(7)), "nothing is known of what this worker had"
    push(store, 1, drawn(8), factor=0.25)
    mean = 0.25 * drawn(8)
    wanted = now - RATE * (mean + 0.5 * mean.square() * (now - before))
    assert torch.allclose(store.slice_state(0)["master"], wanted, rtol=1e-14)


@pytest.mark.parametrize(
    ("slice_id", "state", "sentence"),
    [
        (0, {"master": torch.ones(1)}, r"slice 0 has master of shape \[1\], not \[512\]"),
        (0, {"master": torch.ones(SIZE), "exp_avg": torch.ones(2)}, r"slice 0 has exp_avg of shape \[2\], not \[512\]"),
        (0, {"exp_avg": torch.ones(SIZE)}, "or its state has no master parameters"),
        (7, {"master": torch.ones(SIZE)}, "slice 7 is not one of the 1 of this run"),
    ],
)
def test_a_state_of_other_tensors_is_refused(slice_id: int, state: dict[str, Tensor], sentence: str) -> None:
    refused(sentence, store_of(PLAN).load_slice_state, slice_id, state)
