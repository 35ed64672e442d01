"""Trainable models from settings: names, errors, user factories."""

import threading
from pathlib import Path

import pytest
import torch
from small_models import SIZES, built
from torch import nn

from motet.core.batch import Batch
from motet.core.errors import InputError
from motet.models.build import build_module
from motet.models.parameter_values import no_initial_values
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings, UserModuleSettings
from refusals import refused


def batch(rows: int = 2, length: int = 5) -> Batch:
    tokens = torch.arange(rows * length).view(rows, length) % 30
    return Batch(tokens, tokens.roll(-1, 1), torch.ones(rows, length), rows=torch.arange(rows))


def test_names_and_shapes_of_a_decoder_on_the_meta_device() -> None:
    with torch.device("meta"):
        sizes = {**SIZES, "layers": 1, "kv_heads": 2}
        module = build_module(DecoderSettings(**sizes, positions="learned", norm="layer", bias=True, tied=False))
    linear = {"attention.qkv": (32, 16), "attention.output": (16, 16), "ffn.up": (48, 16), "ffn.down": (16, 24)}
    layers = {"norm": (16,)} | {f"blocks.0.{name}": (16,) for name in ("attention_norm", "ffn_norm")}
    layers |= {f"blocks.0.{name}": shape for name, shape in linear.items()}
    expected = {"embedding.weight": (30, 16), "positions.weight": (16, 16), "head.weight": (30, 16)}
    expected |= {f"{name}.weight": shape for name, shape in layers.items()}
    expected |= {f"{name}.bias": shape[:1] for name, shape in layers.items()}
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == expected
    assert all(p.is_meta for p in module.parameters())


def test_forward_on_the_meta_device() -> None:
    with torch.device("meta"):
        tokens = torch.zeros(2, 5, dtype=torch.int64)
        assert build_module(DecoderSettings(**SIZES))(tokens).shape == (2, 5, 30)
        assert build_module(EncoderSettings(**SIZES))(tokens).shape == (2, 5, 30)
        assert build_module(EncoderDecoderSettings(**SIZES))(tokens, tokens).shape == (2, 5, 30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainee_of_each_dtype(dtype: torch.dtype) -> None:
    model = built(DecoderSettings(**SIZES), 0, dtype)
    assert {p.dtype for p in model.module.parameters()} == {dtype}
    loss = model.loss_sum(batch())
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.module.parameters())
    assert (model.vocab_size, model.context, model.is_autoregressive) == (30, 16, True) and model.module.training


def test_bfloat16_is_near_float32() -> None:
    """The error is 8 bits, within the square root of the operations that a value goes through."""
    torch.manual_seed(0)
    losses, grads = [], []
    for dtype in (torch.float32, torch.bfloat16):
        model = built(DecoderSettings(**SIZES, kv_heads=2), 0, dtype)
        loss = model.loss_sum(batch(length=13))
        loss.backward()
        losses.append(loss.item())
        grads.append(torch.cat([p.grad.flatten().float() for p in model.module.parameters()]))
    assert losses[1] == pytest.approx(losses[0], rel=2**-8) and (grads[1] - grads[0]).norm() < 2**-5 * grads[0].norm()


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (DecoderSettings(**{**SIZES, "hidden": 12}), "model.head_dim = 3"),
        (DecoderSettings(**SIZES, rotary_fraction=0.3), "model.rotary_fraction = 0.3"),
        (DecoderSettings(**SIZES, rope_scaling={"low_frequency_factor": 4.0}), "scaling.high_frequency_factor = 4.0"),
        (EncoderDecoderSettings(**SIZES, relative_buckets=2), "model.relative_buckets = 2"),
        (EncoderDecoderSettings(**SIZES, relative_distance=16), "model.relative_distance = 16"),
    ],
)
def test_what_cannot_be_built(settings: DecoderSettings, names: str) -> None:
    refused(names, built, settings)


def test_what_cannot_be_read() -> None:
    refused(r"17 tokens does not fit model.context = 16", built(DecoderSettings(**SIZES)).loss_sum, batch(length=17))
    with pytest.raises(InputError, match=r"source"):
        built(EncoderDecoderSettings(**SIZES)).loss_sum(batch())
    refused(r"data.objective", built(EncoderSettings(**SIZES, head="classify")).loss_sum, batch())


# --- factories ---------------------------------------------------------------------------------------
USER = """
import torch
from torch import nn
from torch import nn

class Plain(nn.Module):
    def __init__(self, size, vocab):
        super().__init__()
        self.table = nn.Embedding(vocab, size)
        self.head = nn.Linear(size, vocab)
    def forward(self, tokens):
        return self.head(self.table(tokens))

class Asking(Plain):
    def forward(self, tokens, *, positions=None, documents=None, rows=None):
        self.asked = (positions, documents, rows)
        return type("Output", (), {"logits": super().forward(tokens)})()

class OwnLoss(Plain):
    def loss_sum(self, batch):
        return self(batch.tokens).square().sum()

class Wrong(Plain):
    def forward(self, tokens):
        return [super().forward(tokens)]

def plain(size=8, vocab=30): return Plain(size, vocab)
def asking(size=8, vocab=30): return Asking(size, vocab)
def turning():
    model = Plain(8, 30)
    model.register_buffer("turns", torch.polar(torch.ones(5), torch.arange(5.0)))
    return model

def own_loss(): return OwnLoss(8, 30)
def wrong(): return Wrong(8, 30)
def not_a_module(): return 3
def broken(): return {}["key of the user's"]
number = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_models.py").write_text(USER)
    (tmp_path / "importing_what_is_not_there.py").write_text("import surely_not_installed\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", __import__("sys").path.copy())
    monkeypatch.delitem(__import__("sys").modules, "user_models", raising=False)
    return "user_models"


def factory_settings(name: str, **arguments: object) -> UserModuleSettings:
    return UserModuleSettings(factory=name, arguments=arguments)


def test_a_factory_in_the_current_folder(user_module: str) -> None:
    first, second, third = (built(factory_settings(f"{user_module}:plain", size=4), seed) for seed in (1, 1, 2))
    table = [m.module.get_parameter("table.weight") for m in (first, second, third)]
    assert table[0].shape == (30, 4) and torch.equal(table[0], table[1]) and not torch.equal(table[0], table[2])
    logits = first.logits(batch())
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch().targets.flatten(), reduction="sum")
    assert first.loss_sum(batch()).item() == pytest.approx(losses.item(), rel=1e-6)


def test_building_leaves_the_random_state_alone(user_module: str) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    built(factory_settings(f"{user_module}:plain"), 1)
    assert torch.equal(torch.rand(1), expected)


def test_a_forward_is_given_what_it_asks_for(user_module: str) -> None:
    model = built(factory_settings(f"{user_module}:asking"), 1, torch.float64)
    assert model.logits(batch()).dtype == torch.float64
    positions, documents, rows = model.module.asked
    assert positions is None and documents is None and rows.tolist() == [0, 1]


def test_complex_buffers_stay_complex(user_module: str) -> None:
    turns = built(factory_settings(f"{user_module}:turning"), 1, torch.float64).module.get_buffer("turns")
    assert turns.is_complex() and torch.allclose(turns.angle()[1:4], torch.arange(1.0, 4.0).to(turns.real.dtype))


def test_a_module_with_its_own_loss(user_module: str) -> None:
    model = built(factory_settings(f"{user_module}:own_loss"), 1)
    assert torch.equal(model.loss_sum(batch()), model.logits(batch()).square().sum())


@pytest.mark.parametrize(
    ("factory", "arguments", "says"),
    [
        ("user_models", {}, "neither 'package.module:function' nor 'hf:'"),
        ("user_modles:plain", {}, "no module 'user_modles'"),
        ("user_models:plian", {}, "did you mean 'plain'"),
        ("user_models:number", {}, "this is 3, which cannot be called"),
        ("user_models:plain", {"sise": 3}, "unexpected keyword argument 'sise'"),
        ("user_models:not_a_module", {}, "returns int, not"),
    ],
)
def test_a_factory_that_is_none(user_module: str, factory: str, arguments: dict[str, int], says: str) -> None:
    refused(says, built, factory_settings(factory, **arguments))


def test_errors_of_the_user_stay_their_own(user_module: str) -> None:
    with pytest.raises(KeyError, match=r"key of the user's"):
        built(factory_settings("user_models:broken"))
    with pytest.raises(ModuleNotFoundError, match=r"surely_not_installed"):
        built(factory_settings("importing_what_is_not_there:f"))


def test_a_forward_that_gives_no_logits(user_module: str) -> None:
    refused(r"Wrong.forward gives \w+, not a tensor", built(factory_settings("user_models:wrong")).loss_sum, batch())


def test_threads_that_build_without_values_leave_the_draws_of_torch() -> None:
    """The first to begin ends first."""
    draw, may_end = nn.init.normal_, threading.Event()

    def build() -> None:
        with no_initial_values():
            may_end.wait(10)

    thread = threading.Thread(target=build)
    with no_initial_values():
        thread.start()
        assert nn.init.normal_ is not draw
    may_end.set()
    thread.join()
    assert nn.init.normal_ is draw
