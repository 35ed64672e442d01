"""Updates with the gradients of the step before, while a step computes: another training, with its bits defined by a
plain loop."""

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import motet
from motet.core.errors import InputError
from motet.memory.tiers import optimizer_states
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.traffic import host_link_bytes
from motet.train.build import build_components, precision_context
from motet.train.job import Job, load_job
from motet.train.memory_check.step_prediction import memory_need
from ranks import Ranks
from train.runs import run_job, same_bits, saved_tensors, small_job
from train.test_optimizer_tiers import SlowLink, has_same_bits

RATES, CLIP = (0.01, 0.02, 0.03, 0.02, 0.01, 0.04, 0.01), 0.5
STEPS = len(RATES)
OPTIMIZER = {"weight_decay": 0.0, "clip_norm": CLIP, "betas": (0.9, 0.95), "eps": 1e-6}


def make_module() -> nn.Module:
    """Blocks whose parameters have multiples of 64 elements, so that no vector instruction meets an end."""
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks)


BAD_STEP = 4


def batch(step: int, rank: int) -> Tensor:
    """Inputs, which in one step give a loss that is not finite."""
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + rank))
    return inputs * torch.inf if step == BAD_STEP else inputs


def loss_sum(module: nn.Module, inputs: Tensor) -> tuple[Tensor, int]:
    return (module(inputs) - inputs.flip(1)).square().sum(), len(inputs)


def delayed(
    group: RankGroup, layout: str, update: str, checkpoints: Path | None = None, *, overlap: str = "backward"
) -> tuple[dict[str, Tensor], list[float]]:
    """The parameters after some steps of a custom loop, and the norms of gradients. With a folder of checkpoints, a
    second engine continues from one in the middle."""
    memory, norms = {"optimizer": "host", "update": update}, list[float]()
    communication = {"overlap": overlap} if overlap == "forward" else {}
    start = partial(motet.parallelize, loss=loss_sum, optimizer=OPTIMIZER, memory=memory, communication=communication)
    engine = start(module := make_module(), layout)
    for step, rate in enumerate(RATES):
        if checkpoints and step == 3:
            engine.save(checkpoints, step)
            engine = start(module := make_module(), layout)
            assert engine.restore(checkpoints) == step
        norms.append(engine.step(batch(step, group.rank), learning_rate=rate).grad_norm)
    state = {name: _full(values) for name, values in module.state_dict().items()}  # Waits for values that still arrive
    engine.synchronize()
    with engine.consensus_parameters():
        parameters = {name: _full(p) for name, p in module.named_parameters()}
    assert all(torch.equal(state[name], values) for name, values in parameters.items())
    return parameters, norms


def over_a_slow_link(group: RankGroup, layout: str) -> tuple[dict[str, Tensor], list[float]]:
    """The same, with values that arrive while the next forward computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_states, "link_of", SlowLink)
        return delayed(group, layout, "delayed", overlap="forward")


def _full(parameter: Any) -> Tensor:
    values: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return values.detach().clone()


def plain_loop(norms: list[float], ranks: int) -> dict[str, Tensor]:
    """The definition: a step computes gradients while those of the step before are applied."""
    module, pending = make_module(), None
    parameters = [*module.parameters()]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0, fused=True)
    for step, rate in enumerate(RATES):
        gradients: Any = [
            torch.autograd.grad(loss_sum(module, batch(step, rank))[0], parameters) for rank in range(ranks)
        ]
        if pending is not None:
            for parameter, gradient in zip(parameters, pending[0], strict=True):
                parameter.grad = gradient
            optimizer.param_groups[0]["lr"] = pending[1]
            optimizer.step()
        scale = min(1.0, CLIP / norms[step]) / (4 * ranks)
        summed = [sum(each[1:], each[0]) * scale for each in zip(*gradients, strict=True)]
        pending = None if step == BAD_STEP else (summed, rate)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    ("world", "layout"), [(1, "zero=0"), (2, "zero=0"), (2, "zero=1"), (2, "zero=2"), (2, "zero=3")]
)
def test_a_delayed_update_is_that_of_a_plain_loop(ranks: Ranks, tmp_path: Path, world: int, layout: str) -> None:
    runs = [ranks.run(world, delayed, layout, "delayed", *more) for more in ((), (tmp_path,))]
    for parameters, norms in chain(*runs):
        assert sum(norm > CLIP for norm in norms) > STEPS // 2
        wanted = plain_loop(norms, world)
        assert [name for name in wanted if not has_same_bits(parameters[name], wanted[name])] == []
    if layout != "zero=0":
        (overlapped, norms), *_ = ranks.run(world, over_a_slow_link, layout)
        assert [name for name in wanted if not has_same_bits(overlapped[name], plain_loop(norms, world)[name])] == []
    exact, _ = ranks.run(world, delayed, layout, "exact")[0]
    assert not any(has_same_bits(exact[name], wanted[name]) for name in wanted if "weight" in name)


def trained(group: RankGroup, job: Job) -> tuple[list[tuple[float, bool]], dict[str, Tensor], list[int], list[int]]:
    """Losses, state, and the bytes between device and host, sent and planned, of a job."""
    with precision_context(job):
        parts = build_components(job, group, Path(job.data.cache or "."))
        step = parts.make_train_step(job)
        results = [step.step(index, job.optimizer.learning_rate) for index in range(STEPS)]
        optimizer, states = parts.engine.optimizer, parts.engine.optimizer.states
        kept = {
            f"{kind}/{name}": shard.values.clone()
            for kind, shards in optimizer.state_by_kind().items()
            for name, shard in shards.items()
        }
        need = memory_need(parts.engine.plan, job.precision.resolved, job.optimizer, rank=group.rank, place="host")
        assert optimizer._pending is not None and optimizer.states is not None
        assert need["pending gradients"] == sum(each.nbytes for each in optimizer._pending.gradients)
        assert need["new values"] == sum(each.nbytes for each in optimizer.states._staged.values())
        planned = host_link_bytes(parts.engine.plan, job.precision.resolved, rank=group.rank)
        assert states is not None
        sent = [states.sent_to_host, states.sent_to_device]
        optimizer.close()
        return [(each.loss, each.is_finite) for each in results], kept, sent, [planned.to_host, planned.to_device]


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("dp=2 zero=1", ["precision.recipe=fp16", "precision.loss_scale_initial=4194304"]),
        pytest.param("dp=2 zero=3 microbatches=2", ["precision.recipe=bf16"], marks=pytest.mark.proof),
        pytest.param("tp=2", ["precision.recipe=bf16"], marks=pytest.mark.proof),
        pytest.param("dp=1 pp=2 microbatches=2", ["precision.recipe=fp32"], marks=pytest.mark.proof),
        pytest.param("dp=2 zero=2", ["run.reproducible=layout"], marks=pytest.mark.proof),
        pytest.param("dp=2 zero=1", ["communication.overlap=forward"], marks=pytest.mark.proof),
    ],
)
def test_a_delayed_update_in_files_has_the_same_bits(
    ranks: Ranks, tmp_path: Path, layout: str, settings: list[str]
) -> None:
    """A step that overflows applies the gradients of the step before, and leaves none."""
    words = [f"layout.{word}" for word in layout.split()]
    made = [
        small_job(tmp_path, "memory.update=delayed", *words, *settings, f"memory.optimizer={place}", *more)
        for place, more in (("host", []), ("disk", [f"memory.folder={tmp_path}"]))
    ]
    on_host, on_disk = (ranks.run(2, trained, job, timeout_s=120) for job in made)
    for one, other in zip(on_host, on_disk, strict=True):
        (results, tensors, sent, planned), (other_results, other_tensors, other_sent, _) = one, other
        assert repr(results) == repr(other_results)
        assert [name for name in tensors if not has_same_bits(tensors[name], other_tensors[name])] == []
        updates = sum(is_finite for _, is_finite in results[:-1])
        assert (updates < STEPS - 1) == ("precision.recipe=fp16" in settings) and updates > 1
        assert sent == other_sent == [STEPS * planned[0], updates * planned[1]]


def test_a_run_goes_on_with_its_pending_gradient(ranks: Ranks, tmp_path: Path) -> None:
    def job_of(steps: int, stage: int, update: str = "delayed") -> Job:
        settings = ["optimizer.schedule.kind=constant", f"layout.zero={stage}", "memory.optimizer=host"]
        return small_job(tmp_path, *settings, f"memory.update={update}", f"run.steps={steps}")

    for folder, jobs in (
        ("whole", [job_of(6, 1)]),
        ("run", [job_of(3, 1), job_of(6, 2)]),
        ("other", [job_of(6, 1, "exact")]),
    ):
        (tmp_path / folder).mkdir()
        for job in jobs:
            ranks.run_places(2, run_job, job, tmp_path / folder, timeout_s=120)
    in_one, in_two, exact = (saved_tensors(tmp_path / folder) for folder in ("whole", "run", "other"))
    assert any(name.startswith("pending_gradient/") for name in in_one)
    assert same_bits(in_one, in_two)
    assert not same_bits({n: t for n, t in in_one.items() if n.startswith("master/")}, exact)


def test_delayed_updates_need_masters_on_the_host() -> None:
    with pytest.raises(InputError, match=r"memory.update = 'delayed' has no effect with memory.optimizer = 'device'"):
        load_job("tiny", ["memory.update=delayed"])
