"""Activations on the host change where saved tensors lie, and no number."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import motet
from motet.core.errors import InputError
from motet.memory.policy_choice import MIN_SENT_BYTES, MemorySettings
from motet.memory.recompute import recompute_blocks
from motet.memory.storage_tracker import StorageTracker
from motet.memory.tiers.offloaded_activations import OffloadedActivations
from motet.parallel.process.process_group import RankGroup
from ranks import Ranks
from train.runs import same_bits, small_job, train
from train.tensor_parallel_runs import train_and_reassemble

STEPS = 3
SIZES = "vocab_size=260, context=128, layers=4, hidden=64, heads=4"
MODELS = {
    "decoder": [f"model={{family='decoder', {SIZES}, kv_heads=2, ffn_hidden=128}}"],
    "t5": [
        f"model={{family='encoder-decoder', {SIZES.replace('260', '359')}, ffn_hidden=128}}",
        "data.objective=spans",
    ],
}
SHAPE = ["data.sequence_length=128", "data.batch_sequences=8"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "zero 0": (2, ["layout.microbatches=2"]),
    "zero 1, overlap": (2, ["layout.zero=1", "communication.overlap=forward"]),
    "zero 2": (2, ["layout.zero=2", "layout.microbatches=2", "precision.recipe=fp16"]),
    "zero 3": (2, ["layout.zero=3", "layout.microbatches=2", "precision.recipe=bf16"]),
    "zero 3, full": (2, ["layout.zero=3", "memory.recompute=full", "precision.recipe=bf16"]),
    "tp": (2, ["layout.tp=2", "memory.recompute=selective"]),
    "sp, pieces": (2, ["layout.tp=2", "layout.sp=true", "communication.tp_pieces=2"]),
    "gpipe": (2, ["layout.pp=2", "layout.schedule=gpipe", "layout.microbatches=4"]),
    "1f1b": (2, ["layout.pp=2", "layout.microbatches=4"]),
    "interleaved": (2, ["layout.pp=2", "layout.chunks=2", "layout.schedule=interleaved", "layout.microbatches=4"]),
    "zero bubble": (2, ["layout.pp=2", "layout.chunks=2", "layout.schedule=zb-v", "layout.microbatches=4"]),
    "reproducible": (2, ["run.reproducible=layout"]),
}
QUICK = ["zero 3, full"]


CPU = torch.device("cpu")
SINGLE = RankGroup(0, 1, None, CPU)
WIDTH, ROWS = 64, 256
STORAGE = WIDTH * ROWS * 4  # Bytes of one activation
assert STORAGE == MIN_SENT_BYTES


class Squares(nn.Module):
    """Saves its input, a product and its result, which is the input of the next block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y * y).tanh()


class Tower(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], count: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


@contextmanager
def offloading(module: nn.Module, **settings: str) -> Iterator[OffloadedActivations]:
    memory = MemorySettings.model_validate({"activations": "host", **settings})
    recomputation = recompute_blocks(module, memory, device=CPU)
    assert recomputation is not None and recomputation.offloaded is not None
    yield recomputation.offloaded
    recomputation.remove()


def gradients(module: nn.Module) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    return found


def input_rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "every-k"])
def test_the_gradients_of_any_module_have_the_same_bits(recompute: str) -> None:
    module, x = Tower(Squares), input_rows()
    module(x).sum().backward()
    expected = gradients(module)
    with offloading(module, recompute=recompute) as offloaded:
        first, second = module(x).sum(), module(x).sum()  # Two micro-batches in flight
        first.backward()
        assert all(map(torch.equal, gradients(module), expected))
        second.backward(retain_graph=True)
        assert all(map(torch.equal, gradients(module), expected))
        second.backward()
        assert all(map(torch.equal, gradients(module), expected))
        del first, second
        link = offloaded.link
        assert offloaded.host_bytes == 0 < link.sent_to_host <= link.sent_to_device
        before = link.sent_to_host
        with torch.no_grad():
            module(x)
        assert link.sent_to_host == before


def test_two_blocks_stay_on_the_device() -> None:
    """Each block saves three storages, of which the next one saves one, too; the host gets one copy of each."""
    blocks = 6
    module, x, live, before = Tower(Squares, blocks), input_rows(), list[int](), 0

    def note(*_: object) -> None:
        live.append(tracker.live() - before)

    def run() -> tuple[int, int]:
        """Bytes after the forward, and the most when a block ends or its backward does."""
        live.clear()
        loss = module(x).sum()
        after = tracker.live() - before
        loss.backward()
        return after, max(live)

    for layer in module.layers:
        layer.register_forward_hook(note)
        layer.register_full_backward_hook(note)
    tracker = StorageTracker([x, *module.parameters()])
    with tracker:
        run()
        before = tracker.live()
        kept, _ = run()
        with offloading(module) as offloaded:
            after, most = run()
            link = offloaded.link
            assert link.sent_to_host == offloaded.peak_host_bytes == (2 * (blocks - 1) + 1) * STORAGE
            assert link.sent_to_device == 2 * (blocks - 1) * STORAGE  # The last block keeps its input
    slack = STORAGE // 2  # The loss, and gradients of biases
    assert abs(kept - (2 * blocks + 1) * STORAGE) < slack
    assert abs(after - 3 * STORAGE) < slack  # The last block
    assert 5 * STORAGE <= most <= 7 * STORAGE + slack  # Two blocks, and gradients of an input and an output


class Views(nn.Module):
    """Three views of one product are saved, one of them by two functions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x).view(ROWS, WIDTH, 3).unbind(-1)
        return (q * k) * v + q.sin()


def test_a_storage_travels_once_for_all_of_its_views() -> None:
    module, x = Tower(Views, 3), input_rows()
    module(x).sum().backward()
    expected = gradients(module)
    with offloading(module) as offloaded:
        module(x).sum().backward()
        assert all(map(torch.equal, gradients(module), expected))
        # Of two blocks: the input, three views of a product, and the product of two
        assert offloaded.link.sent_to_host == offloaded.link.sent_to_device == 2 * 5 * STORAGE


def test_what_others_hold_is_not_sent() -> None:
    """Parameters, buffers, arguments without a gradient or of several blocks, and small tensors stay."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(ROWS, WIDTH))
            self.register_buffer("table", torch.ones(ROWS, WIDTH))

        def forward(self, x: Tensor, mask: Tensor, *, encoded: Tensor) -> Tensor:
            small = x.mean() * self.weight * self.table  # `x` is not saved
            return (small * mask + encoded * self.weight).sum(1, keepdim=True) * self.weight

    class Shared(Tower):
        def forward(self, x: Tensor) -> Tensor:
            encoded, mask = self.first(x), torch.ones(ROWS, WIDTH)
            for layer in self.layers:
                x = layer(x, mask, encoded=encoded)
            return x

    module, x = Shared(Masked, 3), input_rows()
    module(x).sum().backward()
    expected = gradients(module)
    with offloading(module) as offloaded:
        module(x).sum().backward()
        assert all(map(torch.equal, gradients(module), expected))
        assert offloaded.link.sent_to_host == 0


class Writes(nn.Module):
    """Changes a tensor in place that it has saved."""

    def __init__(self, *, before_its_end: bool) -> None:
        super().__init__()
        self.linear, self.before_its_end = nn.Linear(WIDTH, WIDTH), before_its_end

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = y.sin()
        if self.before_its_end:
            y.add_(1)
        return z.tanh()  # It saves its result


class WritingTower(Tower):
    """Changes what a block has saved between blocks, at one of them."""

    at = -1

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == self.at:
                x.data.mul_(1)  # Autograd does not notice it
                x.mul_(2)
        return x


@pytest.mark.parametrize(("at", "before_its_end"), [(0, False), (2, False), (-1, True)])
def test_a_change_in_place_is_noticed_as_by_autograd(at: int, before_its_end: bool) -> None:
    module = WritingTower(lambda: Writes(before_its_end=before_its_end), 3)
    module.at = at
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        module(input_rows()).sum().backward()
    named = at if at >= 0 else 2
    with (
        offloading(module),
        pytest.raises(InputError, match=rf"the block layers.{named} saves .* \[256, 64\] .* place"),
    ):
        module(input_rows()).sum().backward()
    module.at = 1
    for layer in module.layers:
        assert isinstance(layer, Writes)
        layer.before_its_end = False
    with offloading(module):
        module(input_rows()).sum()  # Without a backward nothing is wrong


def test_a_change_of_a_parameter_in_place_is_noticed() -> None:
    module = Tower(Squares, 3)
    with offloading(module), pytest.raises(InputError, match=r"the block layers.1 saves a tensor of shape"):
        loss = module(input_rows()).sum()
        with torch.no_grad():
            module.layers[1].linear.weight.mul_(2)
        loss.backward()


def test_refusals() -> None:
    with pytest.raises(
        InputError, match=r"memory.activations = 'host': Linear has no blocks .* to keep the activations"
    ):
        recompute_blocks(nn.Linear(2, 2), MemorySettings(activations="host"), device=CPU)
    with pytest.raises(ValueError, match=r"recompute = 'auto' chooses by the bytes that blocks keep on the device"):
        MemorySettings(activations="host", recompute="auto", budget=1 << 30)


def loss_of(module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return module(x).square().sum(), len(x)


def test_a_custom_loop_keeps_activations_on_the_host() -> None:
    losses = []
    for place in ("device", "host"):
        engine = motet.parallelize(Tower(Squares), loss=loss_of, memory={"activations": place})
        losses.append([engine.step(input_rows(), input_rows()).loss for _ in range(3)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("decoder", ["memory.recompute=selective", "layout.microbatches=2", "precision.recipe=bf16"]),
        pytest.param("decoder", ["memory.recompute=full", "precision.recipe=fp32"], marks=pytest.mark.proof),
        pytest.param("t5", ["model.dropout=0.1"], marks=pytest.mark.proof),
        pytest.param("t5", ["model.dropout=0.1", "memory.recompute=full"], marks=pytest.mark.proof),
        pytest.param("gpt2", ["memory.recompute=full"], marks=pytest.mark.proof),
        pytest.param("llama", ["memory.recompute=selective"], marks=pytest.mark.proof),
        pytest.param("decoder", ["outer.every=2"], marks=pytest.mark.proof),
    ],
)
def test_a_job_has_the_same_bits(tmp_path: Path, model: str, settings: list[str]) -> None:
    sizes = [*SHAPE, *MODELS[model]] if model in MODELS else ["data.batch_sequences=64"]
    device, host = (
        train(SINGLE, small_job(tmp_path, *sizes, *settings, f"memory.activations={place}", model=model), STEPS)
        for place in ("device", "host")
    )
    assert device.losses == host.losses
    assert same_bits(device.masters, host.masters)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.proof) for name in LAYOUTS]
)
def test_a_layout_has_the_same_bits(ranks: Ranks, tmp_path: Path, name: str) -> None:
    world, settings = LAYOUTS[name]
    places = [
        ranks.run(
            world,
            train_and_reassemble,
            small_job(tmp_path, *SHAPE, *MODELS["decoder"], *settings, f"memory.activations={place}"),
            STEPS,
            timeout_s=240,
        )[0]
        for place in ("device", "host")
    ]
    assert places[0].losses == places[1].losses
    assert same_bits(places[0].masters, places[1].masters)
