"""Bytes that autograd keeps on each of several tensor-parallel ranks, beside the sizes of the model on one of them."""

import tempfile
from pathlib import Path

import pytest
import torch

from live_storages import live_bytes_after
from motet.models.arch.logit_slices import padded_targets
from motet.models.spec.layer_specs import BlockPolicy, MicroBatchShape
from motet.models.spec.model_spec import spec_from_settings
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from ranks import Ranks
from train.runs import small_job

ROWS = 2
LARGEST_DIFFERENCE = 0.02


def kept_bytes(group: RankGroup, job: Job) -> tuple[int, MicroBatchShape]:
    """Bytes of the distinct storages that a forward leaves to backward and that are no parameters."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        parameters = {p.untyped_storage().data_ptr() for p in parts.model.module.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage  # held, so that its address is not given away
            return tensor

        assert parts.engine.plan.inventory.parameter_count == spec_from_settings(job.model).parameter_count
        batch = parts.data.batch(0, range(ROWS))
        watched = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with watched, parts.model.randomness(0, batch.rows):
            parts.model.loss_sum(batch)
        targets = padded_targets(int((batch.weights != 0).sum()))
        source_length = 0 if batch.source is None else batch.source.shape[1]
        is_packed = batch.documents is not None
        shape = MicroBatchShape(ROWS, batch.tokens.shape[1], source_length, is_packed, targets)
    return sum(storage.nbytes() for storage in kept.values()), shape


def check(ranks: Ranks, folder: Path, degree: int, *settings: str, model: str = "decoder") -> None:
    how = [f"layout.tp={degree}", "precision.recipe=fp32", "data.batch_sequences=2", *settings]
    job = small_job(folder, *how, model=model)
    spec = spec_from_settings(job.model).on_rank(degree, sequence=job.layout.sp)
    for kept, shape in ranks.run(degree, kept_bytes, job, timeout_s=240):
        predicted = spec.saved_bytes(shape, "float32")
        assert abs(kept - predicted) <= LARGEST_DIFFERENCE * kept, (kept, predicted)


def test_a_rank_keeps_what_the_sizes_of_the_model_say(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, tmp_path, 2, "layout.sp=true")


@pytest.mark.proof
@pytest.mark.parametrize("sequence", ["true", "false"])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("decoder", []),
        ("decoder", ["model.dropout=0.1", "model.kv_heads=1", "model.tied=false"]),
        ("decoder", ["model.gated=false", "model.norm=layer", "model.positions=learned", "model.ffn_hidden=50"]),
        ("decoder", ["model.query_key_norm=true", "model.vocab_size=261"]),
        ("bert", []),
        ("t5", []),
    ],
    ids=["llama-like", "dropout", "gpt-like", "norms of heads", "bert", "t5"],
)
def test_each_family_keeps_what_its_sizes_say(
    ranks: Ranks, tmp_path: Path, model: str, settings: list[str], degree: int, sequence: str
) -> None:
    check(ranks, tmp_path, degree, f"layout.sp={sequence}", *settings, model=model)


def live_on_rank(group: RankGroup, job: Job) -> tuple[int, MicroBatchShape]:
    """Bytes that are alive after a forward and were not before it."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        batch = parts.data.batch(0, range(2))
        with parts.model.randomness(0, batch.rows):
            live = live_bytes_after(lambda: parts.model.loss_sum(batch))
        return live, MicroBatchShape(2, batch.tokens.shape[1], packed=batch.documents is not None)


def check_ranks(ranks: Ranks, folder: Path, degree: int, *settings: str) -> None:
    """The difference that recomputation makes is the predicted one."""
    how = ["precision.recipe=fp32", "data.batch_sequences=2", "data.sequence_length=64", "model.context=64", *settings]
    how += [f"layout.tp={degree}"] if degree > 1 else []
    plain = small_job(folder, *how)
    spec = spec_from_settings(plain.model).on_rank(degree, sequence=plain.layout.sp)
    live = ranks.run(degree, live_on_rank, plain, timeout_s=240)
    policies: tuple[BlockPolicy, ...] = ("full", "selective")
    for policy in policies:
        job = small_job(folder, *how, f"memory.recompute={policy}")
        recomputing = ranks.run(degree, live_on_rank, job, timeout_s=240)
        for (none, shape), (count, _) in zip(live, recomputing, strict=True):
            predicted = spec.saved_bytes(shape, "float32", [policy] * spec.policy_count)
            saved = spec.saved_bytes(shape, "float32") - predicted
            assert abs(none - count - saved) <= 0.01 * predicted, (policy, none, count, predicted)


def test_tensor_parallel_ranks_keep_what_is_predicted(ranks: Ranks, tmp_path: Path) -> None:
    check_ranks(ranks, tmp_path, 2, "layout.sp=true")


@pytest.mark.proof
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("sequence", ["true", "false"])
@pytest.mark.parametrize("degree", [2, 4])
def test_all_tensor_parallel_ranks(ranks: Ranks, tmp_path: Path, degree: int, sequence: str, dropout: float) -> None:
    check_ranks(ranks, tmp_path, degree, f"layout.sp={sequence}", f"model.dropout={dropout}")
