"""The loader: the same rows for any layout, every sample once an epoch, and each objective as tensors."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import SMALL, numbered, settings, write_megatron, write_records

from motet.core.batch import Batch
from motet.core.errors import InputError
from motet.data.corpus.prepare import prepare_data
from motet.data.samples.loader import BatchLoader
from motet.data.settings import DataSettings, DataSourceSettings

FIELDS = ("tokens", "targets", "weights", "rows", "positions", "documents", "source", "source_documents")


def load(given: DataSettings, seed: int = 0, epochs: float | None = None) -> BatchLoader:
    return BatchLoader(prepare_data(given), given, seed, epochs)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write_records(tmp_path / "documents.jsonl", numbered(300))


def mixed(tmp_path: Path, documents: Path, **values: Any) -> DataSettings:
    sources = (DataSourceSettings(source=str(documents), weight=3.0), DataSourceSettings(source=str(SMALL), weight=1.0))
    return settings(tmp_path, mixture=sources, **values)


def given_for(objective: str, tmp_path: Path, documents: Path) -> DataSettings:
    if objective == "classify":
        return settings(tmp_path, source="synthetic:majority", objective="classify", samples=50)
    return mixed(tmp_path, documents, objective=objective)


def same(batch: Batch, other: Batch, rows: slice) -> None:
    """Rows of a batch equal those of another one; where one of them knows of no borders, there are none."""
    for name in FIELDS:
        one, two = getattr(batch, name), getattr(other, name)
        if one is None or two is None:
            there = one if one is not None else two
            assert there is None or name in ("positions", "documents", "source_documents")
            if there is not None and name == "documents":
                assert one is None and not two[rows].any()
        else:
            assert torch.equal(one, two[rows]), name


@pytest.mark.parametrize("objective", ["causal", "masked", "spans", "classify"])
def test_rows_do_not_depend_on_the_layout(tmp_path: Path, documents: Path, objective: str) -> None:
    given = given_for(objective, tmp_path, documents)
    loader, again = load(given, 5), load(given, 5)
    for step in (0, 1, 7, 10_000):
        whole = loader.batch(step, range(4))
        for rows in (range(1), range(1, 3), range(2, 4), range(3, 4)):
            same(again.batch(step, rows), whole, slice(rows.start, rows.stop))
    whole = loader.evaluation_batch("validation", 0, range(4))
    same(again.evaluation_batch("validation", 0, range(1, 3)), whole, slice(1, 3))


@pytest.mark.parametrize("objective", ["causal", "masked", "spans", "classify"])
def test_shapes_and_dtypes(tmp_path: Path, documents: Path, objective: str) -> None:
    loader = load(given_for(objective, tmp_path, documents))
    batch = loader.batch(0, range(1, 4))
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64 and batch.weights.dtype == torch.float32
    assert batch.weights.shape == batch.targets.shape and batch.rows.tolist() == [1, 2, 3]
    assert (batch.source is not None) == (objective == "spans")
    assert batch.targets.shape == (3,) if objective == "classify" else batch.targets.shape == batch.tokens.shape
    if objective != "spans":
        assert batch.tokens.shape == (3, 32)
    elif batch.source is not None:
        assert batch.source.shape[1] <= 32
    assert int(batch.tokens.max()) < loader.tokenizer.vocab_size


def read_stream(loader: BatchLoader, steps: int, rows: int) -> list[tuple[int, ...]]:
    return [tuple(row) for step in range(steps) for row in loader.batch(step, range(rows)).tokens.tolist()]


def test_an_epoch_holds_every_sample_once_and_the_next_one_in_another_order(tmp_path: Path) -> None:
    loader = load(settings(tmp_path, batch_sequences=1))
    tokens = SMALL.stat().st_size + 1  # An end follows the text; of each 33 tokens 32 are inputs
    count = (tokens - 2 * round(0.01 * tokens) - 1) // 32
    assert loader.train_samples == count and loader.epoch_at(count) == 1.0
    first = read_stream(loader, count, 1)
    second = [tuple(loader.batch(count + i, range(1)).tokens[0].tolist()) for i in range(count)]
    assert len(set(first)) == count and sorted(first) == sorted(second) and first != second
    text = SMALL.read_text().encode()
    assert sorted(first) == sorted(tuple(text[at * 32 : at * 32 + 32]) for at in range(count))


def test_seeds_change_the_order_and_not_the_splits(tmp_path: Path, documents: Path) -> None:
    given = settings(tmp_path, source=str(documents), validation_fraction=0.2)
    one, two = load(given, 1), load(given, 2)
    assert not torch.equal(one.batch(0, range(4)).tokens, two.batch(0, range(4)).tokens)
    a, b = (loader.evaluation_batch("validation", 1, range(4)) for loader in (one, two))
    assert torch.equal(a.tokens, b.tokens) and one.fingerprint != two.fingerprint


def test_no_target_is_in_another_document(tmp_path: Path, documents: Path) -> None:
    given = settings(tmp_path, source=str(documents))
    loader = load(given)
    open_ended = load(given.model_copy(update={"restart_documents": False}))
    end = loader.tokenizer.end_id
    for step in range(5):
        batch, other = loader.batch(step, range(4)), open_ended.batch(step, range(4))
        assert torch.equal(batch.weights == 0, batch.tokens == end) and torch.equal(batch.tokens, other.tokens)
        assert other.weights.all() and other.documents is other.positions is None and batch.documents is not None
        assert torch.equal(batch.documents[:, 1:] != batch.documents[:, :-1], batch.tokens[:, :-1] == end)


def test_rows_without_borders_take_the_short_way(tmp_path: Path) -> None:
    batch = load(settings(tmp_path)).batch(0, range(4))
    assert batch.documents is batch.positions is None


def test_the_last_batch_of_the_last_epoch_is_filled_up(tmp_path: Path) -> None:
    given = settings(tmp_path, batch_sequences=7)
    loader = load(given, epochs=2)
    steps = loader.steps_for_epochs(2)
    live = [batch.weights.any(dim=1).tolist() for step in range(steps) for batch in [loader.batch(step, range(7))]]
    assert sum(map(sum, live)) == 2 * loader.train_samples and all(all(row) for row in live[:-1])
    assert live[-1] == sorted(live[-1], reverse=True) and not live[-1][-1] and loader.epoch_at(0) == 0
    assert loader.epoch_at(steps) == 2.0
    assert load(given).batch(steps - 1, range(7)).weights.all()  # a run by steps goes on


def test_evaluation_covers_its_split_once(tmp_path: Path, documents: Path) -> None:
    loader, texts = load(settings(tmp_path, source=str(documents), validation_fraction=0.3, test_fraction=0.2)), []
    for split in ("validation", "test"):
        batches = [loader.evaluation_batch(split, i, range(4)) for i in range(loader.evaluation_batches(split))]
        weights = torch.cat([batch.weights for batch in batches]).any(dim=1)
        tokens = torch.cat([batch.tokens for batch in batches])[weights]
        assert len(weights) - len(tokens) < 4
        texts.append(loader.tokenizer.decode(tokens.flatten().tolist()))
    # Every record is in one of the splits: its number is found in it, unless a window was cut through it.
    found = [set(re.findall(r"Record (\d+) ", text)) for text in texts]
    assert not found[0] & found[1] and 45 < len(found[0]) < 135 and 20 < len(found[1]) < 100


def test_evaluation_of_a_single_text_is_its_end(tmp_path: Path) -> None:
    loader = load(settings(tmp_path, validation_fraction=0.1, test_fraction=0.0))
    rows = [loader.evaluation_batch("validation", i, range(4)) for i in range(loader.evaluation_batches("validation"))]
    tokens, weights = (torch.cat([getattr(batch, name) for batch in rows]) for name in ("tokens", "weights"))
    text = SMALL.read_bytes()
    held_out = [*text[len(text) + 1 - round((len(text) + 1) * 0.1) :], 256]
    expected = sorted(held_out[at : at + 32] for at in range(0, len(held_out) - 1, 32))
    live = [row[: int(weight.sum())].tolist() for row, weight in zip(tokens, weights, strict=True) if weight.any()]
    # The last token is no input of a full window, only a target.
    assert sorted(live) == [row if row[-1] != 256 else row[:-1] for row in expected]


def test_nothing_to_evaluate(tmp_path: Path) -> None:
    loader = load(settings(tmp_path, validation_fraction=0.0))
    assert loader.evaluation_batches("validation") == 0
    with pytest.raises(InputError, match=r"the validation split has 0 samples in 0 batches; set data\.validation"):
        loader.evaluation_batch("validation", 0, range(4))
    with pytest.raises(InputError, match=r"no batch 5 to evaluate: the test split has 2 samples in 1 batches$"):
        loader.evaluation_batch("test", 5, range(4))


def test_mixtures_keep_their_weights(tmp_path: Path, documents: Path) -> None:
    loader = load(mixed(tmp_path, documents, sequence_length=16, batch_sequences=1))
    text = SMALL.read_text()
    rows = [loader.tokenizer.decode(list(row)) for row in read_stream(loader, 1000, 1)]
    assert sum(row in text for row in rows) == 250


def test_only_answers_are_targets_and_records_stay_whole(tmp_path: Path) -> None:
    records = [{"prompt": f"{i}+{i}=", "answer": f"{2 * i}!"} for i in range(100)]
    loader = load(settings(tmp_path, source=str(write_records(tmp_path / "a.jsonl", records)), sequence_length=24))
    seen = []
    for step in range(loader.steps_for_epochs(1)):
        batch = loader.batch(step, range(4))
        for tokens, targets, weights in zip(batch.tokens, batch.targets, batch.weights, strict=True):
            text = loader.tokenizer.decode([int(tokens[0]), *targets.tolist()])
            whole = text.replace("<|pad|>", "").removesuffix("<|end|>").split("<|end|>")
            answers = loader.tokenizer.decode(targets[weights > 0].tolist()).removesuffix("<|end|>").split("<|end|>")
            assert [part.partition("=")[2] for part in whole] == answers
            assert all(f"{int(p.partition('+')[0]) * 2}!" == a for p, a in zip(whole, answers, strict=True))
            seen += answers
    assert set(seen) <= {f"{2 * i}!" for i in range(100)} and len(set(seen)) >= 90


def test_classes_of_records(tmp_path: Path) -> None:
    records = [{"text": "ab" * (i % 20 + 1), "label": i % 3} for i in range(60)]
    given = settings(tmp_path, source=str(write_records(tmp_path / "a.jsonl", records)), objective="classify")
    loader = load(given, epochs=1)
    assert prepare_data(given).classes == 3
    known = {(record["text"][:31], record["label"]) for record in records}
    for step in range(loader.steps_for_epochs(1)):
        batch = loader.batch(step, range(4))
        for row, (tokens, label) in enumerate(zip(batch.tokens, batch.targets.tolist(), strict=True)):
            text = loader.tokenizer.decode(tokens.tolist()).replace("<|pad|>", "")
            assert text.startswith("<|end|>ab") and (text.replace("<|end|>", ""), label) in known
            if batch.documents is not None:
                assert torch.equal(batch.documents[row] == 0, tokens != loader.tokenizer.pad_id)


def test_a_limit_of_samples(tmp_path: Path) -> None:
    loader = load(settings(tmp_path, samples=10, batch_sequences=5))
    assert (loader.train_samples, loader.steps_for_epochs(3)) == (10, 6) and len(set(read_stream(loader, 6, 5))) == 10


@pytest.mark.parametrize(("strange", "code"), [(259, 8), (-1, 4)])
def test_a_token_that_the_tokenizer_does_not_know(tmp_path: Path, strange: int, code: int) -> None:
    prefix = write_megatron(tmp_path / "m", [[[*range(40), strange, *range(56)]]], code)
    all_train = {"validation_fraction": 0.0, "test_fraction": 0.0, "batch_sequences": 3}
    loader = load(settings(tmp_path, source=str(prefix), **all_train))
    with pytest.raises(InputError, match=rf"m holds the token {strange}, but the tokenizer has only 0 to 258"):
        loader.batch(0, range(3))


def test_megatron_tokens_arrive(tmp_path: Path) -> None:
    documents = [[list(range(i, i + 50))] for i in range(30)]
    given = settings(tmp_path, source=str(write_megatron(tmp_path / "m", documents, 8)), sequence_length=10)
    batch = load(given).batch(0, range(4))
    inside = batch.weights > 0
    assert torch.equal((batch.targets - batch.tokens)[inside], torch.ones_like(batch.tokens)[inside])
    assert inside.float().mean() > 0.9


def test_the_fingerprint_follows_what_decides_the_samples(tmp_path: Path, documents: Path) -> None:
    def fingerprint(seed: int = 0, source: Path = SMALL, **values: Any) -> str:
        return load(settings(tmp_path, source=str(source), **values), seed).fingerprint

    base, copy = fingerprint(), tmp_path / "elsewhere.txt"
    copy.write_bytes(SMALL.read_bytes())
    assert fingerprint(source=copy, workers=3, cache=str(tmp_path / "other")) == base
    ways = [{"sequence_length": 31}, {"batch_sequences": 5}, {"tokenizer": "bpe:300"}, {"objective": "masked"}]
    ways += [{"seed": 1}, {"source": documents}, {"restart_documents": False}, {"test_fraction": 0.02}, {"samples": 7}]
    others = [fingerprint(**changed) for changed in ways]
    assert len({base, *others}) == 1 + len(others)


def test_masks_change_with_the_epoch_and_not_with_the_evaluation(tmp_path: Path) -> None:
    loader = load(settings(tmp_path, objective="masked", batch_sequences=1, samples=1, validation_fraction=0.1))
    first, second = loader.batch(0, range(1)), loader.batch(1, range(1))
    assert torch.equal(first.targets, second.targets) and not torch.equal(first.weights, second.weights)
    one, two = (loader.evaluation_batch("validation", 0, range(1)) for _ in range(2))
    assert torch.equal(one.tokens, two.tokens) and torch.equal(one.weights, two.weights) and one.weights.any()
