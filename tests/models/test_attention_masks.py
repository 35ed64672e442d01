"""Masks of truth values and of scores, as modules write them, and windows that modules declare."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from motet.models.trace.record_forward import declared_window, visible_keys
from motet.models.trace.record_reader import VisibleKeys

ORDER = torch.arange(9)[:, None] - torch.arange(9)
CAUSAL, BAND = ORDER >= 0, (ORDER >= 0) & (ORDER < 4)


def scores(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.bfloat16).min)


@pytest.mark.parametrize(
    "form", [lambda v: v, lambda v: ~v, scores, lambda v: scores(v)[None, None].expand(3, 2, 9, 9)]
)
def test_a_mask_shows_which_keys_are_visible(form) -> None:
    assert visible_keys(form(CAUSAL)) == VisibleKeys(True)
    assert visible_keys(form(BAND)) == VisibleKeys(True, 4)
    assert visible_keys(form(ORDER.abs() < 4)) == VisibleKeys(False)


def test_other_tensors_are_no_masks() -> None:
    for tensor in (torch.ones(9, 9), torch.ones(9), torch.ones(9, 8, dtype=torch.bool), torch.arange(81).view(9, 9)):
        assert visible_keys(tensor) is None


def test_a_window_is_that_of_the_innermost_module_that_declares_one() -> None:
    outer, inner, layer = nn.Module(), nn.Module(), nn.Linear(2, 2)
    assert declared_window([outer, inner, layer]) is None
    outer.config = SimpleNamespace(sliding_window=8)
    assert declared_window([outer, inner, layer]) == 8
    inner.config = SimpleNamespace(sliding_window=6, layer_types=["full_attention", "sliding_attention"])
    inner.layer_idx = 0
    assert declared_window([outer, inner, layer]) is None
    inner.layer_idx = 1
    assert declared_window([outer, inner, layer]) == 6
    inner.sliding_window = None
    assert declared_window([outer, inner, layer]) is None
