"""Attention of documents by a kernel of variable length, for which a loop over the sequences stands in on a CPU."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from models.small_models import built
from motet.core.batch import Batch
from motet.models.arch import attention_core
from motet.models.arch.attention_mask import AttentionMask, bidirectional_mask, causal_mask
from motet.models.kernels import variable_length
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings, LatentAttentionSettings
from motet.models.spec.layer_specs import MicroBatchShape
from motet.models.spec.model_spec import spec_from_settings
from motet.precision.float64_mode import use_float64

SIZES = {"vocab_size": 30, "context": 16, "layers": 2, "hidden": 32, "heads": 4, "ffn_hidden": 24, "init_std": 0.3}
LATENT = LatentAttentionSettings(query_rank=8, key_value_rank=8, plain_head_dim=4, rotary_head_dim=4, value_head_dim=4)
MODELS: dict[str, Any] = {
    "groups": DecoderSettings(**SIZES, kv_heads=2),
    "window": DecoderSettings(**SIZES, sliding_window=3),
    "narrow values": DecoderSettings(**SIZES, latent_attention=LATENT),
    "encoder": EncoderSettings(**SIZES),
}
# A document of one token, odd lengths, one document in a row, and a number again in another row.
DOCUMENTS = torch.tensor([[0] * 5 + [1] + [2] * 7, [4] * 13, [4, 5, 6] + [7] * 10])


@dataclass
class SequencesOneByOne:
    """The definition of the kernel: each document alone, by the formula of attention."""

    calls: list[list[int]] = field(default_factory=list)  # The lengths of the documents of each

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, starts: Tensor, longest: int, scale: float, window: tuple[int, int]
    ) -> Tensor:
        assert starts.dtype == torch.int32 and q.ndim == k.ndim == v.ndim == 3 and v.shape[2] == q.shape[2]
        assert len(starts) - 1 in (len(DOCUMENTS), 16)  # Compiled blocks see the same shape for up to 16 documents
        lengths = [stop - first for first, stop in pairwise(starts.tolist()) if stop > first]
        assert sum(lengths) == len(q) == len(k) and max(lengths) <= longest
        self.calls.append(lengths)
        parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([self._attend(*part, scale=scale, window=window) for part in parts])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: tuple[int, int]) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        for query in range(len(q)):
            for key in range(len(k)):
                before, after = query - key, key - query
                if (window[0] >= 0 and before > window[0]) or (window[1] >= 0 and after > window[1]):
                    scores[:, query, key] = float("-inf")
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def batch_of(documents: Tensor | None, shape: torch.Size) -> Batch:
    torch.manual_seed(5)
    tokens, targets = torch.randint(30, shape), torch.randint(30, shape)
    return Batch(tokens, targets, torch.ones(shape), rows=torch.arange(shape[0]), documents=documents)


def loss_and_gradients(settings: Any, batch: Batch) -> list[Tensor]:
    model = built(settings, 3, torch.float64)
    loss = model.loss_sum(batch)
    return [loss, *torch.autograd.grad(loss, list(model.module.parameters()))]


def fill_seam(monkeypatch: pytest.MonkeyPatch) -> SequencesOneByOne:
    """Put the stand-in in place; a mask that would be made dense raises."""
    kernel = SequencesOneByOne()
    monkeypatch.setattr(attention_core, "variable_length_kernel", lambda x: kernel)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a dense mask was made")

    monkeypatch.setattr(AttentionMask, "dense", refuse)
    return kernel


@pytest.mark.parametrize(("name", "packs"), [*((name, True) for name in MODELS), ("window", False)])
def test_documents_by_variable_length_equal_their_dense_mask(
    name: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(DOCUMENTS if packs else None, DOCUMENTS.shape)
    with use_float64():
        expected = loss_and_gradients(MODELS[name], batch)
        kernel = fill_seam(monkeypatch)
        by_documents = loss_and_gradients(MODELS[name], batch)
    assert kernel.calls == 2 * [[5, 1, 7, 13, 1, 1, 1, 10] if packs else [13, 13, 13]]  # Once for each layer
    for ours, theirs in zip(by_documents, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-12 * max(theirs.norm(), 1.0)


def test_the_starts_of_documents_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_seam(monkeypatch)
    made, use_kernel = list[AttentionMask](), AttentionMask.use_kernel
    monkeypatch.setattr(
        AttentionMask, "use_kernel", lambda mask, *a, **k: (made.append(mask), use_kernel(mask, *a, **k))
    )
    with use_float64():
        loss_and_gradients(MODELS["groups"], batch_of(DOCUMENTS, DOCUMENTS.shape))
    assert len(made) == 1


@pytest.mark.parametrize("packs", [True, False])
def test_a_batch_counts_its_documents_before_it_moves(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the host would wait for the number."""
    batch = batch_of(DOCUMENTS if packs else None, DOCUMENTS.shape)
    moved = batch.to("meta")
    assert moved.document_count == moved.to("meta").document_count == (8 if packs else None)
    assert batch.to("cpu").first_tokens(2, 13, 0).document_count is None
    fill_seam(monkeypatch)
    counts = list[Any]()
    monkeypatch.setattr(AttentionMask, "use_kernel", lambda *_, count, **__: counts.append(count))
    monkeypatch.setattr(AttentionMask, "dense", lambda *_, **__: None)
    for name in ("groups", "encoder"):
        built(MODELS[name], 3).loss_sum(batch.to("cpu"))
    assert counts == [moved.document_count] * 2


@pytest.mark.parametrize("count", [8, None])
def test_starts_of_documents(count: int | None) -> None:
    mask = causal_mask(DOCUMENTS)
    mask.use_kernel(SequencesOneByOne(), 3, 13, device=torch.device("cpu"), count=count)
    assert mask.sequence is not None
    assert mask.sequence.starts.tolist() == [0, 5, 6, 13, 26, 27, 28, 29, *[39] * 9]


@pytest.mark.parametrize(("count", "size"), [(16, 16), (17, 32), (33, 64)])
def test_a_number_of_documents_is_rounded_up_to_a_power_of_two(count: int, size: int) -> None:
    mask = causal_mask(torch.arange(count).unsqueeze(0))
    mask.use_kernel(SequencesOneByOne(), 1, count, device=torch.device("cpu"), count=count)
    assert mask.sequence is not None
    assert mask.sequence.starts.tolist() == [*range(count), *[count] * (size - count + 1)]


def _learned_bias(mask: AttentionMask) -> AttentionMask:
    return mask.with_bias(torch.zeros(1, 1, 13, 13))


@pytest.mark.parametrize(
    "make",
    [
        lambda: causal_mask(),  # Kernels know it as a flag
        lambda: causal_mask(window=13),
        lambda: causal_mask(DOCUMENTS, torch.arange(13)),  # A part of each row
        lambda: bidirectional_mask(DOCUMENTS, DOCUMENTS.clone()),  # The documents of another sequence
        lambda: _learned_bias(causal_mask(DOCUMENTS)),
    ],
)
def test_other_masks_stay_as_they_were(make: Callable[[], AttentionMask]) -> None:
    mask = make()
    mask.use_kernel(SequencesOneByOne(), 3, 13, device=torch.device("cpu"))
    assert mask.sequence is None


def test_a_bias_and_a_block_of_a_mask_forget_its_kernel() -> None:
    mask = causal_mask(DOCUMENTS)
    mask.use_kernel(SequencesOneByOne(), 3, 13, device=torch.device("cpu"))
    assert mask.sequence is not None
    assert _learned_bias(mask).sequence is None and mask.block(torch.arange(4), torch.arange(4)).sequence is None


def test_attention_over_a_source_takes_the_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SequencesOneByOne()
    monkeypatch.setattr(attention_core, "variable_length_kernel", lambda x: kernel)
    settings = EncoderDecoderSettings(**SIZES, relative_buckets=8, relative_distance=6, dropout=0.0)
    model, batch = built(settings, 3), batch_of(DOCUMENTS, DOCUMENTS.shape)
    inputs = {"documents": DOCUMENTS, "source_documents": DOCUMENTS}
    model.module(batch.tokens, batch.targets, **inputs).sum().backward()
    assert not kernel.calls


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"sinks": torch.zeros(4)}, {"dropout": 0.5}])
def test_scores_that_the_kernel_does_not_know_take_the_dense_mask(options: dict[str, Any]) -> None:
    mask, x = causal_mask(DOCUMENTS), torch.randn(3, 4, 13, 8)
    mask.use_kernel(kernel := SequencesOneByOne(), 3, 13, device=torch.device("cpu"))
    attention_core.attend(x, x, x, mask=mask, options=attention_core.ScoreOptions(0.3, **options))
    assert not kernel.calls


@pytest.mark.parametrize("dims", [(12, 12), (264, 264), (8, 16)])
def test_heads_that_the_kernel_does_not_know_take_the_dense_mask(dims: tuple[int, int]) -> None:
    mask, q, v = causal_mask(DOCUMENTS), torch.randn(3, 4, 13, dims[0]), torch.randn(3, 4, 13, dims[1])
    mask.use_kernel(kernel := SequencesOneByOne(), 3, 13, device=torch.device("cpu"))
    attention_core.attend(q, q, v, mask=mask, options=attention_core.ScoreOptions(0.3))
    assert not kernel.calls


class FakeCudaTensor:
    """A tensor on a GPU, as far as the choice of a kernel reads it."""

    is_cuda, device = True, torch.device("cuda")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@pytest.mark.parametrize(
    ("dtype", "capability", "flash", "expected"),
    [
        (torch.bfloat16, 9, True, True),
        (torch.float16, 8, True, True),
        (torch.float32, 9, True, False),
        (torch.bfloat16, 7, True, False),
        (torch.bfloat16, 9, False, False),  # precision.attention names another kernel
    ],
)
def test_the_kernel_of_torch_is_taken_on_gpus_in_16_bits(
    dtype: torch.dtype, capability: int, flash: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: flash)
    x: Any = FakeCudaTensor(dtype)
    assert (variable_length.variable_length_kernel(x) is not None) is expected
    assert variable_length.variable_length_kernel(torch.ones(1, dtype=dtype)) is None


def test_the_call_of_torchs_kernel_has_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's function checks its arguments and calls an operator, which a CPU does not have."""
    seen = list[Any]()
    from torch.nn.attention import varlen

    def operator(*arguments: Any) -> tuple[Tensor, None, None]:
        seen.extend(arguments)
        return arguments[0], None, None

    monkeypatch.setattr(varlen.torch.ops.torch_attn, "_varlen_attn", operator)
    kernel = variable_length.torch_kernel()
    q, k, starts = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    assert kernel(q, k, k, starts=starts, longest=3, scale=0.5, window=(-1, 0)) is q
    assert seen[3] is starts and seen[5:10] == [3, 3, True, 0.5, [-1, 0]]
    if "enable_gqa" in signature(varlen.varlen_attn).parameters:
        assert seen[1] is k and seen[10] is True
    else:  # Every query head has a key and a value
        assert all(torch.equal(seen[i], k[:, [0, 0, 1, 1]]) for i in (1, 2))


@pytest.mark.parametrize(
    ("settings", "packed", "replaced"),
    [
        (MODELS["groups"], True, 1),
        (MODELS["groups"], False, 0),
        (MODELS["window"], False, 1),
        (MODELS["encoder"], True, 1),
        (DecoderSettings(**SIZES, dropout=0.1), True, 0),  # Attention by its formula adds the dense mask
        (EncoderDecoderSettings(**SIZES, dropout=0.0), True, 0),  # So do scores with a learned bias
    ],
)
def test_the_predicted_bytes_have_no_mask_of_pairs(settings: Any, packed: bool, replaced: int) -> None:
    spec, shape = spec_from_settings(settings), MicroBatchShape(3, 13, 13, packed=packed)
    dense, by_starts = (
        sum(each.bytes(replace(shape, variable_length=has_kernel), "bfloat16") for each in spec.saved())
        for has_kernel in (False, True)
    )
    rows = 3 if packed else 1
    assert dense - by_starts == replaced * rows * 13 * 13 * 2
