"""The mask is that of its definition, in any part of a row, and behaves like independent draws."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from motet.core.seeds import derive_seed
from motet.models import dropout_mask as module
from motet.models.dropout_mask import Spans, draw_mask

CPU = torch.device("cpu")
KEYS = [derive_seed("row", row) for row in range(3)]


def hash_of(key: int, index: int) -> int:
    """The definition in the docstring of the module, in integers without a limit."""
    key = derive_seed(key, index >> 32) if index >> 32 else key
    x = ((index % 2**32) * 0x9E3779B1 + key % 2**32) % 2**32
    x = ((x ^ x >> 16) * 0x7FEB352D + (key >> 32)) % 2**32
    x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
    return x - 2**32 if x >= 2**31 else x


def defined(keys: list[int], indices: np.ndarray, p: float) -> Tensor:
    kept = [[hash_of(key, int(index)) >= p * 2**32 - 2**31 for index in indices.flat] for key in keys]
    return torch.tensor(kept).view(len(keys), *indices.shape)


@pytest.mark.parametrize("chunk", [1, 7, 64, 2**15])
def test_masks_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(module, "_CPU_CHUNK", chunk)
    expected = defined(KEYS, np.arange(5 * 6 * 7).reshape(5, 6, 7), 0.3)
    assert torch.equal(draw_mask(KEYS, (5, 6, 7), 0.3, device=CPU), expected)


def test_p_is_exact_to_32_bits() -> None:
    lowest = (hash_of(KEYS[0], 0) + 2**31) / 2**32
    kept = [draw_mask(KEYS[:1], (1,), p, device=CPU).item() for p in (lowest, lowest + 2**-32)]
    assert kept == [True, False]
    for p, all_kept in ((0.0, True), (1e-12, True), (1 - 1e-12, False), (1.0, False)):
        assert draw_mask(KEYS, (50,), p, device=CPU).eq(all_kept).all()


PARTS: list[Spans] = [
    [[(0, 4)], [(2, 5)], [(0, 6)]],  # positions or heads: several runs
    [[(2, 3)], [(1, 4)], [(0, 6)]],  # one run
    [[(1, 3)], [(0, 5)], [(0, 6)]],
    [[(0, 4)], [(0, 5)], [(3, 6)]],  # the width
    [[(0, 4)], [(0, 5)], [(0, 1), (2, 4), (4, 5)]],  # fused
    [[(0, 1), (3, 4)], [(0, 2), (4, 5)], [(1, 2), (5, 6)]],
    [[(0, 1), (2, 3), (1, 2), (3, 4)], [(0, 5)], [(0, 6)]],  # in another order
    [[(0, 4)], [(0, 5)], [(0, 6)]],
    [[(0, 4)], [(2, 2)], [(0, 6)]],  # nothing
]


@pytest.mark.parametrize("spans", PARTS)
@pytest.mark.parametrize("chunk", [5, 2**15])
def test_a_part_is_that_part_of_the_mask(monkeypatch: pytest.MonkeyPatch, chunk: int, spans: Spans) -> None:
    monkeypatch.setattr(module, "_CPU_CHUNK", chunk)
    mask = draw_mask(KEYS, (4, 5, 6), 0.4, device=CPU).numpy()
    here = [np.concatenate([np.arange(*span) for span in dim_spans]) for dim_spans in spans]
    assert np.array_equal(draw_mask(KEYS, (4, 5, 6), 0.4, spans=spans, device=CPU), mask[np.ix_(range(3), *here)])


@pytest.mark.parametrize(
    ("shape", "spans"),
    [
        ((2**34,), [[(2**32 - 20, 2**32 + 20)]]),
        ((2**34,), [[(5, 25), (2**32 + 5, 2**32 + 25), (2**33 + 5, 2**33 + 25)]]),
        ((2**17, 2**17), [[(2**15 - 3, 2**15 + 3)], [(2**17 - 5, 2**17)]]),
    ],
)
def test_more_than_2_to_the_32_elements(shape: tuple[int, ...], spans: Spans) -> None:
    indices = np.zeros((), np.int64)
    for length, dim_spans in zip(shape, spans, strict=True):
        indices = indices[..., None] * length + np.concatenate([np.arange(*span) for span in dim_spans])
    assert torch.equal(draw_mask(KEYS, shape, 0.5, spans=spans, device=CPU), defined(KEYS, indices, 0.5))


def test_indices_beyond_2_to_the_32_do_not_repeat_the_mask() -> None:
    blocks = [[(high * 2**32, high * 2**32 + 4096)] for high in range(4)]
    masks = [draw_mask(KEYS[:1], (2**34,), 0.5, spans=[block], device=CPU) for block in blocks]
    check_independent([(a, b) for i, a in enumerate(masks) for b in masks[:i]], 0.5)


# --- statistics, against the binomial distribution -------------------------------------------------
ROWS, LENGTH, LIMIT = 48, 8192, 5.5  # Standard deviations that 1 of 26 million normal numbers exceeds


def masks(p: float, *where: int | str, rows: int = ROWS) -> Tensor:
    return draw_mask([derive_seed(*where, row) for row in range(rows)], (LENGTH,), p, device=CPU)


def check_normal(scores: Tensor) -> None:
    """Numbers that should be normal with a deviation of 1: none is large, and their squares add up to their count."""
    squares, count = float(scores.square().sum()), scores.numel()
    assert scores.abs().max() < LIMIT and abs(squares - count) < LIMIT * (2 * count) ** 0.5


def check_independent(pairs: list[tuple[Tensor, Tensor]], p: float) -> None:
    """The correlation of each pair of masks, by row."""
    scores = [
        (((a.float() - 1 + p) * (b.float() - 1 + p)).sum(-1)) / (p * (1 - p)) / a.shape[-1] ** 0.5 for a, b in pairs
    ]
    check_normal(torch.cat(scores))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_the_share_that_is_kept(p: float) -> None:
    kept = torch.cat([masks(p, 0, 0, f"block {site} dropout 1") for site in range(6)]).sum(-1)
    check_normal((kept - LENGTH * (1 - p)) / (LENGTH * p * (1 - p)) ** 0.5)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_elements_rows_sites_steps_and_seeds_are_independent(p: float) -> None:
    mask = masks(p, 0, 0, "block 0 dropout 1")
    lags = [*range(1, 20), *(2**n + more for n in range(5, 13) for more in (-1, 0, 1))]
    check_independent([(mask[:, lag:], mask[:, :-lag]) for lag in lags], p)
    others = [masks(p, 0, 0, f"block {block} dropout {n}") for block, n in ((0, 2), (0, 3), (1, 1), (2, 1))]
    others += [masks(p, seed, step, "block 0 dropout 1") for seed, step in ((0, 1), (0, 2), (1, 0), (2, 0), (3, 0))]
    check_independent([(mask, other) for other in others], p)
    check_independent([(mask, mask.roll(shift, 0)) for shift in range(1, ROWS // 2)], p)


@pytest.mark.parametrize("change", [1, 2**16, 2**31, 2**32, 2**33, 2**62 // 3])
def test_keys_need_not_be_random(change: int) -> None:
    first = draw_mask(range(ROWS), (LENGTH,), 0.5, device=CPU)
    second = draw_mask([key + change for key in range(100, 100 + ROWS)], (LENGTH,), 0.5, device=CPU)
    check_independent([(first, second)], 0.5)


def test_pairs_of_bits_are_independent_in_a_plane() -> None:
    """Neighbours in a row and in the row after, as attention probabilities have them."""
    mask = draw_mask(KEYS, (256, 256), 0.1, device=CPU)
    moved = [(mask[:, 1:], mask[:, :-1]), (mask[:, 1:, 1:], mask[:, :-1, :-1]), (mask[:, 1:, :-1], mask[:, :-1, 1:])]
    check_independent([(a.flatten(1), b.flatten(1)) for a, b in moved], 0.1)


def _without_second_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROUNDS", (module._ROUNDS[0], (31, 1)))


def _without_shifts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROUNDS", [(31, factor) for _, factor in module._ROUNDS])


@pytest.mark.parametrize("worsen", [_without_second_round, _without_shifts])
def test_a_weaker_hash_is_found(monkeypatch: pytest.MonkeyPatch, worsen: Callable[[pytest.MonkeyPatch], None]) -> None:
    worsen(monkeypatch)
    with pytest.raises(AssertionError):
        test_elements_rows_sites_steps_and_seeds_are_independent(0.5)
