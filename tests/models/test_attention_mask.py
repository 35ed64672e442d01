"""Dense forms of masks against loops over queries and keys; blocks of a mask against parts of its dense form."""

from dataclasses import dataclass
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import SIZES, built
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors

from motet.models.arch import attention_core, attention_mask
from motet.models.arch.attention_and_feed_forward import PreNormBlock
from motet.models.arch.attention_core import dot_product_attention
from motet.models.arch.attention_mask import AttentionMask, AttentionTokens, bidirectional_mask, causal_mask
from motet.models.arch.encoder import EncoderBlock
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings, TransformerSettings

ROWS, HEADS = 2, 3
DTYPE, DEVICE = torch.float32, torch.device("cpu")
Documents = list[list[int]]


@dataclass(frozen=True)
class Case:
    """A mask, and what it was made of."""

    mask: AttentionMask
    causal: bool
    window: int | None
    places: list[int]
    key_places: list[int]
    documents: Documents | None
    key_documents: Documents | None
    bias: Tensor | None

    def is_visible(self, row: int, query: int, key: int) -> bool:
        place, key_place = self.places[query], self.key_places[key]
        if self.causal and key_place > place:
            return False
        if self.window is not None and place - key_place >= self.window:
            return False
        if self.documents is None or self.key_documents is None:
            return True
        document, keys = self.documents[row][query], self.key_documents[row]
        return document == keys[key] or document not in keys

    def expected(self) -> Tensor:
        """[R, heads, T, S]"""
        bias = torch.zeros(1, HEADS, len(self.places), len(self.key_places)) if self.bias is None else self.bias
        dense = bias.expand(ROWS, -1, -1, -1).clone()
        for row in range(ROWS):
            for query in range(len(self.places)):
                for key in range(len(self.key_places)):
                    if not self.is_visible(row, query, key):
                        dense[row, :, query, key] = -inf
        return dense


def documents_of(length: int) -> st.SearchStrategy[Documents]:
    row = st.lists(st.integers(0, 3), min_size=length, max_size=length)
    return st.lists(row, min_size=ROWS, max_size=ROWS)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    length, has_documents, seed = draw(st.integers(1, 7)), draw(st.booleans()), draw(st.integers(0, 99))
    kind = draw(st.sampled_from(["causal", "bidirectional", "cross"]))
    key_length = draw(st.integers(1, 7)) if kind == "cross" else length
    documents = draw(documents_of(length)) if has_documents else None
    keys = draw(documents_of(key_length)) if has_documents and kind == "cross" else documents
    tensor = None if documents is None else torch.tensor(documents)
    key_tensor = tensor if keys is documents else torch.tensor(keys)
    places, window, given_places = list(range(length)), None, None
    if kind == "causal":
        window = draw(st.none() | st.integers(1, 8))
        if draw(st.booleans()):
            places = draw(st.permutations(range(9)))[:length]
            given_places = torch.tensor(places)
        mask = causal_mask(tensor, given_places, window)
    else:
        mask = bidirectional_mask(tensor, key_tensor)
    bias = None
    if draw(st.booleans()):
        bias = torch.randn(1, HEADS, length, key_length, generator=torch.Generator().manual_seed(seed))
        mask = mask.with_bias(bias)
    key_places = list(range(key_length)) if kind == "cross" else places
    return Case(mask, kind == "causal", window, places, key_places, documents, keys, bias)


def dense(mask: AttentionMask, length: int, key_length: int) -> Tensor:
    """[R, heads, T, S], where a mask without a tensor is what a kernel makes of its flag."""
    tensor = mask.dense(length, key_length, dtype=DTYPE, device=DEVICE)
    if tensor is None:
        tensor = torch.zeros(1, 1, length, key_length)
        if mask.causal and mask.has_kernel_order:
            tensor = tensor + torch.full((length, key_length), -inf).triu(1)
    return tensor.expand(ROWS, HEADS, -1, -1)


@settings(deadline=None)
@given(cases())
def test_dense_forms_are_what_loops_say(case: Case) -> None:
    """A bias is what was added where a key is visible, bit for bit."""
    assert torch.equal(dense(case.mask, len(case.places), len(case.key_places)), case.expected())


def indices(length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, length - 1), min_size=1, max_size=length, unique=True)


@settings(deadline=None)
@given(st.data())
def test_a_block_is_that_part_of_the_whole(data: st.DataObject) -> None:
    """Also a block of a block. A query without a key in a block has -inf for each of them."""
    case = data.draw(cases())
    mask, expected = case.mask, case.expected()
    for _ in range(2):
        queries, keys = (torch.tensor(data.draw(indices(expected.shape[dim]))) for dim in (2, 3))
        mask, expected = mask.block(queries, keys), expected[:, :, queries][..., keys]
        assert torch.equal(dense(mask, len(queries), len(keys)), expected)


def test_padding_without_a_source_sees_everything_in_each_block_and_other_queries_may_see_nothing() -> None:
    documents, sources = torch.tensor([[0, 1, 9]]), torch.tensor([[0, 0, 1]])
    block = bidirectional_mask(documents, sources).block(torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert dense(block, 2, 2)[0, 0].tolist() == [[-inf, -inf], [0.0, 0.0]]


@pytest.mark.parametrize("window", [None, 9])
def test_a_causal_mask_of_whole_rows_stays_a_flag_and_its_blocks_do_not(window: int | None) -> None:
    mask = causal_mask(window=window)
    assert mask.dense(9, 9, dtype=DTYPE, device=DEVICE) is None and mask.causal and mask.has_kernel_order
    block = mask.block(torch.tensor([5, 6]), torch.tensor([6, 7]))
    assert dense(block, 2, 2)[0, 0].tolist() == [[-inf, -inf], [0.0, -inf]] and not block.has_kernel_order


def test_a_mask_without_restrictions_has_no_tensor() -> None:
    assert AttentionMask().dense(4, 5, dtype=DTYPE, device=DEVICE) is None
    part = AttentionTokens(torch.tensor([3, 4]))
    assert AttentionMask(part, part).dense(2, 2, dtype=DTYPE, device=DEVICE) is None


@pytest.mark.parametrize("is_tiled", [False, True])
def test_attention_within_a_part_of_a_row(monkeypatch: pytest.MonkeyPatch, is_tiled: bool) -> None:
    """No kernel takes a larger index for a later place where the places say otherwise. Tiles have 128 queries."""
    monkeypatch.setattr(attention_core, "is_amx_faster", lambda *_: is_tiled)
    torch.manual_seed(0)
    places, documents = torch.randperm(200)[:150], torch.randint(2, (2, 150))
    q, k, v = (torch.randn(2, 150, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for given_documents in (None, documents):
        out = dot_product_attention(q, k, v, causal_mask(given_documents, places, 60), scale=0.5)
        is_visible = (places[None, :] <= places[:, None]) & (places[:, None] - places[None, :] < 60)
        if given_documents is not None:
            is_visible = is_visible & (documents[:, None, :, None] == documents[:, None, None, :])
        scores = torch.einsum("rthd,rshd->rhts", q, k) * 0.5
        expected = torch.einsum("rhts,rshd->rthd", scores.masked_fill(~is_visible, -inf).softmax(-1), v).flatten(2)
        assert (out - expected).abs().max() < 1e-14
        weight = torch.randn_like(out)
        grads = (torch.autograd.grad(y, (q, k, v), weight) for y in (out, expected))
        assert all((a - b).abs().max() < 1e-13 for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("model", "masks"),
    [
        (DecoderSettings(**SIZES, sliding_window=3), 1),
        (EncoderSettings(**SIZES), 1),
        (EncoderDecoderSettings(**SIZES, relative_buckets=8, relative_distance=6), 3),
    ],
)
def test_a_mask_is_made_dense_once_for_all_layers(
    monkeypatch: pytest.MonkeyPatch, model: TransformerSettings, masks: int
) -> None:
    """An encoder-decoder has masks of its encoder, of its decoder, and between them.
    FSDP2 converts the arguments of each block, and must not take a mask for something that it has to copy."""
    made: list[Tensor] = []
    make = attention_mask._additive_mask
    monkeypatch.setattr(attention_mask, "_additive_mask", lambda *values: made.append(values[0]) or make(*values))
    tokens, documents = torch.zeros(2, 6, dtype=torch.int64), torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    sources = {"source": tokens, "source_documents": documents} if isinstance(model, EncoderDecoderSettings) else {}
    module = built(model).module
    for block in (part for part in module.modules() if isinstance(part, PreNormBlock | EncoderBlock)):
        block.register_forward_pre_hook(lambda _, inputs: _apply_to_tensors(lambda tensor: tensor, inputs))
    module(tokens, documents=documents, **sources)
    assert len(made) == masks and SIZES["layers"] > 1
