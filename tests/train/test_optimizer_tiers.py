"""An optimizer whose states lie on the host trains to the bits of one whose states lie on the device."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.memory.tiers.optimizer_states import FileStates
from motet.parallel.data_parallel.fsdp import local_shard
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.traffic import HostLinkBytes, host_link_bytes, state_files
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from ranks import Ranks
from train.runs import small_job

STEPS = 6


Trained = tuple[list[tuple[float, float, bool]], dict[str, torch.Tensor], list[int], HostLinkBytes, list[int], int]


def trained(group: RankGroup, job: Job) -> Trained:
    """(Loss, norm, is finite) of each step; the parameters, masters and moments of a rank; the bytes that it sent to
    its host and to its device, and those of a step by the plan; the bytes that it read and wrote in files, and those of
    a step by the plan."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        optimizer, step, results = parts.engine.optimizer, parts.make_train_step(job), []
        for index in range(STEPS):
            result = step.step(index, job.optimizer.learning_rate)
            results.append((result.loss, result.grad_norm, result.is_finite))
        tensors = {
            f"{kind}/{name}": shard.values.clone()
            for kind, shards in optimizer.state_by_kind().items()
            for name, shard in shards.items()
        }
        optimizer.drop_copies()
        tensors |= {name: local_shard(p).values.clone() for name, p in parts.model.module.named_parameters()}
        states: Any = optimizer._states
        sent = [states.sent_to_host, states.sent_to_device] if states else []
        planned = host_link_bytes(parts.engine.plan, job.precision.resolved, rank=group.rank)
        moved, files = [0, 0], 0
        if isinstance(states, FileStates):
            moved = [*states.moved_bytes]
            layouts = state_files(
                parts.engine.plan,
                job.precision.resolved,
                moment_kinds=job.optimizer.moment_kinds,
                rank=group.rank,
            )
            files = sum(layout.update_bytes for layout in layouts)
            kinds = 1 + len(job.optimizer.moment_kinds)
            exact = kinds * sum(tensor.nbytes for tensor in states.masters)
            assert exact <= files < exact + kinds * 4096 * len(states.masters)
        return results, tensors, sent, planned, moved, files


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("zero=0", []),
        ("dp=2 zero=0", ["precision.recipe=bf16"]),
        ("dp=2 zero=1", []),
        ("dp=3 zero=2 microbatches=2", ["precision.recipe=bf16"]),
        ("dp=2 zero=3 microbatches=2", ["precision.recipe=fp32"]),
        ("dp=2 zero=3", ["precision.recipe=bf16"]),
        ("tp=2", ["precision.recipe=bf16"]),
        ("dp=1 pp=2 microbatches=2", ["precision.recipe=fp32"]),
        ("pp=2 chunks=2 schedule=zb-v microbatches=4", ["model.layers=4", "precision.recipe=bf16"]),
        ("dp=2 zero=1", ["precision.recipe=fp16", "precision.loss_scale_initial=4194304"]),
        ("dp=2 zero=2", ["run.reproducible=layout"]),
        ("dp=2 zero=1", ["precision.moment_dtype=bfloat16", "precision.recipe=bf16"]),
        ("dp=2 zero=1", ["optimizer.name=sgd", "optimizer.momentum=0.9"]),
        ("dp=2 zero=2", ["memory.recompute=full", "precision.recipe=bf16"]),
    ],
)
def test_states_elsewhere_have_the_bits_of_the_device(
    ranks: Ranks, tmp_path: Path, layout: str, settings: list[str], place: str
) -> None:
    if place == "disk" and any("moment_dtype" in each for each in settings):
        return
    words = [f"layout.{word}" for word in layout.split()]
    jobs = [
        small_job(tmp_path, "optimizer.clip_norm=0.05", *words, *settings, f"memory.optimizer={each}", *more)
        for each, more in (("device", []), (place, [f"memory.folder={tmp_path}"] * (place == "disk")))
    ]
    world = 1
    for word in layout.split():
        key, _, value = word.partition("=")
        world *= int(value) if key in ("dp", "tp", "pp") else 1
    first, second = (ranks.run(world, trained, job, timeout_s=120) for job in jobs)
    for (results, tensors, *_), (other_results, other_tensors, sent, planned, moved, files) in zip(
        first, second, strict=True
    ):
        assert repr(results) == repr(other_results)  # A norm may be NaN
        assert tensors.keys() == other_tensors.keys()
        assert [name for name in tensors if not same_bits(tensors[name], other_tensors[name])] == []
        updates = sum(is_finite for *_, is_finite in results)
        assert sent == [STEPS * planned.to_host, updates * planned.to_device]
        assert planned.to_host > 0 and updates
        assert moved == [updates * files, updates * files] and bool(files) == (place == "disk")
