"""Sequence parallelism: what may be split along tokens is proven, trains the same, and sends what theory says."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from motet.collectives.execute.slot_plan import backend_sent_bytes
from motet.core.batch import Batch
from motet.core.errors import InputError
from motet.core.trace import install_sink
from motet.models.user_module import find_blocks
from motet.parallel.model_sharding import BoundaryComm, ModelSharding, ShardRule
from motet.parallel.process.process_group import RankGroup
from motet.parallel.tensor_parallel.sequence.sequence_split import BlockStream, SequenceSplit, prove_sequence_split
from motet.parallel.tensor_parallel.split_proof import prove_splits
from motet.parallel.tensor_parallel.split_regions import ProvenSplits
from motet.train.build import TrainingComponents, build_components, build_model, precision_context
from motet.train.job import Job
from motet.train.launch.preflight import check_job
from motet.train.proof.proposed_sharding import sharding_of_model
from on_ranks import Counter
from parallel.modules_to_split import ROWS, ModuleAndForwards, huggingface_model, our_model
from parallel.split_decoders import train_split, worst_difference
from parallel.stream_models import UNSPLIT, VOCABULARY, StreamBlock, StreamModel, TokenConvolution, TokenNorm
from ranks import Ranks
from train.runs import HUGGING_FACE, small_job

ALONE = RankGroup(0, 1, None, torch.device("cpu"))
LENGTHS = (8, 12)


def proven(
    model: ModuleAndForwards, degree: int = 2, change: Callable[[ProvenSplits], ProvenSplits] = lambda splits: splits
) -> SequenceSplit:
    module, forwards = model
    heads = {"lm_head", "head", "cls.predictions.decoder", "output_head"}
    splits = change(prove_splits(module, forwards, degree, excluded=heads, rows=ROWS))
    return prove_sequence_split(module, forwards, splits, degree=degree, rows=ROWS)


def texts(comms: Sequence[BoundaryComm]) -> list[str]:
    return [f"{comm.module} {comm.side} {comm.argument}: {comm.operation} {comm.dim}" for comm in comms]


# --- proof -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "degree"),
    [
        *(("tiny", 2), ("bert-like", 4), ("t5-like", 2)),
        *(pytest.param(*case, marks=pytest.mark.proof) for case in (("tiny", 4), ("bert-like", 2), ("t5-like", 4))),
    ],
)
def test_streams_of_our_models_are_split(name: str, degree: int) -> None:
    module, forwards = our_model(name, LENGTHS, **({"kv_heads": 4} if name == "tiny" else {}))
    split = proven((module, forwards), degree)
    expected = []
    for stack in ["encoder.blocks", "decoder.blocks"] if name == "t5-like" else ["blocks"]:
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
    norms = {name for name, _ in module.named_parameters() if "blocks" in name and "_norm" in name}
    assert set(split.rules) == norms
    assert {rule.partial_over for rule in split.rules.values()} == {("dp", "cp", "tp")}


# Family -> the communication of its second block, without the name of the block.
SELF_ATTENTION = ["self_attn input hidden_states: gather 1", "self_attn.o_proj output 0: scatter 1"]
MLP = ["mlp.gate_proj input 0: gather 1", "mlp.down_proj output 0: scatter 1"]
FAMILIES = {
    "llama": [*SELF_ATTENTION, *MLP],  # Its attention reads the length of its input
    "gemma2": [*SELF_ATTENTION, *MLP],
    "mixtral": SELF_ATTENTION,  # Experts work token by token
    "gpt2": [
        *("attn.c_attn input 0: gather 1", "attn.c_proj output 0: scatter 1"),
        *("mlp.c_fc input 0: gather 1", "mlp.c_proj output 0: scatter 1"),
    ],
    "opt": [  # Rows and tokens are one dimension of its MLP
        *("self_attn input hidden_states: gather 1", "self_attn.out_proj output 0: scatter 1"),
        *("fc1 input 0: gather 0", "fc2 output 0: scatter 0"),
    ],
    "olmo2": ["self_attn input hidden_states: replicate 1", "self_attn output 0: split 1", *MLP],
    "bert": [
        *("attention.self input 0: gather 1", "attention.output.dense output 0: scatter 1"),
        *("intermediate.dense input 0: gather 1", "output.dense output 0: scatter 1"),
    ],
    "t5": [
        *("layer.0.SelfAttention input 0: gather 1", "layer.0.SelfAttention.o output 0: scatter 1"),
        *("layer.1.EncDecAttention input 0: gather 1", "layer.1.EncDecAttention.k input 0: copy -1"),
        "layer.1.EncDecAttention.o output 0: scatter 1",
        *("layer.2.DenseReluDense.wi input 0: gather 1", "layer.2.DenseReluDense.wo output 0: scatter 1"),
    ],
}
QUICK = {"llama", "opt", "olmo2", "bert"}


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f in QUICK else pytest.mark.proof) for f in FAMILIES])
def test_streams_of_families_are_split(family: str) -> None:
    split = proven(huggingface_model(family, LENGTHS))
    block = f"{split.blocks[-1]}."
    inside = [text.removeprefix(block) for text in texts(split.boundary_comms) if text.startswith(block)]
    assert inside == FAMILIES[family]
    mixing = ["model.layers.0.self_attn", "model.layers.1.self_attn"] if family == "olmo2" else []
    assert [each.module for each in split.unsplit] == mixing


def stream_model(make: Callable[[], nn.Module], *lengths: int) -> ModuleAndForwards:
    torch.manual_seed(0)
    module = make()
    tokens = [torch.arange(ROWS * length).view(ROWS, length) % VOCABULARY for length in lengths or LENGTHS]
    return module, [partial(module, each) for each in tokens]


@pytest.mark.parametrize("name", UNSPLIT)
def test_a_stream_that_mixes_tokens_stays_whole(name: str) -> None:
    make, reason = UNSPLIT[name]
    split = proven(stream_model(make))
    (unsplit,) = split.unsplit
    assert (split.blocks, split.boundary_comms, split.rules) == ((), (), {})
    assert unsplit.module == "blocks" and "stream is not split" in unsplit.reason and reason in unsplit.reason


@pytest.mark.parametrize("inner", [TokenNorm, TokenConvolution])
def test_a_module_that_mixes_tokens_gets_the_whole_sequence(inner: Callable[[], nn.Module]) -> None:
    split = proven(stream_model(lambda: StreamModel(lambda: StreamBlock(inner=inner()))))
    assert texts(split.boundary_comms)[:5] == [
        "blocks.0 input 0: split 1",
        "blocks.0.inner input 0: replicate 1",
        "blocks.0.inner output 0: split 1",
        "blocks.0.mlp.up input 0: gather 1",
        "blocks.0.mlp.down output 0: scatter 1",
    ]
    assert [each.module for each in split.unsplit] == ["blocks.0.inner", "blocks.1.inner"]
    assert not any("inner" in name for name in split.rules)


def with_rules(splits: ProvenSplits, ending: str, change: Callable[[ShardRule], ShardRule]) -> ProvenSplits:
    """The same splits with another rule for the tensors whose names end so."""
    regions = []
    for region in splits.regions:
        rules = {name: change(rule) if name.endswith(ending) else rule for name, rule in region.rules.items()}
        regions.append(replace(region, rules=rules))
    return replace(splits, regions=tuple(regions))


# Tensors -> (a mistake in their rules, the reason)
MISTAKES: dict[str, tuple[Callable[[ShardRule], ShardRule], str]] = {
    "qkv.weight": (
        lambda rule: replace(rule, splits=(replace(rule.splits[0], parts=()),)),  # Fused products as one
        "the outputs of the shards of blocks.0.attention.output do not add up to its output",
    ),
    "down.weight": (
        lambda rule: replace(rule, splits=(replace(rule.splits[0], dim=0),)),
        "the forward of a shard fails",
    ),
}


@pytest.mark.parametrize("ending", MISTAKES)
def test_a_stream_between_wrong_splits_stays_whole(ending: str) -> None:
    change, reason = MISTAKES[ending]
    model = our_model("tiny", LENGTHS, kv_heads=4)
    (unsplit,) = proven(model, change=lambda splits: with_rules(splits, ending, change)).unsplit
    assert unsplit.module == "blocks" and reason in unsplit.reason


def test_a_gradient_that_is_wrongly_called_complete_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockStream, "rules", lambda _: {})
    (unsplit,) = proven(stream_model(StreamModel)).unsplit
    assert "the gradient of blocks.0.norm.weight does not follow from those of parts" in unsplit.reason


def test_a_length_that_ranks_do_not_divide_is_not_split() -> None:
    (unsplit,) = proven(stream_model(StreamModel, 8, 9)).unsplit
    assert "2 ranks cannot split activations of shape [(2, 9, 8)] along dimension 1" in unsplit.reason


def proposed(job: Job) -> ModelSharding:
    with precision_context(job):
        data, model = build_model(job, ALONE.device, ALONE)
        return sharding_of_model(job, model, data, layout=job.layout_for(job.layout.tp))


def test_a_job_splits_the_sequences_that_its_ranks_divide(tmp_path: Path) -> None:
    """The decoder reads five tokens and stays whole."""
    split = proposed(small_job(tmp_path, "data.sequence_length=16", *SP, model="t5"))
    blocks = {comm.module for comm in split.boundary_comms if comm.operation == "split"}
    assert blocks == {"encoder.blocks.0"}


def test_a_job_whose_sequences_no_rank_count_divides_is_refused(tmp_path: Path) -> None:
    job = small_job(tmp_path, "data.sequence_length=15", *SP)
    with pytest.raises(InputError, match=r"splits the 15 tokens of a sequence over layout.tp = 2 ranks"):
        check_job(job, 2)
    with pytest.raises(InputError, match=r"layout.sp = true finds nothing to split in this model \(blocks: .*2 ranks"):
        proposed(job)


# --- running ---------------------------------------------------------------------------------------

SP = ("layout.tp=2", "layout.sp=true", "data.batch_sequences=4")
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "opt": {
        **_SMALL,
        "architectures": ["OPTForCausalLM"],
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "dropout": 0.1,
    },
    "olmo2": {**_SMALL, "architectures": ["Olmo2ForCausalLM"], "intermediate_size": 48},
    "bloom": {"architectures": ["BloomForCausalLM"], "hidden_size": 32, "n_head": 4, "n_layer": 2},
    "mixtral": {
        **_SMALL,
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
}


@pytest.mark.proof
@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_two_ranks_train_as_one(ranks: Ranks, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and tokens as one dimension, whole attention with one and with two inputs, experts."""
    monkeypatch.setitem(HUGGING_FACE, family, {"model_type": family, **FAMILY_CONFIGS[family]})
    alone = small_job(tmp_path, "data.sequence_length=16", SP[-1], model=family)
    split = ranks.run(2, train_split, small_job(tmp_path, "data.sequence_length=16", *SP, model=family), None)
    assert worst_difference(split, train_split(ALONE, alone, ModelSharding()), rates=0.03) < 1e-12


@dataclass
class Observed:
    """A rank at work on batches of some lengths."""

    losses: list[float]
    gradients: dict[str, Tensor]  # Of norms, over all batches
    sent: tuple[float, float]  # Bytes in forward and in backward of the first batch
    saved_shapes: set[tuple[int, ...]]  # Saved for backward inside of blocks in the first batch
    refusal: str = ""


def observe(group: RankGroup, job: Job, *lengths: int) -> Observed:
    """Run a batch of each length, then backward of all; then one of a token less, without gradients."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        sharding = ModelSharding() if group.world == 1 else None
        parts = build_components(job, group, Path(folder), model_sharding=sharding)
        batch = parts.data.batch(0, range(4))
        saved: set[tuple[int, ...]] = set()
        forward_counter, backward_counter = Counter(), Counter()
        with install_sink(forward_counter):
            losses = [loss_saving(parts, cut(batch, lengths[0]), saved)]
        losses += [parts.model.loss_sum(cut(batch, length)) for length in lengths[1:]]
        parameters = dict(parts.model.module.named_parameters())
        gradients = dict.fromkeys(parameters, torch.zeros(()))
        for index, loss in enumerate(losses):
            with install_sink(backward_counter if index == 0 else Counter()):
                found = torch.autograd.grad(loss, [*parameters.values()])
            gradients = {name: gradients[name] + g for name, g in zip(parameters, found, strict=True)}
        refusal, odd = "", cut(batch, lengths[-1] - 1)
        try:
            if group.world > 1:
                parts.model.loss_sum(odd)
        except InputError as error:
            refusal = str(error)
        with torch.no_grad():
            losses.append(parts.model.loss_sum(odd))
        sent = forward_counter.counts.get("sent_bytes", 0), backward_counter.counts.get("sent_bytes", 0)
        norms = {name: gradient for name, gradient in gradients.items() if "norm" in name}
        return Observed([loss.item() for loss in losses], norms, sent, saved, refusal)


def cut(batch: Batch, length: int) -> Batch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{n: v[:, :length] for n, v in values.items() if v is not None and v.ndim == 2})


def loss_saving(parts: TrainingComponents, batch: Batch, saved: set[tuple[int, ...]]) -> Tensor:
    """The loss, noting the shapes of what blocks save for backward."""

    def note(x: Tensor) -> Tensor:
        saved.add(tuple(x.shape))
        return x

    with ExitStack() as hooks:
        for block in find_blocks(parts.model.module):
            inside = ExitStack()
            notes = partial(torch.autograd.graph.saved_tensors_hooks, note, lambda x: x)
            enter = block.register_forward_pre_hook(
                lambda *_, inside=inside, notes=notes: inside.enter_context(notes()) and None
            )
            leave = block.register_forward_hook(lambda *_, inside=inside: inside.close())
            hooks.callback(enter.remove)
            hooks.callback(leave.remove)
        return parts.model.loss_sum(batch)


ROWS_OF_JOB, LENGTH, HIDDEN, INNER = 4, 16, 32, 48


@pytest.fixture(scope="module")
def observed(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[list[Observed], Observed]]:
    """Number of layers -> two ranks and one, on batches of 16 and of 12 tokens."""
    folder = tmp_path_factory.mktemp("sequence")
    results = {}
    for layers in (2, 3):
        split, alone = (small_job(folder, f"model.layers={layers}", *more, SP[-1]) for more in (SP[:2], ()))
        results[layers] = ranks.run(2, observe, split, LENGTH, 12), observe(ALONE, alone, LENGTH, 12)
    return results


Runs = dict[int, tuple[list[Observed], Observed]]


def test_batches_of_several_lengths_compute_the_same(observed: Runs) -> None:
    """Two micro-batches wait for their backward; a batch of 11 tokens runs unsplit without gradients."""
    split, alone = observed[2]
    for run in split:
        assert run.losses == pytest.approx(alone.losses, rel=1e-13)
    for name, gradient in alone.gradients.items():
        total = sum((run.gradients[name] for run in split), torch.zeros(()))
        expected = gradient if "blocks" in name else 2 * gradient  # The last norm is outside of the stream
        torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-11 * float(expected.abs().max()))


def test_with_gradients_a_length_that_ranks_do_not_divide_is_refused(observed: Runs) -> None:
    for run in observed[2][0]:
        assert "2 ranks cannot split dimension 1 of an activation of shape [4, 11, 32] evenly" in run.refusal


def test_a_layer_sends_what_theory_says(observed: Runs) -> None:
    """Two all-gathers and two reduce-scatters in each direction; backward also gathers the inputs of weights again."""
    numel = ROWS_OF_JOB * LENGTH * HIDDEN // 2
    for rank in range(2):
        two, three = (observed[layers][0][rank].sent for layers in (2, 3))
        gather, scatter = (
            backend_sent_bytes(kind, numel, "float64", rank=rank, hosts=(0, 0))
            for kind in ("all-gather", "reduce-scatter")
        )
        assert gather == scatter == numel * 8
        assert three[0] - two[0] == 2 * gather + 2 * scatter
        assert three[1] - two[1] == (2 + 2) * gather + 2 * scatter


def test_ranks_save_their_part_of_the_sequence(observed: Runs) -> None:
    """Blocks save the stream and the inputs of layers for half of the tokens, and heads or inner width for half."""
    stream, half = (ROWS_OF_JOB, LENGTH, HIDDEN), (ROWS_OF_JOB, LENGTH // 2, HIDDEN)
    assert {stream, (ROWS_OF_JOB, LENGTH, 2 * INNER)} <= observed[2][1].saved_shapes
    for run in observed[2][0]:
        assert half in run.saved_shapes and stream not in run.saved_shapes
        assert (ROWS_OF_JOB, LENGTH, 2 * INNER) not in run.saved_shapes
