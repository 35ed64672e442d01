"""The chunked head and loss equal the plain ones, in value and in every gradient."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from motet.models.arch import logit_slices, loss
from motet.models.settings import DecoderSettings
from motet.models.spec.kernel_memory import forward_workspace
from motet.models.spec.layer_specs import MicroBatchShape
from motet.models.spec.model_spec import spec_from_settings


def _case(rows: int, vocab: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows * vocab)
    hidden, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((rows, 6), (vocab, 6), (vocab,)))
    targets, weights = torch.randint(0, vocab, (rows,)), torch.rand(rows)
    weights[::3] = 0.0
    return hidden, weight, bias, targets, weights


@pytest.mark.parametrize("rows", [1, 7, 64, 200])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_plain_head_and_loss(rows: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "SOFTMAX_CHUNK_BYTES", {"cpu": 1})  # the smallest pieces: 8 rows
    monkeypatch.setattr(loss, "LOGITS_BLOCK_BYTES", {"cpu": 100 * 11 * 8})
    hidden, weight, bias, targets, weights = _case(rows, 11)
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    plain, fused = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    expected = (F.cross_entropy(F.linear(*plain), targets, reduction="none") * weights.double()).sum() * 0.5
    expected.backward()
    got = 0.5 * loss.linear_cross_entropy(*fused, *[None] * (not with_bias), targets=targets, weights=weights)
    got.backward()
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=0)
    for a, b in zip(fused, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-14)


def test_gradient_is_not_computed_for_what_is_frozen() -> None:
    hidden, weight, _, targets, weights = _case(9, 5)
    hidden.requires_grad_()
    loss.linear_cross_entropy(hidden, weight, None, targets=targets, weights=weights).backward()
    assert hidden.grad is not None and weight.grad is None


def test_large_logits_do_not_overflow() -> None:
    hidden, weight = torch.tensor([[1e4], [-1e4]]), torch.tensor([[1.0], [-1.0], [0.5]])
    got = loss.linear_cross_entropy(hidden, weight, None, targets=torch.tensor([1, 1]), weights=torch.ones(2))
    assert got.item() == 2e4  # the first row's target is 2e4 below the largest logit; the second's is the largest


def test_bfloat16_is_summed_in_float32() -> None:
    hidden, weight, _, targets, weights = _case(200, 11, torch.bfloat16)
    got = loss.linear_cross_entropy(hidden, weight, None, targets=targets, weights=weights)
    logits = F.linear(hidden, weight)
    assert got.dtype == torch.float32
    exact = (F.cross_entropy(logits.double(), targets, reduction="none") * weights.double()).sum()
    assert abs(got.item() - exact.item()) < 1e-5 * exact.item()


def test_the_predicted_block_of_logits_is_that_of_the_device() -> None:
    """A GPU has 4,185 rows of 128,256 entries in 1 GiB, and a kernel that overwrites them; a CPU 1,046 in 256 MiB."""
    hidden, entries, rows = 64, 128256, 8192
    sizes = {"context": rows, "layers": 1, "heads": 4, "ffn_hidden": 24}
    head = spec_from_settings(DecoderSettings(**sizes, hidden=hidden, vocab_size=entries)).blocks[-1]
    on_cpu = MicroBatchShape(1, rows)
    workspaces = [forward_workspace(head, replace(on_cpu, device=device), "bfloat16") for device in ("cuda", "cpu")]
    features, chunk = rows * hidden * 2, 8 * entries * 4  # 4 MiB would be 8 rows
    assert workspaces[0] == features + 4096 * entries * 2 + 4096 * hidden * 2
    assert workspaces[1] == features + 1024 * entries * 2 + 3 * chunk


def test_blocks_of_logits_have_the_size_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, compute = list[int](), loss._blockwise_loss
    monkeypatch.setattr(loss, "_blockwise_loss", lambda *a, **k: (sizes.append(k["block_bytes"]), compute(*a, **k))[1])
    for device in ("cpu", "meta"):
        hidden, weight, _, targets, weights = (each.to(device) for each in _case(9, 5))
        loss.linear_cross_entropy(hidden, weight, None, targets=targets, weights=weights)
    monkeypatch.setattr(loss, "LOGITS_BLOCK_BYTES", {"cpu": 1, "meta": 2})
    loss.linear_cross_entropy(hidden, weight, None, targets=targets, weights=weights)
    assert sizes == [256 << 20, 256 << 20, 2] and logit_slices.LOGITS_BLOCK_BYTES["cuda"] == 1 << 30


def test_cross_entropy_of_logits_equals_torch() -> None:
    hidden, weight, _, targets, weights = _case(9, 5)
    logits = F.linear(hidden, weight)
    expected = (F.cross_entropy(logits, targets, reduction="none") * weights).sum()
    torch.testing.assert_close(loss.cross_entropy(logits, targets, weights), expected, rtol=1e-14, atol=0)


def test_a_head_in_float16_multiplies_gradients_by_the_scale_before_it_rounds_them() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(8, 16, generator=generator), 0.1 * torch.randn(40, 16, generator=generator)
    targets, weights = torch.arange(8), torch.full((8,), 2.0**-20)
    gradients = {}
    for dtype, scale in ((torch.float32, 1.0), (torch.float16, 1.0), (torch.float16, 2.0**20)):
        inputs = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight)]
        total = loss.linear_cross_entropy(*inputs, None, targets=targets, weights=weights)
        total.backward(torch.full_like(total, scale))
        gradients[dtype, scale] = torch.cat([tensor.grad.float().flatten() / scale for tensor in inputs])
    expected = gradients[torch.float32, 1.0]
    scaled, unscaled = gradients[torch.float16, 2.0**20], gradients[torch.float16, 1.0]
    assert (scaled - expected).norm() < 2e-3 * expected.norm()
    assert (unscaled - expected).norm() > 0.02 * expected.norm()
