"""Recomputation in backward is compared with the forward of its own micro-batch."""

import pytest
import torch
from torch import Tensor, nn

from motet.memory import recompute
from motet.memory.policy_choice import MemorySettings
from motet.memory.recompute import recompute_blocks
from motet.parity.record.recomputed_tensors import RecomputedBuffers
from train.trainable_user_models import AveragedBlocks, NormedBlocks

CPU = torch.device("cpu")


def reports(make: type[nn.Module] = AveragedBlocks) -> list[str]:
    """Both forwards come before both backwards, as in a pipeline."""
    torch.manual_seed(1)
    module, microbatch, words = make(), 0, list[str]()

    def report(text: str, buffer: Tensor) -> None:
        words.append(f"{text}: {microbatch}")

    recompute_blocks(module, MemorySettings(recompute="full"), device=CPU)
    buffers, losses = RecomputedBuffers(lambda: microbatch, report), list[Tensor]()
    with buffers.watching(module):
        for microbatch in range(2):
            losses.append(module(torch.arange(6).view(2, 3) + 50 * microbatch).square().sum())
        for microbatch in reversed(range(2)):
            losses[microbatch].backward()
    buffers.check_unchanged(module)
    return words


def test_buffers_of_their_forward_are_right() -> None:
    assert reports() == []


def test_buffers_of_a_later_micro_batch_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = recompute._RepeatableCall._as_before
    second_start: dict[nn.Module, Tensor] = {}

    def latest_buffers(call: object, buffers: list[recompute._Buffer]) -> object:
        changed = [b._replace(value=second_start.setdefault(b.owner, b.value)) for b in buffers]
        return original(call, changed)  # type: ignore[arg-type]

    monkeypatch.setattr(recompute._RepeatableCall, "_as_before", latest_buffers)
    assert reports() == [
        "buffer blocks.1.mean is that of micro-batch 1: 0",
        "buffer blocks.0.mean is that of micro-batch 1: 0",
    ]


def test_buffers_that_recomputation_changes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "_buffers_of", lambda block: [])
    kinds = {"running_mean", "running_var", "num_batches_tracked"}
    changed = {f"buffer blocks.{block}.norm.{kind} is changed by backward: 0" for block in range(2) for kind in kinds}
    assert changed < {*reports(NormedBlocks)}
