"""Batches cut to parts of their rows: what a model computes of a part has the places of the whole row."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from test_packed_rows import MODELS, trained
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.core.errors import InputError
from motet.models.arch.attention_mask import AttentionMask
from motet.models.build import TrainableModel
from motet.models.user_module import make_logits_function
from motet.parallel.context_parallel.context_partition import ContextSplit
from motet.parallel.data_parallel.data_sharding import MicroBatchRows, RowPart
from motet.precision.float64_mode import use_float64
from motet.train import step
from motet.train.engine import TrainingEngine
from motet.train.step import MicroBatchLoop

LENGTH = 8
OUTER, INNER = ((0, 2), (6, 8)), ((2, 6),)  # The ends of a row, and its middle
BY_PLACE = ("tokens", "targets", "weights", "positions", "documents")


def whole_rows(*, documents: bool = True) -> Batch:
    """Two rows, of which the ends are a document and the middle is one. Positions are places."""
    torch.manual_seed(4)
    tokens, targets = torch.randint(30, (2, LENGTH)), torch.randint(30, (2, LENGTH))
    weights, source = torch.arange(2.0 * LENGTH).view(2, LENGTH).remainder(3), torch.randint(30, (2, 6))
    batch = Batch(tokens, targets, weights, rows=torch.tensor([5, 6]), source=source)
    if not documents:
        return batch
    numbers, sources = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]] * 2), torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    return replace(batch, documents=numbers, source_documents=sources)


# --- batches -----------------------------------------------------------------------------------------
def test_parts_of_a_batch_put_together_are_the_batch() -> None:
    positions = torch.arange(2 * LENGTH).view(2, LENGTH)
    batch = replace(whole_rows(), positions=positions)
    parts = [batch.at_places(spans) for spans in (OUTER, INNER)]
    places = [part.places.tolist() for part in parts if part.places is not None]
    assert places == [[0, 1, 6, 7], [2, 3, 4, 5]]
    for name in BY_PLACE:
        joined = torch.full_like(getattr(batch, name), -1)
        for part, at in zip(parts, places, strict=True):
            for column, place in enumerate(at):
                joined[:, place] = getattr(part, name)[:, column]
        assert torch.equal(joined, getattr(batch, name)), name
    for name in {field.name for field in fields(Batch)} - {*BY_PLACE, "places", "row_tokens", "row_documents"}:
        assert all(getattr(part, name) is getattr(batch, name) for part in parts), name
    assert all(part.row_documents is batch.documents and part.row_tokens == LENGTH for part in parts)


def test_what_a_row_has_once_is_not_cut() -> None:
    tokens, classes = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([1, 0])
    part = Batch(tokens, classes, torch.ones(2), rows=torch.arange(2)).at_places([(1, 3)])
    assert part.tokens.shape == (2, 2) and part.targets is classes and part.weights.tolist() == [1, 1]
    assert part.positions is None and part.documents is None and part.to("cpu").places is not None


class PartRunner:
    """The engine and the data of a loop whose micro-batches are parts of rows."""

    group, pipeline, balance = SimpleNamespace(rank=0, device="cpu"), None, None

    def batch(self, step: int, rows: range) -> Batch:
        return whole_rows()

    run_microbatches = TrainingEngine.run_microbatches

    def backward(self, *_: Any) -> None: ...

    def randomness(self, *_: Any) -> Any:
        return nullcontext()

    def attention_of(self, batch: Batch) -> Any:
        return nullcontext()

    counting = attention_of

    def loss_sum(self, batch: Batch) -> Tensor:
        assert batch.places is not None
        return (batch.targets * batch.weights * (1 + batch.places)).sum()


def test_losses_and_targets_are_of_the_part_and_tokens_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a row adds its targets; the tokens of a row are reported by one of them."""
    runner, results = PartRunner(), []
    layout = cast(Any, SimpleNamespace(sharding=SimpleNamespace(reproducible_batch_size=None)))
    loop = MicroBatchLoop(runner, runner, cast(TrainingEngine, runner), layout, 2)
    for rank in range(2):
        part = MicroBatchRows(range(5, 7), part=RowPart(ContextSplit(2, "head-tail"), rank))
        monkeypatch.setattr(step, "microbatches_of_rank", lambda *_, part=part: [part])
        results.append(loop.run(0, keep_batches=True))
    batch = whole_rows()
    assert sum(result.targets for result in results) == batch.weights.sum()
    assert [result.tokens for result in results] == [2 * LENGTH] * 2
    losses = batch.targets * batch.weights * torch.arange(1, LENGTH + 1)
    assert sum(sum(result.loss_sums) for result in results) == losses.sum()
    assert [result.batches[0].tokens.shape[1] for result in results] == [4, 4]


# --- models ------------------------------------------------------------------------------------------
@contextmanager
def inputs_of_first_block(module: nn.Module) -> Iterator[list[Any]]:
    blocks = module.get_submodule("decoder.blocks" if hasattr(module, "decoder") else "blocks")
    inputs: list[Any] = []
    handle = next(blocks.children()).register_forward_pre_hook(lambda _, given: inputs.append(given))
    try:
        yield inputs
    finally:
        handle.remove()


def dense(mask: AttentionMask, length: int) -> Tensor:
    """[R or 1, heads or 1, T, T]"""
    made = mask.dense(length, length, dtype=torch.float64, device=torch.device("cpu"))
    if made is None:
        made = torch.zeros(1, 1, length, length, dtype=torch.float64)
        made = made + torch.full_like(made, -torch.inf).triu(1) if mask.causal else made
    return made


@pytest.mark.parametrize("spans", [OUTER, INNER])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_embeddings_angles_and_masks_of_a_part_are_those_of_the_whole(
    name: str, documents: bool, spans: tuple[tuple[int, int], ...]
) -> None:
    with use_float64():
        model, batch = trained(MODELS[name]), whole_rows(documents=documents)
        part = batch.at_places(spans)
        with inputs_of_first_block(model.module) as inputs:
            model.logits(batch)
            model.logits(part)
        (x, mask, *others), (part_x, part_mask, *part_others) = inputs
        at = part.places
        assert at is not None and torch.equal(part_x, x[:, at])
        assert torch.equal(dense(part_mask, len(at)), dense(mask, LENGTH)[:, :, at][..., at])
        rotary, part_rotary = (each[0] if each else None for each in (others, part_others))
        assert (rotary is None) == (name != "rotary" and name != "window")
        assert rotary is None or torch.equal(part_rotary, rotary[..., at, :, :, :])


def check_part_that_is_a_document(model: TrainableModel) -> None:
    """A document whose positions are its places in the row has the logits that it has as a part of the row."""
    batch = whole_rows()
    whole = model.logits(batch)
    for number, spans in enumerate((OUTER, INNER)):
        part = batch.at_places(spans)
        assert part.source is not None
        source = part.source[:, 3 * number : 3 * number + 3]
        for each in (part, replace(part, documents=None, source=source, source_documents=None)):
            assert (model.logits(each) - whole[:, part.places]).abs().max() < 1e-12
        counted = replace(part, places=None, documents=None, source=source, source_documents=None)
        if spans == OUTER:  # and its places matter, since they leave some out
            assert (model.logits(counted) - whole[:, part.places]).abs().max() > 1e-4


@pytest.mark.parametrize("name", list(MODELS))
def test_a_part_that_is_a_document(name: str) -> None:
    with use_float64():
        check_part_that_is_a_document(trained(MODELS[name]))


class Places(nn.Module):
    def forward(self, tokens: Tensor, places: Tensor | None) -> Tensor:
        return tokens if places is None else tokens * 0 + places


class NoPlaces(nn.Module):
    def forward(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        return tokens


def test_a_module_of_a_user_must_ask_for_the_places_of_a_part() -> None:
    batch = whole_rows()
    part = batch.at_places(OUTER)
    assert torch.equal(make_logits_function(Places())(batch), batch.tokens)
    assert make_logits_function(Places())(part).tolist() == [[0, 1, 6, 7]] * 2
    assert torch.equal(make_logits_function(NoPlaces())(batch), batch.tokens)
    with pytest.raises(InputError, match=r"NoPlaces.forward is called on a part of each row.*an argument `places`"):
        make_logits_function(NoPlaces())(part)
