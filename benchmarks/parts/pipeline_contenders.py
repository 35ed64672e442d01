"""One decoder as the stages of a pipeline, by motet and by torch's `PipelineStage`: forwards and backwards of a step.

Both have the same blocks on each stage, the same micro-batches and the same loss function, in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from motet.core.batch import Batch
from motet.models.arch.attention_mask import causal_mask
from motet.models.arch.decoder import CausalDecoder
from motet.models.arch.loss import linear_cross_entropy
from motet.models.build import TrainableModel, build_trainable_model
from motet.parallel.layout import parse_stages
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.process_group import RankGroup, default_rank_group
from motet.train.engine import build_engine
from motet.train.job import Job, load_job
from motet.train.proof.proposed_sharding import RandomBatches, sharding_of_model, sharding_on_ranks
from motet.train.step import MicroBatchLoop

TORCH_SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb-interleaved": pipelining.ScheduleInterleavedZeroBubble,
    "zb-v": pipelining.ScheduleZBVZeroBubble,
}
CHUNKS = {"gpipe": 1, "1f1b": 1}
DEFAULT_CHUNKS = 2
CPU = torch.device("cpu")


@dataclass(frozen=True)
class PipelineSize:
    """The sizes of the decoder and of a step; a micro-batch is one row."""

    blocks: int
    hidden: int
    length: int
    microbatches: int
    vocab_size: int = 512

    def job(self, schedule: str, ranks: int) -> Job:
        """The job of motet, whose stages have equally many blocks."""
        chunks = CHUNKS.get(schedule, DEFAULT_CHUNKS)
        each = self.blocks // (ranks * chunks)
        stages = ",".join(f"{first}-{first + each - 1}" for first in range(0, self.blocks, each))
        return load_job(
            "tiny",
            [
                *(f"model.layers={self.blocks}", f"model.hidden={self.hidden}", f"model.ffn_hidden={4 * self.hidden}"),
                *(f"model.vocab_size={self.vocab_size}", "model.tied=false", f"model.context={self.length}"),
                *(f"data.sequence_length={self.length}", f"data.batch_sequences={self.microbatches}"),
                *(f"layout.pp={ranks}", f"layout.chunks={chunks}", f"layout.schedule={schedule}"),
                *(f"layout.microbatches={self.microbatches}", f"layout.stages='{stages}'", f"run.ranks={ranks}"),
                "data.tokenizer=bytes",
            ],
        )

    @property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step."""
        shape = 2, self.microbatches, self.length
        drawn = torch.randint(self.vocab_size, shape, generator=torch.Generator().manual_seed(7))
        return drawn[0], drawn[1]


class RowSource:
    """The same rows in every step, one at a time."""

    def __init__(self, tokens: Tensor, targets: Tensor) -> None:
        self._batches = [
            Batch(tokens[row : row + 1], targets[row : row + 1], torch.ones(1, tokens.shape[1]), torch.tensor([row]))
            for row in range(len(tokens))
        ]

    def batch(self, step: int, rows: range) -> Batch:
        return self._batches[rows.start]


@dataclass(frozen=True)
class PipelineContender:
    """One framework's pipeline on this rank."""

    step: Callable[[], float]  # Forwards and backwards; the sum of the losses, or 0 without the last stage
    gradients: Callable[[], dict[str, Tensor]]  # Gradients after a step, by the name of the parameter


def motet_pipeline(schedule: str, size: PipelineSize, group: RankGroup) -> PipelineContender:
    """The step of a job on the ranks of the group, without its update."""
    job, source = size.job(schedule, group.world), RowSource(*size.tokens)
    layout, model = job.layout_for(group.world), _model(job, on_meta=True)
    engine = build_engine(
        model.module,
        group,
        layout=layout,
        settings=job,
        batch_sequences=size.microbatches,
        model_sharding=_proven_stages(schedule, size),
        values=model.initial_values,
    )
    loop, parameters = (
        MicroBatchLoop(model, source, engine, layout, size.microbatches),
        engine.optimizer.sharded_parameters,
    )

    def step() -> float:
        engine.begin_step()
        return sum(loop.run(0, keep_batches=False).loss_sums)

    def gradients() -> dict[str, Tensor]:
        return {name: shard.values for name, shard in parameters.local_shards(parameters.local_gradients()).items()}

    return PipelineContender(step, gradients)


@cache
def _proven_stages(schedule: str, size: PipelineSize) -> ModelSharding:
    """The stages of a job, which do not depend on the backend."""
    job = size.job(schedule, (group := default_rank_group(CPU)).world)
    model = _model(job, on_meta=True)
    layout, source = job.layout_for(group.world), RandomBatches(job, model)
    propose = partial(sharding_of_model, job, model, source, layout=layout)
    return sharding_on_ranks(propose, group, layout.dims)


def _model(job: Job, *, on_meta: bool) -> TrainableModel:
    return build_trainable_model(job.model, job.run.seed, torch.float32, CPU, on_meta=on_meta)


class DecoderStage(nn.Module):
    """Neighbouring blocks of a decoder, with the embedding before the first one and the norm after the last."""

    def __init__(self, decoder: CausalDecoder, blocks: range) -> None:
        super().__init__()
        layers = decoder.blocks
        self.embedding = decoder.embedding if blocks.start == 0 else None
        self.blocks = nn.ModuleList(layers[index] for index in blocks)
        self.norm = decoder.norm if blocks.stop == len(layers) else None
        self.head = decoder.head if blocks.stop == len(layers) else None
        self.rotary = decoder.rotary

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        assert self.rotary is not None
        rotary, mask = self.rotary.rotations_at(torch.arange(x.shape[1]), x.dtype), causal_mask(None, None, None)
        for block in self.blocks:
            x = block(x, mask, rotary)
        return x if self.norm is None else self.norm(x)


def torch_pipeline(schedule: str, size: PipelineSize, group: RankGroup) -> PipelineContender:
    """The stages of this rank under torch's schedule."""
    job = size.job(schedule, group.world)
    module = _model(job, on_meta=False).module
    assert isinstance(module, CausalDecoder)
    ranges = parse_stages(job.layout.stages or "")
    ranks = job.layout_for(group.world).pipeline_schedule(size.microbatches).stage_ranks
    mine = [stage for stage, rank in enumerate(ranks) if rank == group.rank]
    stages = [
        pipelining.PipelineStage(DecoderStage(module, ranges[i]), i, len(ranges), CPU, group=group.process_group)
        for i in mine
    ]

    def loss(features: Tensor, targets: Tensor) -> Tensor:
        weights = torch.ones(targets.numel())
        weight = module.head_weight()
        return linear_cross_entropy(features.flatten(0, 1), weight, None, targets=targets.flatten(), weights=weights)

    kind, first = TORCH_SCHEDULES[schedule], stages[0] if CHUNKS.get(schedule) == 1 else stages
    played = kind(first, size.microbatches, loss_fn=loss, scale_grads=False)  # type: ignore[arg-type]  # by `schedule`
    tokens, targets = size.tokens
    named = [
        (name, p) for name, p in module.named_parameters() if any(p is q for s in stages for q in s.submod.parameters())
    ]
    inputs, is_last = [tokens] * (0 in mine), len(ranges) - 1 in mine

    def step() -> float:
        for _, parameter in named:
            parameter.grad = None
        losses: list[Tensor] = []
        played.step(
            *inputs, target=targets if is_last else None, losses=losses if is_last else None, return_outputs=False
        )
        return float(torch.stack(losses).detach().sum()) if losses else 0.0

    return PipelineContender(step, lambda: {name: p.grad for name, p in named if p.grad is not None})


PIPELINES = {"motet": motet_pipeline, "torch": torch_pipeline}
