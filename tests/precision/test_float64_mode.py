"""Inside float64_mode nothing that asks for float32 gets it."""

import pytest
import torch

from motet.precision.float64_mode import use_float64


def test_every_way_to_ask_for_float32_gives_float64() -> None:
    x = torch.ones(2, 3, dtype=torch.float64)
    with use_float64():
        asked = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32)]
        asked += [x.type(torch.float32), x.type("torch.FloatTensor"), x.new_zeros(2, dtype=torch.float32)]
        asked += [torch.arange(3, dtype=torch.float32), torch.zeros(3, dtype=torch.float32)]
        asked += [torch.softmax(x, -1, dtype=torch.float32), torch.empty(2), torch.tensor([1.0])]
    assert {t.dtype for t in asked} == {torch.float64}


def test_nothing_is_lost_on_the_way_through_float32() -> None:
    x = torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)
    assert x.float().double().item() == 1.0
    with use_float64():
        assert x.float().double().item() == 1.0 + 2.0**-40


def test_the_default_dtype_comes_back_after_an_error() -> None:
    with pytest.raises(KeyError), use_float64():
        raise KeyError
    assert torch.get_default_dtype() == torch.float32 and torch.zeros(1, dtype=torch.float32).dtype == torch.float32


def test_whole_numbers_and_16_bits_are_left_alone() -> None:
    with use_float64():
        assert torch.ones(1, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert torch.ones(1, dtype=torch.int64).dtype == torch.int64


@pytest.mark.parametrize("stops", [[2, 2, 5], [0, 3, 4]])
def test_grouped_products_of_experts_have_float64(stops: list[int]) -> None:
    """Group i of the rows is multiplied by matrix i; rows after the last group are zero, which no kernel promises."""
    x, weights = torch.randn(5, 16, dtype=torch.float64), torch.randn(3, 16, 8, dtype=torch.float64)
    ends = torch.tensor(stops, dtype=torch.int32)
    with use_float64():
        product = torch.nn.functional.grouped_mm(x, weights, offs=ends)
        in_bfloat16 = torch.nn.functional.grouped_mm(x.bfloat16(), weights.bfloat16(), offs=ends)
    expert = torch.bucketize(torch.arange(5), ends, right=True)
    expected = torch.stack([x[i] @ weights[e] if e < 3 else torch.zeros(8).double() for i, e in enumerate(expert)])
    assert torch.allclose(product, expected, rtol=1e-14, atol=1e-14) and in_bfloat16.dtype == torch.bfloat16
