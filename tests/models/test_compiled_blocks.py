"""Blocks that torch.compile makes graphs of: what a graph has, what runs eagerly, and what is refused."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import nop
from spec_cases import CASES, SMALL, kept_bytes
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from environment import torch_is_older_than, uncounted
from motet.core.batch import Batch
from motet.models import torch_private
from motet.models.arch import attention_mask
from motet.models.arch.attention_core import ScoreOptions, attention_exchange, dot_product_attention
from motet.models.arch.attention_mask import AttentionMask, DocumentSequence
from motet.models.arch.decoder import CausalDecoder
from motet.models.build import build_trainable_model
from motet.models.compilation import compiled_blocks
from motet.models.compilation.compiled_blocks import MAX_GRAPHS_OF_AUTO, CompiledBlocks, compile_blocks
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, TransformerSettings
from motet.models.spec.layer_specs import MicroBatchShape
from motet.models.spec.model_spec import spec_from_settings
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

    def forward(self, x: Tensor) -> Tensor:
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


def test_what_runs_eagerly() -> None:
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
def test_auto_runs_eagerly_what_cannot_be_one_graph(block: nn.Module) -> None:
    x, module = torch.ones(3, 4, requires_grad=True), Blocks(block)
    torch.manual_seed(3)
    expected = module(x)
    blocks = compile_blocks(module, falls_back=True)
    torch.manual_seed(3)
    assert torch.equal(module(x), expected)
    assert blocks.reason is not None and type(block).__name__ in blocks.reason and "\n" not in blocks.reason


def test_a_backward_that_does_not_compile_is_found_in_the_forward() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no code for it")

    def half_compiled(graph: torch.fx.GraphModule, inputs: list[Tensor], **_: object) -> object:
        return aot_autograd(fw_compiler=nop, bw_compiler=fail)(graph, inputs)

    module, x = Blocks(Doubling(), Doubling()), torch.ones(3, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    with patch.object(torch_private, "generate_code", half_compiled):
        blocks = compile_blocks(module, falls_back=True)
        (gradient,) = torch.autograd.grad(module(x).sum(), x)
        assert torch.equal(gradient, expected) and blocks.reason is not None
        assert blocks.reason.endswith("graph of Doubling.forward: RuntimeError: no code for it")
        compile_blocks(module := Blocks(Doubling()), falls_back=False)
        refused("^run.compile = 'blocks': .*: RuntimeError: no code for it; set run.compile=off$", module, x)


def test_the_key_of_compiled_code_has_the_kernels_of_attention() -> None:
    tags = list[str]()

    def noted(graph: torch.fx.GraphModule, inputs: list[Tensor], **_: object) -> object:
        tags.append(torch.compiler.config.cache_key_tag)
        return as_traced(graph, inputs)

    for kernel in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        torch._dynamo.reset()
        compile_blocks(module := Blocks(Doubling()), falls_back=False)
        with patch.object(torch_private, "generate_code", noted), sdpa_kernel(kernel):
            module(torch.ones(3, 4))
    assert tags[0] == tags[2] != tags[1] and torch.compiler.config.cache_key_tag not in tags


TWO_RUNS = """
import sys, torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from motet.models.compilation.compiled_blocks import compile_blocks

class Attending(torch.nn.Linear):
    def forward(self, x):
        heads = super().forward(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

module = torch.nn.ModuleList([Attending(16, 16)])
blocks, x = compile_blocks(module, falls_back=False), torch.ones(2, 6, 16)
with sdpa_kernel(getattr(SDPBackend, sys.argv[1])):
    module[0](x).sum().backward()
with torch.autograd.profiler.profile() as profile:
    module[0](x).sum().backward()
hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
print(blocks.graphs, hits, any("flash_attention" in event.name for event in profile.function_events))
"""


@pytest.mark.proof
def test_a_run_with_another_kernel_of_attention_does_not_read_the_code_of_the_first(tmp_path: Path) -> None:
    printed, environment = [], uncounted() | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for kernel in ("MATH", "FLASH_ATTENTION", "FLASH_ATTENTION", "MATH"):
        command = [sys.executable, "-c", TWO_RUNS, kernel]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        printed.append(done.stdout.split())
    assert printed == [
        ["1", hits, flash] for hits, flash in (("0", "False"), ("0", "True"), ("1", "True"), ("1", "False"))
    ]


def test_ever_new_shapes_run_eagerly() -> None:
    """Calls of earlier shapes stay compiled, so that a recomputation is what its forward was."""
    module = Blocks(nn.Linear(4, 4), nn.Linear(4, 4))
    blocks = compile_blocks(module, falls_back=True)
    for rows in (*range(1, MAX_GRAPHS_OF_AUTO + 3), 1):
        module(torch.ones(rows, 4, requires_grad=True))
    assert blocks.graphs == MAX_GRAPHS_OF_AUTO and blocks.reason is not None
    assert f"{MAX_GRAPHS_OF_AUTO} graphs were made before, for other shapes of its inputs" in blocks.reason


@pytest.mark.parametrize("make", [Breaking, lambda: Doubling(breaks=True)])
def test_recomputation_of_compiled_and_eager_blocks(make: Callable[[], nn.Module]) -> None:
    """The first block is compiled in its forward, before the second one cannot be: so it is in its recomputation."""
    module, x = Blocks(Doubling(), make()).double(), torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    blocks = compile_blocks(module, falls_back=True)
    y = x
    for block in module.blocks:
        y = checkpoint(block, y, use_reentrant=False)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    # Decompositions of a graph round in another order.
    assert (gradient - expected).abs().max() < 1e-12 and blocks.graphs == 1 and blocks.reason is not None


class CompiledByItself(nn.Linear):
    @torch.compile(backend="eager")
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class KeptAway(nn.Linear):
    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def compiled_instance() -> nn.Module:
    (block := nn.Linear(4, 4)).compile(backend="eager")
    return block


@pytest.mark.parametrize("make", [lambda: CompiledByItself(4, 4), lambda: KeptAway(4, 4), compiled_instance])
def test_a_block_that_compiles_itself_is_left_to_itself(make: Callable[[], nn.Module]) -> None:
    module, x = Blocks(make(), Doubling()), torch.ones(3, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    blocks = compile_blocks(module, falls_back=True)
    (gradient,) = torch.autograd.grad(module(x).sum(), x)
    name = type(module.blocks[0]).__name__
    assert torch.allclose(gradient, expected, rtol=1e-5) and blocks.graphs == 1  # Of the other block
    assert blocks.reason == f"the code of {name} compiles its forward, or keeps torch.compile away from it"
    refused(
        f"^run.compile = 'blocks': the code of {name} .*; set run.compile=off$",
        compile_blocks,
        module,
        falls_back=False,
    )


@pytest.mark.parametrize("compiles_itself", [False, True])
def test_recomputation_around_a_block_is_no_compilation_of_its_own(compiles_itself: bool) -> None:
    module = Blocks(compiled_instance() if compiles_itself else Doubling())
    torch_private.intercept_calls(module.blocks[0], lambda call, *args: checkpoint(call, *args, use_reentrant=False))
    blocks = compile_blocks(module, falls_back=True)
    module(torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert (blocks.graphs, blocks.reason is None) == ((0, False) if compiles_itself else (1, True))


@pytest.mark.parametrize("falls_back", [True, False])
def test_a_process_whose_torch_compiles_nothing(falls_back: bool) -> None:
    with torch._dynamo.config.patch(disable=True):
        blocks = compile_blocks(module := Blocks(Doubling()), falls_back=falls_back)
        if torch_is_older_than(13):  # Runs eagerly without a word
            return
        if falls_back:
            module(torch.ones(3, 4, requires_grad=True)).sum().backward()
            assert blocks.reason == "torch.compile cannot make one graph of Doubling.forward: torch skips its code"
        else:
            refused("torch skips its code; set run.compile=off$", module, torch.ones(3, 4, requires_grad=True))


def test_code_that_cannot_be_written_names_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", "/cache/ab")

    monkeypatch.setattr(torch_private, "generate_code", fail)
    compile_blocks(module := Blocks(Doubling()), falls_back=False)
    refused(
        r"its code cannot be written \(/cache/ab: Permission denied\); free some space there, or name another folder "
        "by the variable TORCHINDUCTOR_CACHE_DIR; set run.compile=off$",
        module,
        torch.ones(3, 4, requires_grad=True),
    )


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


def test_masks_of_a_source_are_made_before_the_blocks() -> None:
    """A graph would make them again in each block, since it changes no mask."""
    settings = EncoderDecoderSettings(family="encoder-decoder", **SMALL)
    model = build_trainable_model(settings, 0, torch.float32, torch.device("cpu"))
    made, tokens = list[bool](), torch.zeros(1, 7, dtype=torch.int64)
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2]])
    sources = {"source": tokens[:, :5], "source_documents": documents[:, :5]}
    batch = Batch(tokens, tokens, torch.ones(1, 7), torch.arange(1), documents=documents, **sources)

    def see_masks(_: object, args: tuple[Any, ...]) -> None:
        masks = [each for each in args if isinstance(each, AttentionMask)]
        made.extend(mask._dense.get(torch.float32) is not None for mask in masks)

    model.module.get_submodule("decoder.blocks.0").register_forward_pre_hook(see_masks)
    model.loss_sum(batch)
    assert made == [True, True]


MODELS = [(kind, values) for kind, cases in CASES.items() for values in cases if "experts" not in values]
GENERATE_CODE = torch_private.generate_code
LARGEST_DIFFERENCE = 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("generate_code", "kind", "values"),
    [
        *((as_traced, *model) for model in MODELS[3:6:2]),
        *(
            pytest.param(code, *model, marks=pytest.mark.proof)
            for code in (as_traced, GENERATE_CODE)
            for model in MODELS
        ),
    ],
)
def test_blocks_keep_what_eager_blocks_do(
    generate_code: object, kind: type[TransformerSettings], values: dict[str, object], dtype: torch.dtype
) -> None:
    model = kind.model_validate({**SMALL, "hidden": 96, "ffn_hidden": 160, **values})
    shape = MicroBatchShape(3, 16, 16)
    # A graph keeps which elements a ReLU without a gate has let through, which eager code reads from its output.
    signs = shape.rows * shape.length * 160 * spec_from_settings(model).policy_count
    most = eager = kept_bytes(model, shape, dtype)
    most += signs if model.activation == "relu" and not model.gated else 0
    with patch.object(torch_private, "generate_code", generate_code):
        assert most - LARGEST_DIFFERENCE * eager <= kept_bytes(model, shape, dtype, compiles=True) <= most


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
        (lambda x: x * torch.binomial(torch.ones_like(x), x.detach().sigmoid()), "binomial"),
        (lambda x: x * torch.distributions.Gamma(torch.ones(()), torch.ones(())).sample(), "_standard_gamma"),
        pytest.param(
            lambda x: x * torch.distributions.Dirichlet(torch.ones(4)).sample(),
            "_sample_dirichlet",
            marks=pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # torch's own
        ),
        (lambda x: x * torch.ops.aten.rand_like.default(x), "aten.rand_like.default"),
        (lambda x: torch.ops.aten.dropout.default(x, 0.1, True), "aten.dropout.default"),
        (lambda x: torch.ops.aten.native_dropout.default(x, 0.1, None)[0], "aten.native_dropout.default"),
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
        x = torch.ops.aten.dropout.default(torch.ops.aten.dropout.default(x, 0.0, True), 0.1, False)
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
        assert inductor.compile_threads == 7
        if "recompile_limit" in signature(torch.compile).parameters:  # Else the process has one limit
            assert limits.recompile_limit == 5


def test_a_problem_without_words_is_named_by_its_class() -> None:
    assert torch_private.compile_problem(TorchDynamoException(), max_graphs=1) == "TorchDynamoException"
