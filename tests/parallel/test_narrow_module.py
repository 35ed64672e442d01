"""A module with few of its blocks and of its entries, at its own widths."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from motet.models.user_module import named_blocks
from motet.parallel.proof.module_calls import record_calls
from motet.parallel.proof.narrow_module import forms_of_blocks, keep_few_entries, pass_blocks, vocabulary_of

_ENTRIES = 4099  # 3 more than a multiple of 8


class _Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x + self.down(torch.tanh(self.up(x))), None


class _Model(nn.Module):
    def __init__(self, width: int = 24, inner: int = _ENTRIES, positions: int = 9000, *, tied: bool = False) -> None:
        super().__init__()
        self.vocab_size, self.width, self.longest = _ENTRIES, width, _ENTRIES
        self.table = nn.Embedding(_ENTRIES, width, padding_idx=_ENTRIES - 1)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(_Block(width, inner) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _ENTRIES)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x, _ = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _outside(model: nn.Module) -> list[nn.Module]:
    inside = {part for block in named_blocks(model).values() for part in block.modules()}
    return [part for part in model.modules() if part not in inside]


@pytest.mark.parametrize("tied", [False, True])
def test_tables_and_heads_alone_have_few_entries(tied: bool) -> None:
    with torch.device("meta"):
        model = _Model(tied=tied)
    few = keep_few_entries(_outside(model), _ENTRIES, 2)
    assert few == 515 and few % 8 == _ENTRIES % 8
    assert model.table.weight.shape == model.head.weight.shape == (few, 24) and model.head.bias.shape == (few,)
    assert (model.head.weight is model.table.weight) == tied
    assert (model.vocab_size, model.table.num_embeddings, model.head.out_features) == (few, few, few)
    assert model.table.padding_idx == few - 1
    assert model.longest == _ENTRIES  # Another number
    assert model.blocks[0].up.weight.shape == (_ENTRIES, 24) and model.blocks[0].up.out_features == _ENTRIES
    assert model(torch.zeros(2, 5, dtype=torch.int64, device="meta")).shape == (2, 5, few)


def test_few_entries_are_no_other_size() -> None:
    with torch.device("meta"):
        model = _Model(width=515, inner=8)
    assert keep_few_entries(_outside(model), _ENTRIES, 2) == 523


def _ambiguous() -> Iterator[nn.Module]:
    yield _Model(width=_ENTRIES, inner=8)
    with_buffer, with_vector = _Model(), _Model()
    with_buffer.register_buffer("bias_of_logits", torch.zeros(1, _ENTRIES))
    with_vector.scale = nn.Parameter(torch.zeros(_ENTRIES))
    yield from (with_buffer, with_vector)


def test_all_entries_stay_where_another_size_is_equal() -> None:
    with torch.device("meta"):
        for model in _ambiguous():
            shapes = [parameter.shape for parameter in model.parameters()]
            assert keep_few_entries(_outside(model), _ENTRIES, 2) == _ENTRIES
            assert [parameter.shape for parameter in model.parameters()] == shapes


def test_a_small_vocabulary_stays() -> None:
    with torch.device("meta"):
        assert keep_few_entries(_outside(nn.Sequential(nn.Embedding(1030, 8), nn.Linear(8, 1030))), 1030, 2) == 1030


def test_the_vocabulary_is_as_long_as_a_head() -> None:
    with torch.device("meta"):
        model = _Model()
        assert vocabulary_of(_outside(model)) == _ENTRIES  # There are more positions
        model.head = nn.Linear(24, 2)
        assert vocabulary_of(_outside(model)) is None


def test_blocks_that_are_passed_return_the_form_of_what_they_returned() -> None:
    model, tokens = _Model(inner=8), torch.tensor([[1, 2, 3]])
    with record_calls(named_blocks(model)) as calls:
        model(tokens)
    forms = forms_of_blocks(calls)
    assert {name: [item.argument for _, item in form.items] for name, form in forms.items()} == {
        f"blocks.{index}": [(0,), ()] for index in range(3)
    }
    pass_blocks(model, {"blocks.1"}, forms)
    x = torch.rand(2, 3, 24)
    passed, nothing = model.blocks[0](x)
    assert passed is x and nothing is None
    assert model.blocks[0].up.out_features == 8  # Code still sees its attributes
    assert not list(model.blocks[0].parameters()) and not torch.equal(model.blocks[1](x)[0], x)
