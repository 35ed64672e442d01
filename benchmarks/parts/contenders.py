"""One model, one loss, one optimizer, and the ways of data parallelism: motet's stages and their peers.

A `Trainer` does one step on this rank's tokens and returns their mean loss (motet: that of the complete batch).
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

LEARNING_RATE, CLIP_NORM, WEIGHT_DECAY, BETAS, EPS = 1e-3, 1.0, 0.1, (0.9, 0.95), 1e-8
Trainer = Callable[[Tensor], float]


@dataclass(frozen=True)
class Contender:
    """One framework's implementation of a stage."""

    stage: int
    who: str
    """A key of MAKERS; `peer` is torch's own way."""
    backend: str
    """`motet`, `gloo`, or `null`: without any communication."""
    overlap: str = "backward"
    """`communication.overlap`, for motet."""
    place: str = "device"
    """The place of masters and moments; the parameters of FSDP2 lie there, too."""

    @property
    def name(self) -> str:
        on_host = self.place == "host"
        if self.who == "peer":
            return PEER_NAMES[self.stage] + ", `CPUOffloadPolicy`" * on_host
        if self.who == "deepspeed":
            return f"DeepSpeed ZeRO-{'Offload, stage ' * on_host}{self.stage}"
        settings = [f'`overlap = "{self.overlap}"`'] * (self.overlap != "backward")
        return ", ".join(["motet", *["states on the host"] * on_host, *settings])


PEER_NAMES = {
    0: "DDP",
    1: "DDP + ZeroRedundancyOptimizer",
    2: "FSDP2, parameters kept",
    3: "FSDP2",
}


def make_module() -> nn.Module:
    """The decoder of the job `tiny`, with values from the seed."""
    from motet import load_job
    from motet.models.build import build_trainable_model

    return build_trainable_model(load_job("tiny").model, 0, torch.float32, torch.device("cpu")).module


def loss_sum(module: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    logits, targets = module(tokens[:, :-1]), tokens[:, 1:]
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def mean_loss(module: nn.Module, tokens: Tensor) -> Tensor:
    total, count = loss_sum(module, tokens)
    return total / count


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    wide = [p for p in module.parameters() if p.ndim > 1]
    narrow = [p for p in module.parameters() if p.ndim <= 1]
    return [{"params": wide, "weight_decay": WEIGHT_DECAY}, {"params": narrow, "weight_decay": 0.0}]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(module), lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)


def make_motet(contender: Contender, dtype: str, group: dist.ProcessGroup) -> Trainer:
    """Make a trainer with `motet.parallelize`, on a process group that need not be the default one."""
    from motet.memory.policy_choice import MemorySettings
    from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
    from motet.parallel.layout import LayoutSettings, resolve_layout
    from motet.parallel.process.process_group import RankGroup
    from motet.precision.recipe import PrecisionSettings
    from motet.train.engine import build_engine
    from motet.train.optimizer.module_plan import ParallelizeSettings
    from motet.train.optimizer.optimizer_settings import OptimizerSettings

    ranks = RankGroup(dist.get_rank(), dist.get_world_size(), group, torch.device("cpu"))
    settings = ParallelizeSettings(
        layout=LayoutSettings(zero=contender.stage),
        optimizer=OptimizerSettings(
            learning_rate=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, clip_norm=CLIP_NORM
        ),
        communication=CommunicationSettings(overlap=contender.overlap),  # type: ignore[arg-type]
        precision=PrecisionSettings(recipe=dtype),  # type: ignore[arg-type]
        memory=MemorySettings(optimizer=contender.place),  # type: ignore[arg-type]
    )
    layout = resolve_layout(settings.layout, ranks.world, ranks.world)
    engine = build_engine(
        make_module(), ranks, layout=layout, settings=settings, batch_sequences=ranks.world, loss=loss_sum
    )
    return lambda tokens: engine.step(tokens).loss


def make_peer(contender: Contender, dtype: str, group: dist.ProcessGroup) -> Trainer:
    """torch's own: DDP, with a sharded optimizer at stage 1, and FSDP2."""
    if contender.stage >= 2:
        made = _fsdp2(dtype, group, reshard_after_forward=contender.stage == 3, on_host=contender.place == "host")
        return _loop(*made, autocast=False)
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    module = DistributedDataParallel(make_module(), process_group=group, gradient_as_bucket_view=True)
    optimizer = adamw(module)
    if contender.stage == 1:
        optimizer = ZeroRedundancyOptimizer(
            parameter_groups(module), torch.optim.AdamW, process_group=group,
            lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True,
        )  # fmt: skip
    return _loop(module, optimizer, autocast=dtype == "bf16")


def _fsdp2(
    dtype: str, group: dist.ProcessGroup, *, reshard_after_forward: bool, on_host: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    module: Any = make_module()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if dtype == "bf16" else MixedPrecisionPolicy()
    ways: dict[str, Any] = {"mesh": DeviceMesh.from_group(group, "cpu"), "mp_policy": policy}
    if on_host:
        ways["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in module.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **ways)
    fully_shard(module, reshard_after_forward=reshard_after_forward, **ways)
    return module, adamw(module)


def _loop(module: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool) -> Trainer:
    def step(tokens: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = mean_loss(module, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def make_deepspeed(contender: Contender, dtype: str, group: dist.ProcessGroup) -> Trainer:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.logger.setLevel(logging.ERROR)
    groups._WORLD_GROUP = group  # instead of a copy of the default group, which it would make
    module = make_module()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # counted by us
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP_NORM,
        "zero_optimization": {"stage": contender.stage},
        "steps_per_print": 2**31,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    optimizer = adamw(module)
    if contender.place == "host":
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # Compiled when it is first made

        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        optimizer = DeepSpeedCPUAdam(parameter_groups(module), lr=LEARNING_RATE, betas=BETAS, eps=EPS)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)

    def step(tokens: Tensor) -> float:
        groups._WORLD_GROUP = group  # stage 0 looks for it in each step
        loss = mean_loss(engine, tokens)
        engine.backward(loss)
        engine.step()
        return float(loss)

    return step


MAKERS: dict[str, Callable[[Contender, str, dist.ProcessGroup], Trainer]] = {
    "motet": make_motet,
    "peer": make_peer,
    "deepspeed": make_deepspeed,
}
