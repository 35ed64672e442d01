"""Values that do not depend on parameters stay known, and all others take no memory."""

import pytest
import torch

from motet.core.errors import InputError
from motet.models.trace.record_forward import KnownValuesMode


def test_positions_and_masks_have_values_and_activations_none() -> None:
    weight = torch.empty(1 << 40, 8, device="meta")
    with torch.device("meta"), KnownValuesMode() as mode:
        positions = torch.arange(6, device=weight.device)
        mask = (positions[:, None] >= positions).to(weight.device)
        rows = weight[positions]
        hidden = rows * mask[:, :1]
        assert mode.is_known(positions) and mode.is_known(mask) and not mode.is_known(hidden)
        assert bool(mask.any()) and int(positions.max()) == 5
    assert hidden.is_meta and hidden.shape == (6, 8)


def test_choices_by_value_are_spread_evenly() -> None:
    with torch.device("meta"), KnownValuesMode():
        scores = torch.empty(12, 6)
        values, chosen = scores.topk(2, dim=-1)
        order = scores.sort(dim=0)[1]
        best = scores.argmax()
        where, _ = torch.where(chosen == 3)
    assert values.is_meta and chosen.tolist()[:4] == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert torch.bincount(chosen.flatten()).tolist() == [4] * 6
    assert sorted(order[:, 0].tolist()) == list(range(12)) and best.item() == 0
    assert where.tolist() == [1, 4, 7, 10]


def test_a_tensor_that_an_unknown_value_is_written_to_is_unknown() -> None:
    with torch.device("meta"), KnownValuesMode() as mode:
        total = torch.zeros(3, 4)
        assert mode.is_known(total)
        total.add_(torch.empty(3, 4))
        assert not mode.is_known(total) and not mode.is_known(total[1:].view(-1) * 2)


def test_numbers_that_depend_on_parameters_cannot_be_read() -> None:
    with torch.device("meta"), KnownValuesMode():
        hidden = torch.empty(3)
        assert not hidden.isinf().any()
        with pytest.raises(InputError, match="depends on its parameters"):
            float(hidden.sum())
