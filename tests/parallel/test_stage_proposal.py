"""Stages of equal time, and stages together with tensor and sequence parallelism and with a job."""

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import modules_to_cut
import pytest
import torch
from modules_to_cut import loss_of_module
from staged_models import SIZES, Loss, huggingface_staged, our_staged
from torch import Tensor, nn

from motet.models.build import build_trainable_model
from motet.models.settings import DecoderSettings, EncoderDecoderSettings
from motet.models.spec.layer_specs import MicroBatchShape
from motet.models.spec.model_spec import spec_from_settings
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.pipeline.stages.stage_balance import BlockCosts, balance_stages, costs_of_spec
from motet.parallel.pipeline.stages.stage_proof import SizedForward
from motet.parallel.pipeline.stages.stage_proposal import costs_of_parameters, propose_stages, with_wire_dtypes
from motet.parallel.tensor_parallel.sharding_proposal import ProofForwards, propose_sharding
from motet.train.job import load_job
from motet.train.proof.proposed_sharding import RandomBatches, sharding_of_model
from refusals import refused

SETTINGS = {"vocab_size": 1000, "context": 64, "layers": 6, "hidden": 64, "heads": 4, "ffn_hidden": 128}


def largest(costs: BlockCosts, cut: Sequence[range]) -> tuple[float, float, float]:
    """(The largest time, the largest memory, the sum of the squares of times) of stages."""
    times, memory = ([sum(each[i] for i in blocks) for blocks in cut] for each in costs)
    return max(times), max(memory), sum(time**2 for time in times)


@pytest.mark.parametrize("seed", range(60))
def test_stages_are_the_best_of_all_cuts(seed: int) -> None:
    generator = random.Random(seed)
    count = generator.randint(1, 9)
    stages = generator.randint(1, count)
    costs = BlockCosts(*(tuple(float(generator.randint(0, 5)) for _ in range(count)) for _ in range(2)))
    borders = ((0, *inner, count) for inner in combinations(range(1, count), stages - 1))
    cuts = [tuple(range(a, b) for a, b in pairwise(each)) for each in borders]
    cut = balance_stages(costs, stages)
    assert cut in cuts and largest(costs, cut) == min(largest(costs, each) for each in cuts)


def test_more_stages_than_blocks_leave_some_empty() -> None:
    assert balance_stages(BlockCosts((1.0, 2.0)), 4) == (range(1), range(1, 2), range(2, 2), range(2, 2))


def test_costs_of_a_spec_count_the_head() -> None:
    """A table of 1000 entries costs 128000 FLOPs for a token in forward and twice as many in backward."""
    shape = MicroBatchShape(2, 16, 16)
    costs = costs_of_spec(spec_from_settings(DecoderSettings(**SETTINGS, gated=False)), shape, "float32")
    assert len(costs.times) == len(costs.memory) == 6
    assert len({*costs.times[:5]}) == 1 and costs.times[5] - costs.times[0] == 3 * 2 * 64 * 1000 * 2 * 16
    assert costs.memory[0] > costs.memory[1] < costs.memory[5]
    encoder_decoder = costs_of_spec(spec_from_settings(EncoderDecoderSettings(**SETTINGS)), shape, "float32")
    assert len(encoder_decoder.times) == 12 and encoder_decoder.times[6] > encoder_decoder.times[0]


def test_costs_of_parameters_leave_out_tables_that_are_looked_up() -> None:
    module = modules_to_cut.LayersBetween()
    names = [f"blocks.{i}" for i in range(4)]
    matrices = 2 * 12 * 8
    assert costs_of_parameters(module, names).times == (matrices, matrices, matrices, matrices + 64 * 8 + 64)
    module.head.weight = module.table.weight
    assert costs_of_parameters(module, names).times[-1] == matrices + 64 * 8 + 64
    assert sum(costs_of_parameters(module, names).memory) == 16 * sum(p.numel() for p in module.parameters())


def proposed(module: nn.Module, loss: Loss, *, splits_sequence: bool) -> ModelSharding:
    """Four stages of a module that two tensor-parallel ranks split, on two pipeline ranks."""
    dims = ParallelDims((("pp", 2), ("dp", 1), ("cp", 1), ("tp", 2)))
    sizes = [{"rows": 2, "tokens": length, "source tokens": length + 2} for length in (6, 10)]
    examples = ProofForwards([lambda each=each: loss(module, each, 0) for each in sizes], 2, vocab_size=64)
    sharding = propose_sharding(module, examples, dims, splits_sequence=splits_sequence)
    forwards = [SizedForward(lambda each=each: loss(module, each, 0), each) for each in SIZES]
    staged = propose_stages(module, forwards, sharding, dims=dims, stage_ranks=(0, 1, 0, 1))
    assert staged.boundary_comms == sharding.boundary_comms and staged.stage_ranks == (0, 1, 0, 1)
    return staged


@pytest.mark.parametrize(("splits_sequence", "tokens"), [(False, "tokens"), (True, "tokens / 2")])
def test_wires_have_the_shapes_of_a_tensor_parallel_rank(splits_sequence: bool, tokens: str) -> None:
    module, loss = our_staged("tiny")
    wires = proposed(module, loss, splits_sequence=splits_sequence).wires
    assert [[wire.dims for wire in border] for border in wires] == [[("rows", tokens, 32)]] * 3
    sizes = {"rows": 3, "tokens": 10}
    assert wires[0][0].shape(sizes) == (3, 5 if splits_sequence else 10, 32)
    assert wires[0][0].shape({**sizes, "tokens": 9}) == (3, 9, 32)  # Ranks that cannot split it have all of it
    assert wires[0][0].split_lengths(sizes) == [10] * splits_sequence


@pytest.mark.proof
def test_wires_of_an_encoder_decoder_on_a_tensor_parallel_rank() -> None:
    """A bias of heads has those of the rank; the encoder's output is whole."""
    module, loss = huggingface_staged("t5")
    staged = proposed(module, loss, splits_sequence=True)
    assert [[wire.dims for wire in border] for border in staged.wires] == [
        [("rows", "source tokens / 2", 32), (1, 2, "source tokens", "source tokens")],
        *[
            [
                ("rows", "tokens / 2", 32),
                (1, 2, "tokens", "tokens"),
                ("rows", "source tokens", 32),
                (1, 2, "tokens", "source tokens"),
            ]
        ]
        * 2,
    ]


@pytest.mark.parametrize(
    ("source", "cuts", "blocks"),
    [("tiny", None, 3), ("bert-tiny", None, 2), ("tiny", "0,1-3", 1)],  # The head of `tiny` costs 1.4 blocks
)
def test_stages_of_a_job(source: str, cuts: str | None, blocks: int) -> None:
    """Cut where the times are even, or as the job says."""
    job = load_job(source, ["layout.pp=2", *([f"layout.stages='{cuts}'"] if cuts else [])])
    model = build_trainable_model(job.model, 0, torch.float32, torch.device("cpu"), on_meta=True)
    staged = sharding_of_model(job, model, RandomBatches(job, model), layout=job.layout_for(2))
    assert staged.stages == (range(blocks), range(blocks, 4))
    assert staged.wires[0][0].dims == ("rows", "tokens", job.model.hidden)


def test_stages_of_a_job_whose_output_head_is_split() -> None:
    """Targets are of the whole vocabulary, of which a rank's own head has half."""
    job = load_job("tiny", ["model.tied=false", "layout.pp=2", "layout.tp=2"])
    model = build_trainable_model(job.model, 0, torch.float32, torch.device("cpu"), on_meta=True)
    staged = sharding_of_model(job, model, RandomBatches(job, model), layout=job.layout_for(4))
    assert staged.rule("head.weight").splits
    assert staged.wires[0][0].dims == ("rows", "tokens", job.model.hidden)


class Float32Bias(modules_to_cut.PassesEmbedding):
    """Blocks also get the embedding in float32, and a mask."""

    def run_blocks(self, x: Tensor) -> Tensor:
        residual = x.float()
        for block in self.blocks:
            x = block(x, residual=residual).to(x.dtype)
        return x


@pytest.mark.parametrize(("compute", "dtypes"), [("bfloat16", ["compute", "float32"]), ("float32", ["compute"] * 2)])
def test_wires_say_where_activations_have_another_dtype(compute: str, dtypes: list[str]) -> None:
    module, dims = Float32Bias(), ParallelDims((("pp", 2),))
    forwards = [SizedForward(lambda each=each: loss_of_module(module, each), each) for each in SIZES]
    staged = propose_stages(module, forwards, ModelSharding(), dims=dims, stage_ranks=(0, 1))
    typed = with_wire_dtypes(module, forwards[0].forward, staged, compute=getattr(torch, compute))
    assert [wire.dtype for wire in typed.wires[0]] == dtypes
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())


def test_blocks_that_stages_do_not_cover_are_refused() -> None:
    module, dims = modules_to_cut.BlockModel(), ParallelDims((("pp", 2),))
    forwards = [SizedForward(lambda each=each: loss_of_module(module, each), each) for each in SIZES]
    sentence = "layout.stages ends with block 2, but BlockModel has 4 blocks; end it with block 3"
    refused(sentence, propose_stages, module, forwards, ModelSharding(), dims=dims, stage_ranks=(0, 1), cuts="0,1-2")
    sentence = "layout.pp x layout.chunks = 6 stages, but BlockModel has 4 blocks, and a stage needs one; use 4 stages"
    refused(sentence, propose_stages, module, forwards, ModelSharding(), dims=dims, stage_ranks=(0, 1) * 3)
