"""A job with a large vocabulary gets a small one, and its head is compared with all entries."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from motet.data.corpus.prepare import build_corpus_folder, prepare_data
from motet.data.settings import DataSettings, DataSourceSettings
from motet.models.arch import logit_slices, loss
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.tensor_parallel.vocabulary.rank_vocabulary import RankVocabularyShard, shard_embedding
from motet.parity import full_vocabulary, shrink_job
from motet.parity.full_vocabulary import MAX_ENTRIES, many_entries, verify_full_head
from motet.parity.rank_threads import RankThreads
from motet.parity.shrink_job import with_small_vocabulary
from motet.parity.verify_job import make_verification_plans
from motet.train.job import Job, load_job

TEXT = Path(__file__).parent.parent / "data" / "small.txt"
ENTRIES = 140_001  # The second of two ranks starts beyond 65,536, and has padding
from_spec = RankVocabularyShard.from_spec


def small_job(job: Job, *tensor_ranks: int) -> Job:
    return with_small_vocabulary(job, tensor_ranks or (2,), lambda text: None).job


# --- the small vocabulary -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks"), [("llama3-8b", 2), ("gpt3-175b", 3), ("gpt2-124m", 8), ("nemotron-340b", 5)]
)
def test_ranks_pad_a_small_vocabulary_as_the_large_one(name: str, ranks: int) -> None:
    job, lines = load_job(name), list[str]()
    small = with_small_vocabulary(job, [1, ranks], lines.append)
    entries, full = small.job.model.vocab_size, job.model.vocab_size
    assert entries is not None and full is not None and small.full_entries == full
    assert 512 <= entries < 2048 and -entries % ranks == -full % ranks and entries % 4 == full % 4
    assert small.job.data.tokenizer == f"bpe:{entries}"
    (line,) = lines
    assert line == f"the small job reads stdlib with a vocabulary of {entries:,} entries in place of {full:,}"


@pytest.mark.parametrize("name", ["tiny", "bert-tiny", "bert-classify"])
def test_a_small_vocabulary_stays(name: str) -> None:
    job, lines = load_job(name), list[str]()
    small = with_small_vocabulary(job, [3], lines.append)
    assert small.job is job and small.full_entries is None and small.degree == 4 and not lines
    (plan,) = make_verification_plans(job, ["dp=2"], lines.append)
    assert plan.entries == job.model.vocab_size and plan.job.model.vocab_size == job.model.vocab_size and not lines


def test_a_config_of_hugging_face_and_arguments_of_a_function(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "vocab_size": 150_000, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 149_999,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    tree = load_job("tiny", ["data.tokenizer=bpe:150000"])
    for settings, others in (
        ({"factory": f"hf:{tmp_path}", "arguments": {"rope_theta": 10.0}}, {"rope_theta": 10.0}),
        ({"factory": "a.b:c", "arguments": {"vocab_size": 150_000, "width": 7}, "vocab_size": 150_000}, {"width": 7}),
    ):
        job = Job.model_validate({**tree.model_dump(exclude_unset=True), "model": {"family": "module", **settings}})
        model: Any = small_job(job).model
        assert model.arguments.pop("vocab_size") == 512
        assert model.arguments.pop("pad_token_id", 0) < 512 and model.arguments == others
        assert model.vocab_size == (512 if job.model.vocab_size else None)


def test_data_fit_a_small_vocabulary(tmp_path: Path) -> None:
    def data_of(*settings: str) -> Any:
        return small_job(load_job("llama3-8b", [f"data.cache={tmp_path / 'cache'}", "data.workers=1", *settings])).data

    bpe, text = "bpe:512", str(TEXT)
    assert (data_of().source, data_of().tokenizer) == ("stdlib", bpe)
    assert (
        data_of("data.tokenizer=bytes").tokenizer == "bytes"
        and data_of("data.tokenizer=bpe:300").tokenizer == "bpe:300"
    )
    data = data_of(f"data.source={text}", "data.tokenizer=some/tokenizer.json")
    short = data.model_copy(update={"sequence_length": 16})
    assert (data.source, data.tokenizer) == (text, bpe) and prepare_data(short).vocab_size <= 512
    with patch.object(shrink_job, "TEXT_BYTES", 100):
        assert data_of(f"data.source={text}").source == "stdlib"
    built = {}
    for tokenizer in ("bytes", "bpe:600"):
        settings = load_job("tiny", [f"data.source={text}", f"data.tokenizer={tokenizer}", "data.workers=1"]).data
        built[tokenizer] = str(tmp_path / tokenizer.partition(":")[0])
        (source,) = settings.sources()
        build_corpus_folder(source, settings, Path(built[tokenizer]), progress=lambda *_: None)
    assert data_of(f"data.source={built['bytes']}").source == built["bytes"]
    assert data_of(f"data.source={built['bpe:600']}").source == "stdlib"
    job = load_job("llama3-8b").model_copy(update={"data": load_job("bert-classify").data})
    labelled = job.data.model_copy(update={"source": built["bpe:600"], "tokenizer": "bpe:128256"})
    assert small_job(job.model_copy(update={"data": labelled})).data.source == "synthetic:majority"
    weights = {built["bpe:600"]: 2.0, "stdlib": 1.0, text: 4.0}
    mixture = tuple(DataSourceSettings(source=source, weight=weight) for source, weight in weights.items())
    mixed = DataSettings(mixture=mixture, tokenizer="bpe:128256")
    sources = small_job(job.model_copy(update={"data": mixed})).data.sources()
    assert [(each.source, each.weight) for each in sources] == [("stdlib", 3.0), (text, 4.0)]


# --- the head with all entries ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "ranks", "dtype"),
    [
        (262_144, 2, torch.float64),
        (128_256, 2, torch.bfloat16),
        (50_257, 3, torch.float16),
        (20_001, 8, torch.float32),
        (9, 8, torch.float64),
    ],
)
def test_a_right_head_is_not_called_wrong(entries: int, ranks: int, dtype: torch.dtype) -> None:
    verdict = verify_full_head(entries, ranks, dtype)
    largest = 1e-14 * max(1.0, (entries / 50_257) ** 0.5)  # Errors of sums grow with the root of their length
    assert verdict.ok and 0 < verdict.worst_relative < largest, verdict
    assert str(verdict).startswith(f"same   head of {entries:,} entries on tp={ranks}: worst ")


def test_a_huge_vocabulary_is_cut_to_one_with_the_same_padding() -> None:
    with patch.object(full_vocabulary, "MAX_ENTRIES", 1000):
        assert [verify_full_head(entries, 4, torch.float64).entries for entries in (1000, 1001)] == [1000, 997]
    assert MAX_ENTRIES >= 2**18


def padding_counts(spec: ShardSpec, dim: int, *, group: Any) -> RankVocabularyShard:
    shard = from_spec(spec, dim, group=group)
    return replace(shard, stop=shard.start + spec.local_shape[dim])


def start_in_16_bits(spec: ShardSpec, dim: int, *, group: Any) -> RankVocabularyShard:
    shard = from_spec(spec, dim, group=group)
    shift = shard.start - shard.start % 2**16
    return replace(shard, start=shard.start - shift, stop=shard.stop - shift)


def lookup_in_16_bits(module: nn.Module, entries: range) -> Callable[[], None]:
    start = entries.start % 2**16
    return shard_embedding(module, range(start, start + len(entries)))


def last_slice_is_skipped(original: Callable[..., Iterator[slice]]) -> Callable[..., Iterator[slice]]:
    return lambda *arguments: iter((all_slices := list(original(*arguments)))[: max(1, len(all_slices) - 1)])


def last_entries_are_skipped(logits: Tensor, targets: Tensor, vocabulary: Any) -> Any:
    return reduce_over_ranks(logits[:, :-4096], targets, replace(vocabulary, stop=vocabulary.stop - 4096))


def rounded_logsumexp(logits: Tensor, targets: Tensor, vocabulary: Any) -> Any:
    logsumexp, losses = reduce_over_ranks(logits, targets, vocabulary)
    rounded = logsumexp.to(logits.dtype).to(logsumexp.dtype)
    return rounded, losses + (rounded - logsumexp)


def rounded_target_logit(logits: Tensor, targets: Tensor, vocabulary: Any) -> Any:
    """The loss is rounded, and its gradient is right."""
    logsumexp, losses = reduce_over_ranks(logits, targets, vocabulary)
    return logsumexp, losses.to(logits.dtype).to(losses.dtype)


def with_errors_in_float16(hidden: Tensor, *arguments: Any, **options: Any) -> Any:
    """Weights and scale multiply what was rounded, as with bfloat16."""
    weights = options["weights"]
    if hidden.dtype != torch.float16 or not any(options["needs_grad"]):
        return blockwise_loss(hidden, *arguments, **options)
    scale = weights.max()
    total, gradients = blockwise_loss(hidden, *arguments, **{**options, "weights": weights / scale})
    return total * scale, tuple(None if each is None else each * scale.to(each.dtype) for each in gradients)


def with_late_scale(*arguments: Any, output: Tensor, scale: Tensor | None = None, **options: Any) -> None:
    write_errors(*arguments, output=output, **options)
    if scale is not None:
        output.mul_(scale.to(output.dtype))


reduce_over_ranks, blockwise_loss, write_errors = loss._reduce_over_ranks, loss._blockwise_loss, loss._write_errors
FIRST_ON_RANKS = "loss (loss fused, 2 ranks), in float64"
FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "padding": (RankVocabularyShard, "from_spec", staticmethod(padding_counts), FIRST_ON_RANKS),
    "start": (RankVocabularyShard, "from_spec", staticmethod(start_in_16_bits), f"vectors{FIRST_ON_RANKS[4:]}"),
    "lookup": (full_vocabulary, "shard_embedding", lookup_in_16_bits, f"vectors{FIRST_ON_RANKS[4:]}"),
    "block of rows": (
        *(loss, "even_row_slices", last_slice_is_skipped(logit_slices.even_row_slices)),
        "loss (loss fused, one device), in float64",
    ),
    "chunk of rows": (
        *(loss, "_softmax_chunks", last_slice_is_skipped(loss._softmax_chunks)),
        "loss (loss from logits, 2 ranks), in float64",
    ),
    "entries": (loss, "_reduce_over_ranks", last_entries_are_skipped, FIRST_ON_RANKS),
    "sums": (*(loss, "accumulation_dtype", lambda tensor: tensor.dtype), "loss (loss fused, one device), in bfloat16"),
    "log-sum-exp": (loss, "_reduce_over_ranks", rounded_logsumexp, "loss (loss fused, 2 ranks), in bfloat16"),
    "target": (loss, "_reduce_over_ranks", rounded_target_logit, "loss (loss fused, 2 ranks), in bfloat16"),
}
FLOAT16_FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "rounded before they are scaled": (
        *(loss, "_blockwise_loss", with_errors_in_float16),
        "gradient of the entries that are not targets (loss fused, one device), in float16",
    ),
    "scaled after": (
        *(loss, "_write_errors", with_late_scale),
        "gradient of the entries that are not targets (loss from logits, 2 ranks), in float16",
    ),
}


QUICK = ("lookup", "chunk of rows", "log-sum-exp")


@pytest.mark.parametrize(
    "fault", [fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.proof) for fault in FAULTS]
)
def test_a_mistake_that_needs_many_entries_is_found(fault: str) -> None:
    owner, name, wrong, first = FAULTS[fault]
    with patch.object(owner, name, wrong):
        verdict = verify_full_head(ENTRIES, 2, torch.bfloat16)
    assert not verdict.ok and verdict.exit_code == 6, verdict
    assert str(verdict).startswith(f"WRONG  head of 140,001 entries on tp=2: first in {first}: "), verdict


@pytest.mark.proof
@pytest.mark.parametrize("fault", FLOAT16_FAULTS)
def test_tiny_errors_are_scaled_before_they_are_rounded(fault: str) -> None:
    owner, name, wrong, first = FLOAT16_FAULTS[fault]
    with patch.object(owner, name, wrong):
        verdict = verify_full_head(many_entries(260, 2), 2, torch.float16)
    assert not verdict.ok and first in str(verdict), verdict


def test_a_rank_that_fails_ends_the_others() -> None:
    threads = RankThreads(3)

    def compute(rank: int) -> float:
        if rank == 1:
            raise ValueError("rank 1")
        return float(threads.all_reduce(rank, torch.ones(1), "sum"))

    with pytest.raises(ValueError, match="rank 1"):
        threads.run(compute)
    assert threads.run(lambda rank: float(threads.all_reduce(rank, torch.full((1,), float(rank)), "max"))) == [2.0] * 3
