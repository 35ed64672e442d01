"""Cross-entropy in Triton, under its interpreter, against its definition in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from gpu_checks.kernel_patches import kernels_forced, recorded_launches
from torch import Tensor

from motet.models.arch import loss
from motet.models.kernels import choice
from triton_interpreter import Interpreted

SIZES = [(3, 1), (5, 7), (4, 4097), (2, 50257), (2, 128256)]


def kernels() -> Any:
    from motet.models.kernels import triton_cross_entropy

    return triton_cross_entropy


def rows_of_logits(rows: int, size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    logits = 4 * torch.randn(rows, size, generator=generator, dtype=torch.float64)
    targets = torch.randint(size, (rows,), generator=generator)
    targets[0], targets[-1] = 0, size - 1
    return logits.to(dtype), targets


def definition(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """-log p of the target, and the gradient of the sum: both by autograd in float64."""
    x = logits.to(torch.float64, copy=True).requires_grad_()
    losses = -(x - x.exp().sum(1, keepdim=True).log()).gather(1, targets.unsqueeze(1))
    return losses.detach(), torch.autograd.grad(losses.sum(), x)[0]


def check_losses_and_errors(rows: int, size: int) -> None:
    logits, targets = rows_of_logits(rows, size)
    losses, errors = definition(logits, targets)
    before = logits.clone()
    torch.testing.assert_close(
        kernels().losses_of_rows(logits, targets, overwrites=False), losses, rtol=1e-12, atol=1e-12
    )
    assert torch.equal(logits, before)
    torch.testing.assert_close(
        kernels().losses_of_rows(logits, targets, overwrites=True), losses, rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(logits, errors, rtol=1e-12, atol=1e-14)


def check_rounding(dtype: torch.dtype, rounding: float) -> None:
    """The interpreter cuts bits off where a device rounds to bfloat16."""
    logits, targets = rows_of_logits(4, 4097, dtype)
    losses, errors = definition(logits, targets)
    ours = kernels().losses_of_rows(logits, targets, overwrites=True)
    assert ours.dtype == torch.float32 and logits.dtype == dtype
    torch.testing.assert_close(ours.double(), losses, rtol=1e-5, atol=1e-5)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # Probabilities may be subnormal
    torch.testing.assert_close(logits.double(), errors, rtol=1.01 * rounding, atol=smallest)


def check_large_and_hidden_logits() -> None:
    logits = torch.full((3, 5000), -float("inf"), dtype=torch.float64)
    logits[0, 4999], logits[1, 0], logits[2, :2] = 1e4, -1e4, torch.tensor([1e308, 0.0], dtype=torch.float64)
    targets = torch.tensor([4999, 0, 1])
    losses = kernels().losses_of_rows(logits, targets, overwrites=True)
    assert losses.flatten().tolist() == [0.0, 0.0, 1e308]
    assert logits.nonzero().tolist() == [[2, 0], [2, 1]] and logits[2, :2].tolist() == [1.0, -1.0]


def check_missing_target(target: int) -> None:
    logits, targets = rows_of_logits(2, 7)
    targets[1] = target
    losses = kernels().losses_of_rows(logits, targets, overwrites=False)
    assert losses.isnan().flatten().tolist() == [False, True]


@dataclass
class OneOfTwoShards:
    """The entries of a rank; sums of the other rank are added from its logits."""

    start: int
    stop: int
    size: int
    others: Tensor  # [N, V]: the logits of all entries
    targets: Tensor
    reductions: int = 0

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"]) -> Tensor:
        is_other = torch.ones(self.size, dtype=torch.bool)
        is_other[self.start : self.stop] = False
        there = self.others[:, is_other].exp().sum(1, keepdim=True).log()
        self.reductions += 1
        if op == "max":
            self.largest = torch.maximum(tensor, there)
            return self.largest
        at_target = self.others.gather(1, self.targets.unsqueeze(1))
        is_there = is_other[self.targets].unsqueeze(1)
        return tensor + torch.stack([(there - self.largest).exp(), at_target.where(is_there, 0.0)])


def check_shard(start: int, stop: int, is_transposed: bool) -> None:
    """A rank has four columns, of which the last may be padding with any value: rows are not next to one another."""
    logits, targets = rows_of_logits(5, 7)
    losses, errors = definition(logits, targets)
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 3.0], dtype=torch.float64)
    local = torch.full((5, 4), 1e9, dtype=torch.float64)
    local[:, : stop - start] = logits[:, start:stop]
    local = (local.t().contiguous().t() if is_transposed else local).requires_grad_()
    shard = OneOfTwoShards(start, stop, 7, logits, targets)
    with kernels_forced("triton"):
        total = loss.cross_entropy(local, targets, weights, vocabulary=shard)  # type: ignore[arg-type]  # a stand-in
        (0.5 * total).backward()
    torch.testing.assert_close(total.detach(), (losses.squeeze(1) * weights).sum(), rtol=1e-12, atol=0)
    expected = torch.zeros(5, 4, dtype=torch.float64)
    expected[:, : stop - start] = 0.5 * weights.unsqueeze(1) * errors[:, start:stop]
    torch.testing.assert_close(local.grad, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("target", [-1, 7])
def test_a_target_that_no_rank_has_makes_the_loss_nan(target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device checks no targets, for whose values the host would wait."""
    monkeypatch.setattr(loss, "check_input", lambda *_: None)
    logits, targets = rows_of_logits(3, 7)
    shard: Any = SimpleNamespace(start=0, stop=7, size=7, all_reduce=lambda tensor, op: tensor)
    expected = F.cross_entropy(logits, targets, reduction="none")
    weights = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(loss.cross_entropy(logits, targets, weights, vocabulary=shard), expected[0])
    targets[1] = target
    assert loss.cross_entropy(logits, targets, weights, vocabulary=shard).isnan()


def check_another_layout() -> None:
    logits, targets = rows_of_logits(3, 7)
    _, errors = definition(logits, targets)
    logsumexp, column = logits.exp().sum(1, keepdim=True).log(), targets.unsqueeze(1)
    output = torch.zeros(3, 9, dtype=torch.float64)
    kernels().write_errors(logits, logsumexp, column, is_here=column >= 0, output=output[:, 1:8], scale=None)
    torch.testing.assert_close(output[:, 1:8], errors, rtol=1e-12, atol=1e-14)
    assert not output[:, 0].any() and not output[:, 8].any()


def check_fused_head(rows: int, size: int, is_split: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((rows, 6), (size, 6), (size,))
    )
    targets, weights = torch.randint(size, (rows,), generator=generator), torch.rand(rows, generator=generator)
    plain, fused = ([x.clone().requires_grad_() for x in (hidden, weight, bias)] for _ in range(2))
    expected = (F.cross_entropy(F.linear(*plain), targets, reduction="none") * weights.double()).sum()
    expected.backward()
    vocabulary = _OneRank(size) if is_split else None
    small_chunks = patch.object(loss, "SOFTMAX_CHUNK_BYTES", {"cpu": 1})  # 8 rows, where rows are cut into chunks
    with small_chunks, kernels_forced("triton"), recorded_launches() as launches:
        total = loss.linear_cross_entropy(
            *fused, targets=targets, weights=weights, vocabulary=vocabulary, block_bytes=16 * size * 8
        )
    assert len(launches) == -(-rows // 16) * (2 if is_split else 1)  # Blocks of 16 rows, none of them in chunks
    total.backward()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


class _OneRank:
    """A rank that has all entries."""

    start = 0

    def __init__(self, size: int) -> None:
        self.size = self.stop = size

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        return tensor


def test_a_gpu_takes_the_kernel_for_large_blocks_of_logits() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        rows = choice._matching_rows("cross_entropy", "cuda", dtype, name="")
        assert next(name for least, name in rows if least <= 1024 * 128256) == "triton"
        assert next(name for least, name in rows if least <= 7) == "plain"
    assert choice.chosen("cross_entropy", torch.zeros(1024, 1024)) == "plain"


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_losses_and_errors_in_place_equal_the_definition(interpreted: Interpreted, rows: int, size: int) -> None:
    interpreted(check_losses_and_errors, rows, size)


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-11)]
)
def test_other_dtypes_are_rounded_once(interpreted: Interpreted, dtype: torch.dtype, rounding: float) -> None:
    interpreted(check_rounding, dtype, rounding)


@pytest.mark.parametrize("target", [-100, -1, 7, 2**31 + 3])
def test_a_target_that_is_no_entry_makes_the_loss_nan(interpreted: Interpreted, target: int) -> None:
    interpreted(check_missing_target, target)


@pytest.mark.parametrize("check", [check_large_and_hidden_logits, check_another_layout])
def test_values_and_layouts(interpreted: Interpreted, check: Callable[[], None]) -> None:
    interpreted(check)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(0, 4), (4, 7), (7, 7)])
def test_ranks_that_split_the_vocabulary_reduce_what_a_row_needs(
    interpreted: Interpreted, start: int, stop: int, is_transposed: bool
) -> None:
    interpreted(check_shard, start, stop, is_transposed)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 7), (30, 11)])
def test_the_fused_head_equals_the_plain_head_and_loss(
    interpreted: Interpreted, rows: int, size: int, is_split: bool
) -> None:
    interpreted(check_fused_head, rows, size, is_split)
