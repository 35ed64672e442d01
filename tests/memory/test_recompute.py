"""Recomputation changes what is kept, and no number."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from motet.core.errors import InputError
from motet.memory import kept_products, recompute
from motet.memory.policy_choice import MemorySettings
from motet.memory.recompute import recompute_blocks
from motet.parallel.process.process_group import RankGroup
from motet.train.custom_loop import parallelize
from motet.train.engine import TrainingEngine
from motet.train.job import Job, load_job
from ranks import Ranks
from train import pipeline_runs
from train.runs import Trained, same_bits, small_job, train, worst_difference
from train.tensor_parallel_runs import train_and_reassemble

CPU = torch.device("cpu")
SINGLE = RankGroup(0, 1, None, torch.device("cpu"))
POLICIES = ["full", "selective", "every-k"]
STEPS = 3


@pytest.mark.parametrize(
    ("model", "dropout"),
    [
        *(("decoder", 0.0), ("t5", 0.1), ("gpt2", 0.1)),
        *(pytest.param(*case, marks=pytest.mark.proof) for case in (("decoder", 0.1), ("bert", 0.0), ("bert", 0.1))),
        *(pytest.param(*case, marks=pytest.mark.proof) for case in (("t5", 0.0), ("gpt2", 0.0))),
    ],
)
def test_one_rank_has_the_same_bits(tmp_path: Path, model: str, dropout: float) -> None:
    settings = ["layout.microbatches=2", "precision.recipe=bf16", "precision.emulate=true"]
    settings = settings if model == "gpt2" and dropout else settings[:2]
    settings += [f"model.dropout={dropout}"] * (model != "gpt2")
    expected = train(SINGLE, small_job(tmp_path, *settings, model=model), STEPS)
    for policy in POLICIES:
        recomputed = train(SINGLE, small_job(tmp_path, *settings, f"memory.recompute={policy}", model=model), STEPS)
        assert recomputed.losses == expected.losses, policy
        assert same_bits(recomputed.masters, expected.masters), policy


LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "zero 0": (2, ["layout.microbatches=2"]),
    "zero 1, overlap": (2, ["layout.zero=1", "communication.overlap=forward"]),
    "zero 2": (4, ["layout.zero=2"]),
    "zero 3": (2, ["layout.zero=3", "layout.microbatches=2"]),
    "zero 3, secondary groups": (4, ["layout.zero=3", "layout.secondary_group=2"]),
    "tp": (2, ["layout.tp=2"]),
    "sp": (2, ["layout.tp=2", "layout.sp=true"]),
    "sp, pieces": (2, ["layout.tp=2", "layout.sp=true", "communication.tp_pieces=2"]),
    "sp, pieces, zero 3": (4, ["layout.tp=2", "layout.sp=true", "communication.tp_pieces=2", "layout.zero=3"]),
    "tp x pp": (4, ["layout.tp=2", "layout.pp=2", "layout.microbatches=2"]),
    "gpipe": (2, ["layout.pp=2", "layout.schedule=gpipe", "layout.microbatches=3"]),
    "1f1b": (2, ["layout.pp=2", "layout.microbatches=3", "layout.zero=2"]),
    "interleaved": (2, ["layout.pp=2", "layout.chunks=2", "layout.schedule=interleaved", "layout.microbatches=4"]),
    "zero bubble": (2, ["layout.pp=2", "layout.chunks=2", "layout.schedule=zb-v", "layout.microbatches=4"]),
}
QUICK = ["zero 3", "zero bubble"]


def _check_layout(ranks: Ranks, folder: Path, name: str, policies: list[str], *, model: str, dropout: float) -> None:
    """The bits of a layout are those without recomputation, and its numbers those of one device."""
    world, settings = LAYOUTS[name]

    def trained(*more: str) -> Trained:
        job = pipeline_runs.job_of_model(folder, model, *settings, *more, dropout=dropout)
        result: Trained = ranks.run(world, train_and_reassemble, job, STEPS, timeout_s=240)[0]
        return result

    expected = trained()
    alone = train_and_reassemble(SINGLE, pipeline_runs.job_of_model(folder, model, dropout=dropout), STEPS)
    assert alone is not None
    for policy in policies:
        recomputed = trained(f"memory.recompute={policy}")
        assert recomputed.losses == expected.losses, policy
        assert same_bits(recomputed.masters, expected.masters), policy
        assert worst_difference(recomputed, alone) < 1e-11, policy


@pytest.mark.parametrize(
    ("name", "policy"),
    [(QUICK[0], "full"), *(pytest.param(name, "selective", marks=pytest.mark.proof) for name in QUICK[1:])],
)
def test_layouts_have_the_same_bits(ranks: Ranks, tmp_path: Path, name: str, policy: str) -> None:
    _check_layout(ranks, tmp_path, name, [policy], model="decoder", dropout=0.1)


@pytest.mark.proof
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("model", pipeline_runs.MODELS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_same_bits(ranks: Ranks, tmp_path: Path, name: str, model: str, dropout: float) -> None:
    _check_layout(ranks, tmp_path, name, POLICIES, model=model, dropout=dropout)


def test_recomputation_in_float64_is_in_float64(tmp_path: Path) -> None:
    """PyTorch suspends the mode of the recipe in backward, and the norms of this model ask for float32."""
    expected = train(SINGLE, small_job(tmp_path, model="llama"), STEPS)
    recomputed = train(SINGLE, small_job(tmp_path, "memory.recompute=full", model="llama"), STEPS)
    assert recomputed.losses == expected.losses and same_bits(recomputed.masters, expected.masters)


def train_with_backward_in_a_thread(group: RankGroup, job: Job) -> Trained | None:
    """Each backward runs in a fresh thread, as autograd runs those of a CUDA device, where no mode is active."""
    backward = TrainingEngine.backward

    def in_thread(*args: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(backward, *args).result()

    with mock.patch.object(TrainingEngine, "backward", in_thread):
        return train_and_reassemble(group, job, 2)


@pytest.mark.parametrize(
    ("model", "zero"),
    [("gpt2", 0), ("t5", 2), *(pytest.param(*case, marks=pytest.mark.proof) for case in (("bert", 1), ("gpt2", 3)))],
)
def test_recomputation_in_a_thread_of_a_device_draws_the_same_masks(
    ranks: Ranks, tmp_path: Path, model: str, zero: int
) -> None:
    recipe = "fp64" if model == "gpt2" else "fp32"
    settings = [f"precision.recipe={recipe}", "layout.microbatches=2", f"layout.zero={zero}", "data.batch_sequences=8"]
    expected = ranks.run(2, train_and_reassemble, small_job(tmp_path, *settings, model=model), 2)[0]
    for policy in ("full", "selective"):
        job = small_job(tmp_path, *settings, f"memory.recompute={policy}", model=model)
        recomputed = ranks.run(2, train_with_backward_in_a_thread, job)[0]
        assert recomputed.losses == expected.losses, policy
        assert same_bits(recomputed.masters, expected.masters), policy


class Plain(nn.Module):
    """A linear layer whose output is changed in place, random numbers, and a norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("offset", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.offset = self.offset + 1.0  # Another tensor
        inner = F.relu(self.first(x), inplace=True) + self.offset * 0.1
        return self.norm(self.second(inner * (torch.rand(8) > 0.3)).add_(x))


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module] = Plain, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _run(policy: Any, *, calls: int = 2, retain: bool = False) -> tuple[list[Tensor], Stack]:
    """Outputs, gradients and buffers after forwards of which all come before the backwards, as in a pipeline."""
    module = Stack()
    recompute_blocks(module, MemorySettings(recompute=policy), device=CPU)
    torch.manual_seed(2)
    outputs = [module(torch.linspace(-1, 1, 48).view(6, 8).double() * (1 + i)) for i in range(calls)]
    for output in outputs:
        output.square().sum().backward(retain_graph=retain)
        if retain:
            output.square().sum().backward()
    values = [*outputs, *(p.grad for p in module.parameters() if p.grad is not None), *module.buffers()]
    return [value.detach().clone() for value in values] + [torch.rand(3)], module


@pytest.mark.parametrize("policy", ["full", "selective", "every-k"])
@pytest.mark.parametrize("retain", [False, True])
def test_blocks_see_buffers_and_random_numbers_of_their_forward(policy: str, retain: bool) -> None:
    expected, plain = _run("none", retain=retain)
    values, module = _run(policy, retain=retain)
    assert len(values) == len(expected) and all(map(torch.equal, values, expected))
    recomputed = [1, 0, 1] if policy == "every-k" else [1, 1, 1]
    assert [block.calls for block in plain.blocks] == [2, 2, 2]
    assert [block.calls for block in module.blocks] == [2 + 2 * (1 + retain) * each for each in recomputed]


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (recompute, "_buffers_of", lambda block: []),
        (recompute._RandomStates, "block_states", lambda self, block: []),
        (kept_products.KeptProducts, "copy_before_writing", lambda self, tensors: None),
    ],
)
def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any) -> None:
    expected, _ = _run("none")
    monkeypatch.setattr(owner, name, fault)
    try:
        values, _ = _run("selective")
    except InputError as problem:
        assert "changed in place" in str(problem)
    else:
        assert not all(map(torch.equal, values, expected))


def test_selective_recomputation_multiplies_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    products = list[str]()
    compute = F.linear

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        products.append("linear")
        return compute(*args, **kwargs)

    monkeypatch.setattr(F, "linear", counted)
    with FlopCounterMode(display=False) as plain:
        _run("none")
    with FlopCounterMode(display=False) as selective:
        _run("selective")
    with FlopCounterMode(display=False) as full:
        _run("full")
    assert products and selective.get_total_flops() == plain.get_total_flops()
    assert full.get_total_flops() > plain.get_total_flops()


def test_without_gradients_nothing_is_kept_or_repeated() -> None:
    module = Stack()
    recompute_blocks(module, MemorySettings(recompute="full"), device=CPU)
    with torch.no_grad():
        module(torch.ones(6, 8).double())
    assert [block.calls for block in module.blocks] == [1, 1, 1]


def test_a_custom_loop(tmp_path: Path) -> None:
    def trained(**memory: Any) -> list[Tensor]:
        module = Stack()
        engine = parallelize(module, loss=lambda m, x: m(x).square().mean(), precision="fp64", memory=memory)
        torch.manual_seed(3)
        for _ in range(2):
            engine.step(torch.linspace(-1, 1, 48).view(6, 8).double())
        return [p.detach().clone() for p in module.state_dict().values()]

    expected = trained()
    for policy in POLICIES:
        assert all(map(torch.equal, trained(recompute=policy), expected)), policy


def test_bad_settings(tmp_path: Path) -> None:
    for settings, text in {
        ("memory.recompute=some",): "memory.recompute",
        ("memory.every=2",): "memory.every = 2 has no effect",
        ("memory.recompute=every-k", "memory.every=0"): "memory.every",
        ("memory.recompute=auto", "memory.budget=eight"): "'eight' is not a number of bytes; write for instance 512MiB",
        ("memory.recompute=full", "memory.budget=8GiB"): "memory.budget = 8589934592 has no effect",
    }.items():
        with pytest.raises(InputError, match=re.escape(text)):
            load_job("tiny", [*settings])
    with pytest.raises(InputError, match="Linear has no blocks"):
        recompute_blocks(nn.Linear(2, 2), MemorySettings(recompute="full"), device=CPU)
