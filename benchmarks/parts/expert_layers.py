"""Experts of a mixture in three ways, and a training step with each.

All ways have the router, the attention, the loss and the update of motet, and the weights of the same experts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from motet.models.arch.mixture.experts import Experts
from motet.models.arch.mixture.mixture_of_experts import MixtureOfExperts
from motet.models.settings import DecoderSettings
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_job_engine, build_model
from motet.train.job import Job
from motet.train.step import MicroBatchLoop, TrainStep


class LoopOverExperts(nn.Module):
    """Experts as a textbook has them: one after another, each on its tokens, added with `index_add_`."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(weight.detach().clone()) for weight in (experts.up, experts.down))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        tokens, chosen, weights = x.flatten(0, -2), chosen.flatten(0, -2), weights.flatten(0, -2)
        total = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            token, choice = torch.where(chosen == expert)
            gate, up = nn.functional.linear(tokens[token], self.up[expert]).chunk(2, dim=-1)
            output = nn.functional.linear(nn.functional.silu(gate) * up, self.down[expert])
            total.index_add_(0, token, output * weights[token, choice, None])
        return total.view_as(x)


class TransformersExperts(nn.Module):
    """Experts of transformers' Mixtral, whose code Qwen3-MoE has, too."""

    def __init__(self, experts: Experts, implementation: str) -> None:
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        super().__init__()
        count, width, inner = experts.down.shape
        config = _mixtral(hidden_size=width, intermediate_size=inner, num_local_experts=count)
        config._experts_implementation = implementation
        self.inner: Any = MixtralExperts(config)
        self.inner.gate_up_proj.data.copy_(experts.up.detach())
        self.inner.down_proj.data.copy_(experts.down.detach())

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return cast(Tensor, self.inner(x.flatten(0, -2), chosen.flatten(0, -2), weights.flatten(0, -2))).view_as(x)


def default_implementation() -> str:
    """The implementation of experts that a model of transformers has where its config names none."""
    from transformers import MixtralForCausalLM

    with torch.device("meta"):
        name: str = MixtralForCausalLM(_mixtral()).config._experts_implementation
    return name


def _mixtral(**sizes: int) -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, vocab_size=8, **sizes)


Replacement = Callable[[Experts], nn.Module]
"""The experts of a way, from those of motet."""


def settings_of(job: Job) -> DecoderSettings:
    settings = job.model
    assert isinstance(settings, DecoderSettings) and settings.experts is not None
    assert settings.gated and settings.activation == "silu" and settings.experts.capacity is None
    return settings


@dataclass
class ExpertsAlone:
    """Experts on random tokens, forward and backward. Calls of each way have the same tokens and choices."""

    experts: nn.Module
    inputs: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor

    @classmethod
    def build(cls, job: Job, replace_experts: Replacement) -> "ExpertsAlone":
        settings = settings_of(job)
        assert settings.experts is not None
        generator = torch.Generator().manual_seed(7)
        ours = Experts(settings, settings.experts)
        for parameter in (ours.up, ours.down):
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
        tokens = job.data.batch_sequences, job.data.sequence_length
        x = torch.randn(*tokens, settings.hidden, generator=generator)
        scores = torch.randn(*tokens, settings.experts.count, generator=generator).softmax(-1)
        weights, chosen = scores.topk(settings.experts.per_token)
        gradient = torch.randn(x.shape, generator=generator)
        return cls(replace_experts(ours), (x.requires_grad_(), chosen, weights.requires_grad_()), gradient)

    def results(self) -> list[Tensor]:
        """The output, and all gradients; of the inputs first."""
        x, chosen, weights = self.inputs
        output = self.experts(x, chosen, weights)
        return [output, *torch.autograd.grad(output, [x, weights, *self.experts.parameters()], self.gradient)]

    def seconds(self) -> float:
        """The seconds of a forward and a backward."""
        start = time.process_time()
        self.results()
        return time.process_time() - start

    def saved_bytes(self) -> int:
        """The bytes that autograd keeps for backward, without parameters and inputs."""
        sizes = dict[int, int]()

        def note(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = self.experts(*self.inputs)
        assert output.requires_grad
        for tensor in (*self.inputs, *self.experts.parameters()):
            sizes.pop(tensor.untyped_storage().data_ptr(), None)
        return sum(sizes.values())


@dataclass
class TrainedJob:
    """Training steps of a job on its data, on one rank."""

    job: Job
    train_step: TrainStep
    steps: int = 0
    loss: float = float("nan")
    grad_norm: float = float("nan")

    @classmethod
    def build(cls, job: Job, replace_experts: Replacement) -> "TrainedJob":
        group = RankGroup(0, 1, None, torch.device("cpu"))
        data, model = build_model(job, group.device)
        for module in [each for each in model.module.modules() if isinstance(each, MixtureOfExperts)]:
            module.experts = cast(Experts, replace_experts(module.experts))
        layout = job.layout_for(group.world)
        model, engine = build_job_engine(job, model, group, layout=layout, model_sharding=ModelSharding())
        return cls(job, TrainStep(engine, MicroBatchLoop(model, data, engine, layout, job.data.batch_sequences)))

    def seconds(self) -> float:
        """The seconds of the next step."""
        start = time.process_time()
        result = self.train_step.step(self.steps, self.job.optimizer.learning_rate)
        seconds = time.process_time() - start
        assert result.is_finite, f"step {self.steps}: {result}"
        self.steps, self.loss, self.grad_norm = self.steps + 1, result.loss, result.grad_norm
        return seconds
