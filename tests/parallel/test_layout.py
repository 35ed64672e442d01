"""The arithmetic of batches and ranks."""

import pytest

from motet.core.errors import InputError
from motet.parallel.layout import LayoutSettings, microbatches_of_rank, resolve_layout


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_ranks_and_microbatches_cover_the_batch_once(ranks: int, microbatches: int) -> None:
    layout = resolve_layout(LayoutSettings(microbatches=microbatches), ranks, 48)
    rows = [row for rank in range(ranks) for share in microbatches_of_rank(layout, rank, 48) for row in share.rows]
    assert rows == list(range(48))
    sizes = {len(share.rows) for rank in range(ranks) for share in microbatches_of_rank(layout, rank, 48)}
    assert sizes == {48 // ranks // microbatches}


def test_impossible_arithmetic_names_what_would_work() -> None:
    sentence = "= 16 cannot be cut evenly over 3 ranks x 2 micro-batches = 6; use .* 12 or 18"
    with pytest.raises(InputError, match=sentence):
        resolve_layout(LayoutSettings(microbatches=2), 3, 16)
    with pytest.raises(InputError, match=r"use data.batch_sequences = 8,"):
        resolve_layout(LayoutSettings(), 8, 4)


def test_a_layout_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(InputError, match=r"layout.dp = 4 does not match 2 ranks; start 4 ranks"):
        resolve_layout(LayoutSettings(dp=4), 2, 16)
