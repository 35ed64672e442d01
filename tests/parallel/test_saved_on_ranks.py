"""Bytes that autograd keeps on each of several tensor-parallel ranks, beside the sizes of the model on one of them."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from live_storages import kept_bytes_after, live_bytes_after
from motet.core.trace import install_sink
from motet.models.arch.logit_slices import padded_targets
from motet.models.spec.layer_specs import BlockPolicy, MicroBatchShape
from motet.models.spec.model_spec import spec_from_settings
from motet.parallel.process.process_group import RankGroup
from motet.train.build import TrainingComponents, build_components, precision_context
from motet.train.job import Job
from on_ranks import Counter
from ranks import Ranks
from train.compiled_runs import compiling
from train.runs import small_job

ROWS = 2
LARGEST_DIFFERENCE = 0.02


def kept_bytes(group: RankGroup, job: Job) -> tuple[int, MicroBatchShape]:
    """Bytes that a forward leaves to backward."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        assert parts.engine.plan.inventory.parameter_count == spec_from_settings(job.model).parameter_count
        batch = parts.data.batch(0, range(ROWS))
        with parts.model.randomness(0, batch.rows):
            kept = kept_bytes_after(parts.model.module, lambda: parts.model.loss_sum(batch))
        targets = padded_targets(int((batch.weights != 0).sum()))
        source_length = 0 if batch.source is None else batch.source.shape[1]
        is_packed = batch.documents is not None
        shape = MicroBatchShape(ROWS, batch.tokens.shape[1], source_length, is_packed, targets)
    return kept, shape


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


class MicroBatchCost(NamedTuple):
    """Bytes that a forward leaves to backward, and the bytes that each collective of forward and backward sends."""

    kept: int
    sent: tuple[list[float], list[float]]


class SentSizes(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[float] = []

    def on_count(self, name: str, value: float) -> None:
        self.sizes += [value] if name == "sent_bytes" else []


def cost_of_micro_batch(parts: TrainingComponents) -> MicroBatchCost:
    batch, losses, forward, backward = parts.data.batch(0, range(ROWS)), list[torch.Tensor](), SentSizes(), SentSizes()
    with install_sink(forward), parts.model.randomness(0, batch.rows):
        kept = kept_bytes_after(parts.model.module, lambda: losses.append(parts.model.loss_sum(batch)))
    with install_sink(backward):
        torch.autograd.grad(losses[0], [*parts.model.module.parameters()])
    return MicroBatchCost(kept, (sorted(forward.sizes), sorted(backward.sizes)))


def eager_and_compiled(group: RankGroup, job: Job, code: bool) -> tuple[MicroBatchCost, MicroBatchCost]:
    """Costs with eager blocks, and with compiled ones: by torch's compiler or as traced."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder, compiling(code=code):
        parts = build_components(job, group, Path(folder))
        blocks = parts.engine.compiled
        assert blocks is not None
        blocks.is_paused = True
        eager = cost_of_micro_batch(parts)
        blocks.is_paused = False
        compiled = cost_of_micro_batch(parts)
        assert blocks.graphs and blocks.reason is None
    return eager, compiled


# Model -> settings, and bytes of the outputs of norms that only split layers read: a graph computes them again.
SPLIT_MODELS: dict[str, tuple[list[str], int]] = {
    "decoder": ([], 4 * 4096),
    "llama": ([], 4 * 4096),  # A norm of transformers keeps more in eager blocks
    "bert": (["model.dropout=0.0"], 2 * 4096),
    "t5": (["model.dropout=0.0"], 4 * 4096 + 6 * 1024),
}


@pytest.mark.parametrize(
    ("model", "code"),
    [
        *(pytest.param(model, False, marks=[] if model == "llama" else pytest.mark.proof) for model in SPLIT_MODELS),
        *(pytest.param(model, True, marks=pytest.mark.proof) for model in SPLIT_MODELS),
    ],
)
def test_compiled_blocks_gather_again_as_eager_blocks_do(ranks: Ranks, tmp_path: Path, model: str, code: bool) -> None:
    settings, outputs_of_norms = SPLIT_MODELS[model]
    how = ["layout.tp=2", "layout.sp=true", "precision.recipe=fp32", "data.batch_sequences=2", "run.compile=blocks"]
    job = small_job(tmp_path, *how, *settings, model=model)
    for eager, compiled in ranks.run(2, eager_and_compiled, job, code, timeout_s=600):
        assert compiled.sent == eager.sent
        assert compiled.kept <= eager.kept - outputs_of_norms


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
