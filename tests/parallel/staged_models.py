"""Modules to cut into stages, with forwards of two sizes, and training by stages that are copies of the module."""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from modules_to_split import VOCABULARY, huggingface_model, our_model
from torch import Tensor, nn

from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.parallel.model_sharding import ModelSharding, TensorInfo
from motet.parallel.pipeline.stages.stage_module import PipelineStages, forget_parameters
from motet.parallel.pipeline.stages.stage_proof import SizedForward, prove_stages
from motet.parallel.process.module_inventory import inventory_of_module
from motet.precision.float64_mode import use_float64

WIDTH = 8
SIZES = [{"rows": 2, "tokens": 6, "source tokens": 7}, {"rows": 3, "tokens": 9, "source tokens": 11}]
TRAINED = {"rows": 4, "tokens": 5, "source tokens": 8}  # Sizes that no proof has seen
Loss = Callable[[nn.Module, dict[str, int], int], Tensor]  # Of a module, for sizes and a seed


def draw_tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + length)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def loss_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _inputs(sizes: dict[str, int], seed: int, *, names: tuple[str, str] | None) -> tuple[dict[str, Tensor], Tensor]:
    """(Arguments besides the first, the targets); `names` are those of an encoder-decoder's source and tokens."""
    tokens = draw_tokens(sizes["rows"], sizes["tokens"], seed)
    source = draw_tokens(sizes["rows"], sizes["source tokens"], seed)
    return ({names[0]: source, names[1]: tokens} if names else {}), tokens


def our_staged(name: str, **changed: Any) -> tuple[nn.Module, Loss]:
    """One of motet's models."""
    module, _ = our_model(name, layers=4, **changed)

    def loss(module: nn.Module, sizes: dict[str, int], seed: int = 0) -> Tensor:
        inputs, tokens = _inputs(sizes, seed, names=("source", "tokens") if name == "t5-like" else None)
        return loss_of_logits(module(**inputs) if inputs else module(tokens), tokens)

    return module, loss


_LAYERS: dict[str, Any] = {"gpt2": {"n_layer": 4}, "bloom": {"n_layer": 4}, "t5": {"num_layers": 4}}


def huggingface_staged(family: str, **changed: Any) -> tuple[nn.Module, Loss]:
    """A model of transformers with four blocks, or four in each of its stacks."""
    module, _ = huggingface_model(family, **{"num_hidden_layers": 4, **_LAYERS.get(family, {}), **changed})

    def loss(module: nn.Module, sizes: dict[str, int], seed: int = 0) -> Tensor:
        inputs, tokens = _inputs(sizes, seed, names=("input_ids", "decoder_input_ids") if family == "t5" else None)
        more = {} if family in ("bert", "t5") else {"use_cache": False}
        return loss_of_logits(module(**(inputs or {"input_ids": tokens}), **more).logits, tokens)

    return module, loss


def evenly(count: int) -> Callable[[Sequence[str]], list[range]]:
    """Cut blocks into stages of about the same number."""

    def cut(names: Sequence[str]) -> list[range]:
        return [range(a, b) for a, b in pairwise(round(i * len(names) / count) for i in range(count + 1))]

    return cut


def prove(module: nn.Module, loss: Loss, stages: Any) -> ModelSharding:
    """The proven stages; a number of them, or ranges."""
    forwards = [SizedForward(lambda sizes=sizes: loss(module, sizes, 0), sizes) for sizes in SIZES]
    return prove_stages(module, forwards, evenly(stages) if isinstance(stages, int) else stages)


# --- training by stages ---------------------------------------------------------------------------


def holders(sharding: ModelSharding, module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The stages of each parameter, by all of its names."""
    tensors: list[TensorInfo] = list(inventory_of_module(module, {}).tensors)
    return {name: sharding.stages_of(t) for t in tensors for name in (t.name, *t.aliases)}


def with_random_values(module: nn.Module) -> nn.Module:
    """The module in float64, with values of its own for each parameter."""
    module.to_empty(device="cpu") if any(p.is_meta for p in module.parameters()) else module
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
    module.double().train()
    return module


class StagedTraining:
    """Stages on ranks, each a copy of the module without the parameters of others; `ranks` are those of the stages."""

    def __init__(self, module: nn.Module, loss: Loss, sharding: ModelSharding, ranks: Sequence[int]) -> None:
        self.module, self.loss, self.sharding, self.ranks = module, loss, sharding, ranks
        self.held = holders(sharding, module)
        self.modules = [copy.deepcopy(module) for _ in range(max(ranks) + 1)]
        self.stages = [PipelineStages(each, sharding) for each in self.modules]
        self.dropouts = [LayoutInvariantDropoutMode(3, each) for each in self.modules]
        for rank, each in enumerate(self.modules):
            local = {stage for stage, at in enumerate(ranks) if at == rank}
            forget_parameters(each, [n for n, _ in each.named_parameters() if local.isdisjoint(self.held[n])])
        self.running: dict[tuple[int, int], tuple[list[Tensor], Sequence[Tensor]]] = {}
        self.losses: list[float] = []

    def forward(self, stage: int, seed: int) -> None:
        """The forward of a micro-batch, from what the stage before sent."""
        rank, received = self.ranks[stage], list[Tensor]()
        if stage:
            sent, wires = self.running[stage - 1, seed][1], self.sharding.wires[stage - 1]
            for tensor, wire in zip(sent, wires, strict=True):
                assert tensor.shape == wire.shape(TRAINED) and tensor.isfinite().any() and not tensor.isnan().any()
                received.append(tensor.detach().clone().requires_grad_(wire.needs_gradient))
        with use_float64(), self.dropouts[rank].for_rows(seed, torch.arange(TRAINED["rows"])):
            compute = lambda: self.loss(self.modules[rank], TRAINED, seed)  # noqa: E731  # as the engine calls it
            sent = self.stages[rank].run(stage, compute, received)
        self.running[stage, seed] = received, sent
        if stage == len(self.ranks) - 1:
            self.losses.append(sent[0].item())

    def backward(self, stage: int, seed: int) -> None:
        """The backward of a micro-batch, from the gradients of what the next stage received."""
        _, sent = self.running[stage, seed]
        gradients: list[Any] = [None]
        if stage < len(self.ranks) - 1:
            gradients = [tensor.grad for tensor in self.running[stage + 1, seed][0]]
        last = stage == len(self.ranks) - 1
        pairs = [(t, g) for t, g in zip(sent, gradients, strict=True) if t.requires_grad and (last or g is not None)]
        with use_float64(), self.dropouts[self.ranks[stage]].for_rows(seed, torch.arange(TRAINED["rows"])):
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

    def train(self, seeds: Sequence[int]) -> None:
        """All forwards, then all backwards in another order, so that several micro-batches are in flight."""
        stages = range(len(self.ranks))
        for seed in seeds:
            for stage in stages:
                self.forward(stage, seed)
        for seed in seeds:
            for stage in reversed(stages):
                self.backward(stage, seed)

    def gradients(self) -> dict[str, Tensor]:
        """The sums of the gradients of all ranks, by name."""
        sums = dict[str, Tensor]()
        for module in self.modules:
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums.get(name, torch.zeros_like(parameter)) + parameter.grad
        return sums


def check_training(module: nn.Module, loss: Loss, sharding: ModelSharding, ranks: Sequence[int] = ()) -> StagedTraining:
    """Compare the training of two micro-batches by stages with that of the whole module."""
    with_random_values(module)
    staged = StagedTraining(module, loss, sharding, ranks or range(len(sharding.stages)))
    staged.train([0, 1])
    dropout, losses = LayoutInvariantDropoutMode(3, module), []
    for seed in (0, 1):
        with use_float64(), dropout.for_rows(seed, torch.arange(TRAINED["rows"])):
            result = loss(module, TRAINED, seed)
            torch.autograd.backward(result)
        losses.append(result.item())
    assert staged.losses == losses  # In bits
    gradients = staged.gradients()
    largest = max(float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None)
    for name, parameter in module.named_parameters():
        expected = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        difference = gradients.get(name, torch.zeros_like(parameter)) - expected
        assert float(difference.abs().max()) <= 1e-12 * max(float(expected.abs().max()), 1e-4 * largest), name
    return staged
