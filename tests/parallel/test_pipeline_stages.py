"""Stages of modules: proven, and then trained as copies of the module, against the whole module."""

import weakref
from typing import Any

import modules_to_cut
import modules_without_stages
import pytest
import torch
from modules_to_cut import loss_of_module
from modules_to_split import FAMILIES
from pydantic import TypeAdapter
from staged_models import check_training, draw_tokens, huggingface_staged, our_staged, prove, with_random_values
from torch import Tensor, nn

from motet.parallel.model_sharding import ModelSharding
from motet.parallel.pipeline.stages.stage_module import PipelineStages, forget_parameters
from refusals import refused

# Of a reentrant checkpoint in blocks whose input has no gradient, which is so in a part of a proof.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
QUICK = [("llama", 3), ("t5", 4)]
# What can be cut -> (stages of `table.weight`, arguments that cross a border)
CUT: dict[type[modules_to_cut.BlockModel], tuple[tuple[int, ...], list[int | str]]] = {
    modules_to_cut.SequentialModel: ((0,), [0]),
    modules_to_cut.PassesEmbedding: ((0,), [0, "residual"]),
    modules_to_cut.AddsEmbedding: ((0, 1, 2), [0]),
    modules_to_cut.PassesScores: ((0,), [0, 1]),
    modules_to_cut.PassesDataclass: ((0,), [0, 0]),
    modules_to_cut.PassesIndices: ((0,), [0, 0]),
    modules_to_cut.PassesOwnTable: ((0,), [0, 1]),
    modules_to_cut.FrozenStart: ((0,), [0, "residual"]),
    modules_to_cut.TeacherInLoss: ((0,), [0]),
    modules_to_cut.LayersBetween: ((0,), [0]),
    modules_to_cut.CalledBackwards: ((0,), [0]),
    modules_to_cut.Checkpointed: ((0,), [0]),
    modules_to_cut.CheckpointsInside: ((0,), [0]),
    modules_to_cut.CheckpointsInsideReentrant: ((0,), [0]),
    modules_to_cut.CheckpointsSegments: ((0,), [0]),
    modules_to_cut.InjectsLosses: ((0,), [0]),
    modules_to_cut.SelfWriting: ((0,), [0]),
    modules_to_cut.RefusesNan: ((0,), [0]),
    modules_to_cut.CatchesExceptions: ((0,), [0]),
}
# What cannot -> the reason
REFUSED: dict[type[nn.Module], str] = {
    modules_without_stages.ReadsAllOutputs: "the loss is computed from earlier blocks than blocks.3",
    modules_without_stages.LeavesAttribute: "block blocks.3 reads something that earlier blocks left",
    modules_without_stages.LeavesInSharedObject: "block blocks.3 reads something that earlier blocks left",
    modules_without_stages.CountsInBuffer: "no stage has the values of buffer counter, which blocks of",
    modules_without_stages.CountsOnly: "no stage has the values of buffer counter",
    modules_without_stages.CountsBackwards: "the gradients of .* on its stages do not add up .*: relative difference",
    modules_without_stages.GathersLosses: "the loss is computed from earlier blocks than blocks.3",
    modules_without_stages.CalledTwice: "Block blocks.0: a forward calls it several times",
    modules_without_stages.ReturnsNothing: "block blocks.0 returns NoneType, in which no tensor was seen",
    modules_without_stages.SkipsAcross: "argument 0 of block blocks.3 is computed from earlier blocks than blocks.1",
    modules_without_stages.NoBlocks: "it has no list of blocks",
    modules_without_stages.CallsForward: "a forward calls none of its 4 blocks, such as blocks.0; leave layout.pp out$",
    modules_without_stages.CatchesAll: "let each forward call all blocks without catching .*, or leave layout.pp out$",
    modules_without_stages.CheckpointedReentrant: "recompute blocks with use_reentrant=False",
}


@pytest.mark.parametrize(("name", "stages"), [("tiny", 4), ("bert-like", 3), ("t5-like", 3)])
def test_stages_of_our_models_train_like_the_whole(name: str, stages: int) -> None:
    module, loss = our_staged(name)
    check_training(module, loss, prove(module, loss, stages))


@pytest.mark.parametrize(("family", "stages"), QUICK)
def test_stages_of_models_of_transformers_train_like_the_whole(family: str, stages: int) -> None:
    module, loss = huggingface_staged(family)
    check_training(module, loss, prove(module, loss, stages))


@pytest.mark.proof
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_all_families_train_like_the_whole(family: str, stages: int) -> None:
    module, loss = huggingface_staged(family)
    check_training(module, loss, prove(module, loss, stages))


@pytest.mark.parametrize("ranks", [(0, 1, 0, 1), (0, 1, 1, 0)], ids=["interleaved", "V"])
@pytest.mark.parametrize("name", ["gpt2-like", pytest.param("t5-like", marks=pytest.mark.proof)])
def test_two_stages_of_a_rank_share_a_module(name: str, ranks: tuple[int, ...]) -> None:
    module, loss = our_staged(name)
    check_training(module, loss, prove(module, loss, 4), ranks)


@pytest.mark.parametrize("kind", CUT, ids=lambda kind: kind.__name__)
def test_stages_of_modules_train_like_the_whole(kind: type[modules_to_cut.BlockModel]) -> None:
    """Three stages; the sharding goes to other ranks as JSON."""
    module, adapter = kind(), TypeAdapter(ModelSharding)
    sharding = prove(module, loss_of_module, 3)
    assert adapter.validate_json(adapter.dump_json(sharding)) == sharding
    staged = check_training(module, loss_of_module, sharding)
    for wires in sharding.wires:
        assert (staged.held["table.weight"], [wire.argument for wire in wires]) == CUT[kind]


@pytest.mark.proof
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("kind", CUT, ids=lambda kind: kind.__name__)
def test_other_numbers_of_stages_train_like_the_whole(kind: type[modules_to_cut.BlockModel], stages: int) -> None:
    module = kind()
    check_training(module, loss_of_module, prove(module, loss_of_module, stages))


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_cannot_be_cut_is_refused_with_the_reason(kind: type[nn.Module]) -> None:
    refused(REFUSED[kind], prove, kind(), loss_of_module, 3)


def test_tensors_between_blocks_and_statistics_belong_to_stages() -> None:
    """The layer before block 2 is computed with block 1, statistics of the first layer with block 0."""
    sharding = prove(modules_to_cut.LayersBetween(), loss_of_module, 3)
    assert sharding.stages == (range(1), range(1, 3), range(3, 4))
    names = ("between.weight", "statistics.running_mean", "statistics.num_batches_tracked", "head.weight")
    assert [sharding.stage_tensors.get(name) for name in names] == [(1,), (0,), (0, 1, 2), None]


def test_wires_of_an_encoder_decoder() -> None:
    """The table of relative positions in the first block of a stack makes a bias that all its blocks add."""
    module, loss = huggingface_staged("t5")
    sharding = prove(module, loss, [range(2), range(2, 4), range(4, 6), range(6, 8)])
    source, tokens = ("rows", "source tokens", 32), ("rows", "tokens", 32)
    assert [[(wire.dims, wire.needs_gradient, wire.is_constant) for wire in wires] for wires in sharding.wires] == [
        [(source, True, False), ((1, 4, "source tokens", "source tokens"), True, True)],
        [(tokens, True, False), (source, True, True)],
        [
            (tokens, True, False),
            ((1, 4, "tokens", "tokens"), True, True),
            (source, True, True),
            ((1, 4, "tokens", "source tokens"), False, True),
        ],
    ]
    assert sharding.stage_tensors["shared.weight"] == (0, 1, 3)  # Tokens are looked up after the encoder's last block


def test_nothing_trained_needs_no_gradient() -> None:
    sharding = prove(modules_to_cut.FrozenStart(), loss_of_module, 2)
    assert [wire.needs_gradient for wire in sharding.wires[0]] == [False, False]


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        (5, "layout.pp x layout.chunks = 5 stages, but BlockModel has 4 blocks, and a stage needs one; use 4 stages"),
        ([range(1), range(1, 3)], "layout.stages ends with block 2, but BlockModel has 4 blocks; end it with block 3"),
        ([range(1), range(1, 6)], "layout.stages ends with block 5, but BlockModel has 4 blocks; end it with block 3"),
        ([range(0), range(4)], "is empty; give each stage a block"),
    ],
)
def test_stages_that_do_not_fit_the_blocks_are_refused(stages: Any, sentence: str) -> None:
    refused(sentence, prove, modules_to_cut.BlockModel(), loss_of_module, stages)


# --- one stage of a module -------------------------------------------------------------------------


@pytest.fixture
def two_stages() -> tuple[nn.Module, PipelineStages, Tensor]:
    """A module in two stages, and what the first one sends for two rows."""
    module = with_random_values(modules_to_cut.BlockModel()).eval()
    stages = PipelineStages(module, prove(modules_to_cut.BlockModel(), loss_of_module, 2))
    with torch.no_grad():
        (sent,) = stages.run(0, lambda: module(draw_tokens(2, 5)))
    return module, stages, sent


def test_evaluation_and_logits_come_from_the_last_stage(two_stages: tuple[nn.Module, PipelineStages, Tensor]) -> None:
    module, stages, sent = two_stages
    with torch.no_grad():
        logits = module.head(module.norm(module.run_blocks(module.table(draw_tokens(2, 5)))))
        compute = lambda: module.head(module.norm(module.run_blocks(module.table(draw_tokens(2, 5)))))  # noqa: E731
        assert torch.equal(stages.run(1, compute, [sent])[0], logits) and not sent.requires_grad


def test_hooks_see_the_blocks_of_the_stage_with_their_values(
    two_stages: tuple[nn.Module, PipelineStages, Tensor],
) -> None:
    module, stages, sent = two_stages
    seen: list[tuple[int, Tensor, Tensor]] = []
    for i, block in enumerate(module.blocks):
        block.register_forward_hook(lambda _, args, output, i=i: seen.append((i, args[0], output)))
    stages.run(1, lambda: module(draw_tokens(2, 5)), [sent])
    assert [i for i, *_ in seen] == [2, 3] and seen[0][1] is sent
    assert all(output.isfinite().all() for *_, output in seen)


def test_a_module_without_stages_is_what_it_was(two_stages: tuple[nn.Module, PipelineStages, Tensor]) -> None:
    module, stages, sent = two_stages
    tokens = draw_tokens(2, 5)
    loss = module(tokens)  # The whole, between runs
    assert torch.equal(stages.run(1, lambda: module(tokens), [sent])[0], loss)
    stages.remove()
    assert torch.equal(module(tokens), loss) and not [part for part in module.modules() if part._compiled_call_impl]


def test_nothing_of_a_stage_lives_longer_than_its_output(two_stages: tuple[nn.Module, PipelineStages, Tensor]) -> None:
    module, stages, _ = two_stages
    (sent,) = stages.run(0, lambda: module(draw_tokens(2, 5)))
    sent.sum().backward()
    output = weakref.ref(sent)
    del sent
    assert output() is None


def test_a_forward_that_ends_too_early_is_refused(two_stages: tuple[nn.Module, PipelineStages, Tensor]) -> None:
    module, stages, _ = two_stages
    sentence = "the forward ended before block 2, the first after stage 0; let each forward call all blocks"
    refused(sentence, stages.run, 0, lambda: module.blocks[0](_))


def test_errors_of_the_module_end_the_run(two_stages: tuple[nn.Module, PipelineStages, Tensor]) -> None:
    module, stages, sent = two_stages
    with pytest.raises(IndexError):
        stages.run(0, lambda: module(draw_tokens(2, 5) + 1000))
    assert torch.equal(stages.run(0, lambda: module(draw_tokens(2, 5)))[0].detach(), sent)


def test_forgotten_parameters_have_no_memory_under_any_name() -> None:
    with torch.device("meta"):
        module = modules_to_cut.BlockModel()
    module.head.weight = module.table.weight
    forget_parameters(module, ["table.weight", "norm.weight"], device=torch.device("cpu"))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in ("table.weight", "head.weight", "norm.weight"):
            assert parameter.isnan().all() and parameter.untyped_storage().nbytes() == 4 and not parameter.requires_grad
        else:
            assert parameter.is_meta and parameter.requires_grad
    assert module.head.weight is module.table.weight
