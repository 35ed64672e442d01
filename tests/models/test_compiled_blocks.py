"""Blocks that torch.compile makes graphs of: what a graph has, what runs eagerly, and what is refused."""

from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from motet.models import torch_private
from motet.models.arch import attention_mask
from motet.models.arch.attention_core import ScoreOptions, attention_exchange, dot_product_attention
from motet.models.arch.attention_mask import AttentionMask, DocumentSequence
from motet.models.arch.decoder import CausalDecoder
from motet.models.compilation import compiled_blocks
from motet.models.compilation.compiled_blocks import MAX_GRAPHS_OF_AUTO, CompiledBlocks, compile_blocks
from motet.models.settings import DecoderSettings
from refusals import refused
from train.compiled_runs import as_traced

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own
SETTINGS = DecoderSettings(vocab_size=32, layers=3, hidden=16, ffn_hidden=24, heads=4, kv_heads=2, context=24)
TOKENS = torch.arange(48).view(2, 24) % 32


@pytest.fixture(autouse=True)
def kernels_of_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    with patch.object(torch_private, "generate_code", as_traced):
        yield


def decoder() -> CausalDecoder:
    torch.manual_seed(0)
    module = CausalDecoder(SETTINGS).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module


def gradients(module: nn.Module, loss: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(loss, [p for p in module.parameters() if p.requires_grad], allow_unused=True)]


class Blocks(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Dropping(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.layer, self.p = nn.Linear(4, 4), p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), self.p, self.training)


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if y.sum().item() > 1e9 else 2 * y


class Doubling(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.layer, self.breaks = nn.Linear(4, 4), breaks

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).tanh() * x.sigmoid()
        return y if self.breaks and y.sum().item() > 1e9 else 2 * y


class Documents(nn.Module):
    """A block that reads the starts of the documents of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: AttentionMask) -> Tensor:
        assert mask.sequence is not None
        y: Tensor = self.layer(x).tanh() * x.sigmoid() * mask.sequence.starts.sum()
        return y


class Calling(nn.Module):
    """A block with a function of its output."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


class MultiHead(nn.MultiheadAttention):
    def __init__(self, *, dropout: float) -> None:
        super().__init__(4, 2, dropout)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # of one tensor
        y: Tensor = super().forward(x[None], x[None], x[None], need_weights=False)[0][0]
        return y


def test_blocks_share_a_graph_whatever_the_documents_are() -> None:
    written, compiled = decoder(), decoder()
    blocks = compile_blocks(compiled, falls_back=False)
    for lengths in ([24], [5, 19], [1, 2, 21]):
        documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, -1)
        for a, b in zip(
            *(gradients(m, m.features(TOKENS, documents=documents).square().sum()) for m in (written, compiled)),
            strict=True,
        ):
            assert a is b is None or torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    assert blocks.graphs == 1 and blocks.reason is None


def test_another_shape_makes_another_graph() -> None:
    module = decoder()
    blocks = compile_blocks(module, falls_back=False)
    for length in (24, 16, 24):
        module.features(TOKENS[:, :length]).sum().backward()
    assert blocks.graphs == 2


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: object, types: object, args: tuple[()] = (), kwargs: object = None) -> object:
        return func(*args, **(kwargs or {}))  # type: ignore[operator]  # an operator


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: object, types: object, args: tuple[()] = (), kwargs: object = None) -> object:
        return func(*args, **(kwargs or {}))  # type: ignore[operator]  # a function of torch


def test_what_runs_as_written() -> None:
    module = decoder()
    blocks = compile_blocks(module, falls_back=False)
    with torch.no_grad():
        module.features(TOKENS)
    with Watching():
        module.features(TOKENS)
    assert blocks.graphs == 0
    with Passing():
        module.features(TOKENS)
    assert blocks.graphs == 1


def test_random_numbers_in_a_graph_are_refused() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    module = Blocks(Dropping(0.5))
    compile_blocks(module, falls_back=False)
    refused(
        r"^run.compile = 'blocks': torch.compile cannot make one graph of Dropping.forward: it calls dropout, whose "
        r"random numbers motet draws outside of compiled code; set run.compile=off$",
        module,
        x,
    )
    for harmless in (Dropping(0.0), Dropping(0.5).eval()):
        compile_blocks(module := Blocks(harmless), falls_back=False)
        module(x)


@pytest.mark.parametrize("block", [Breaking(), Dropping(0.5)])
def test_auto_runs_as_written_what_cannot_be_one_graph(block: nn.Module) -> None:
    x, module = torch.ones(3, 4, requires_grad=True), Blocks(block)
    torch.manual_seed(3)
    expected = module(x)
    blocks = compile_blocks(module, falls_back=True)
    torch.manual_seed(3)
    assert torch.equal(module(x), expected)
    assert blocks.reason is not None and type(block).__name__ in blocks.reason and "\n" not in blocks.reason


def test_ever_new_shapes_run_as_written() -> None:
    """Calls of earlier shapes stay compiled, so that a recomputation is what its forward was."""
    module = Blocks(nn.Linear(4, 4), nn.Linear(4, 4))
    blocks = compile_blocks(module, falls_back=True)
    for rows in (*range(1, MAX_GRAPHS_OF_AUTO + 3), 1):
        module(torch.ones(rows, 4, requires_grad=True))
    assert blocks.graphs == MAX_GRAPHS_OF_AUTO and blocks.reason is not None
    assert f"its inputs had {MAX_GRAPHS_OF_AUTO} kinds of shapes before" in blocks.reason


@pytest.mark.parametrize("second", [Breaking(), Doubling(breaks=True)])
def test_recomputation_of_compiled_and_written_blocks(second: nn.Module) -> None:
    """The first block is compiled in its forward, before the second one cannot be: so it is in its recomputation."""
    module, x = Blocks(Doubling(), second), torch.ones(3, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    blocks = compile_blocks(module, falls_back=True)
    y = x
    for block in module.blocks:
        y = checkpoint(block, y, use_reentrant=False)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, expected) and blocks.graphs == 1 and blocks.reason is not None


def test_a_refusal_names_the_line() -> None:
    compile_blocks(module := Blocks(Breaking()), falls_back=False)
    refused(
        r"of Breaking.forward: .*, file .*test_compiled_blocks.py\", line \d+, in forward; set",
        module,
        torch.ones(3, 4),
    )


def test_an_error_of_the_code_stays() -> None:
    compile_blocks(module := Blocks(Breaking()), falls_back=True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.ones(3, 5))


def test_a_module_without_blocks() -> None:
    refused(r"^run.compile = 'blocks': Linear has no blocks \(items", compile_blocks, nn.Linear(2, 2), falls_back=False)
    assert compile_blocks(nn.Linear(2, 2), falls_back=True).reason
    assert CompiledBlocks.none("a reason").reason == "a reason"


@pytest.mark.parametrize(("window", "lengths"), [(3, None), (None, [5, 19])])
def test_a_mask_is_made_once_for_all_blocks(window: int | None, lengths: list[int] | None) -> None:
    made, make = [], attention_mask._additive_mask
    documents = (
        None if lengths is None else torch.repeat_interleave(torch.arange(2), torch.tensor(lengths)).expand(2, -1)
    )

    def counted(is_visible: Tensor, dtype: torch.dtype) -> Tensor:
        made.append(dtype)
        return make(is_visible, dtype)

    module = CausalDecoder(SETTINGS.model_copy(update={"sliding_window": window})).double()
    blocks = compile_blocks(module, falls_back=False)
    with patch.object(attention_mask, "_additive_mask", counted):
        module.features(TOKENS, documents=documents).sum().backward()
    assert made == [torch.float64] and blocks.graphs == 1


def test_a_graph_for_other_documents_that_is_refused_leaves_earlier_ones() -> None:
    """A micro-batch whose documents have a graph is recomputed by it, after one without a graph ran eagerly."""
    module, x = Blocks(Documents()), torch.ones(3, 4, requires_grad=True)
    with patch.object(compiled_blocks, "MAX_GRAPHS_OF_AUTO", 1):
        blocks = compile_blocks(module, falls_back=True)
    outputs = []
    for count in (2, 3):
        mask = AttentionMask()
        mask.sequence = DocumentSequence(torch.ones(count), kernel=cast(Any, None))
        outputs.append(checkpoint(module.blocks[0], x, mask, use_reentrant=False).sum())
    assert blocks.graphs == 1 and blocks.reason is not None
    sum(outputs).backward()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: checkpoint(F.dropout, x, use_reentrant=False), "dropout"),
        (lambda x: torch.cond(x.sum() > 0, F.dropout, torch.tanh, (x,)), "dropout"),
        (lambda x: x * torch.empty_like(x).cauchy_(), "cauchy_"),
        (lambda x: x * torch.poisson(x.detach().abs()), "poisson"),
        (lambda x: F.rrelu(x, training=True), "rrelu"),
        (lambda x: F.gumbel_softmax(x), "gumbel_softmax"),
        (MultiHead(dropout=0.1), "multi_head_attention_forward"),
        (
            lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], None, 0.1),
            "scaled_dot_product_attention",
        ),
    ],
)
def test_random_numbers_anywhere_in_a_graph_are_refused(function: Callable[[Tensor], Tensor], name: str) -> None:
    compile_blocks(module := Blocks(Calling(function)), falls_back=False)
    refused(f"it calls {name}, whose random numbers", module, torch.ones(3, 4, requires_grad=True))


def test_attention_without_dropout_and_rrelu_of_an_evaluation_are_taken() -> None:
    def function(x: Tensor) -> Tensor:
        return F.rrelu(F.scaled_dot_product_attention(x[None], x[None], x[None], None, 0.0), training=False)

    blocks = compile_blocks(module := Blocks(MultiHead(dropout=0.0), Calling(function)), falls_back=False)
    module(torch.ones(3, 4, requires_grad=True))
    assert blocks.graphs == 2


class OtherAttention:
    """An exchange whose attention is the values."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, options: ScoreOptions) -> Tensor:
        return v


def test_attention_of_an_exchange_is_in_no_graph() -> None:
    def attend(x: Tensor) -> Tensor:
        return dot_product_attention(x, x, x, AttentionMask(), scale=1.0)

    x = torch.randn(2, 3, 1, 4)
    token = attention_exchange.set(OtherAttention())
    try:
        assert torch.equal(torch.compile(attend, backend="eager")(x), x.flatten(2))
    finally:
        attention_exchange.reset(token)


def test_limits_and_threads_that_a_user_has_chosen_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.config as limits
    import torch._inductor.config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")
    with limits.patch(recompile_limit=5), inductor.patch(compile_threads=7):
        compile_blocks(module := Blocks(nn.Linear(4, 4)), falls_back=False)
        module(torch.ones(2, 4, requires_grad=True))
        assert (limits.recompile_limit, inductor.compile_threads) == (5, 7)


def test_a_problem_without_words_is_named_by_its_class() -> None:
    assert torch_private.compile_problem(TorchDynamoException(), max_graphs=1) == "TorchDynamoException"
