"""The products of linear layers, and weight gradients that a queue takes, are those of autograd."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from motet.parallel.linear import LinearProducts, WeightGradientQueue, take_weight_gradients


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_three_products_are_those_of_autograd(is_transposed: bool) -> None:
    torch.manual_seed(3)
    sizes, products = [(2, 3, 5), (5, 4) if is_transposed else (4, 5), (4,)], LinearProducts(is_transposed)
    x, weight, bias = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes)
    output = products.multiply(x, weight, bias)
    gradient, total = torch.randn_like(output), torch.full_like(weight, torch.nan, requires_grad=False)
    x_gradient, weight_gradient = torch.autograd.grad(output, (x, weight), gradient)
    results = products.input_gradient(gradient, weight), products.weight_gradient(x.detach(), gradient)
    torch.testing.assert_close(results, (x_gradient, weight_gradient), rtol=1e-13, atol=1e-13)
    for adds in (False, True):
        assert products.weight_gradient(x.detach(), gradient, total, adds=adds) is total
        torch.testing.assert_close(total, (1 + adds) * weight_gradient, rtol=1e-13, atol=1e-13)


class Sum:
    """Adds products up, and counts how often the gradient was complete."""

    def __init__(self) -> None:
        self.total, self.completions, self.products = torch.zeros(()), 0, 0

    def add_product(self, product: Callable[..., Tensor]) -> None:
        assert not self.completions, "a product after the gradient was complete"
        self.total, self.products = self.total + product(), self.products + 1

    def complete(self) -> None:
        self.completions += 1


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.outer(torch.tanh(self.inner(x)))))


def module_and_input() -> tuple[Twice, Tensor]:
    torch.manual_seed(3)
    return Twice().double(), torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


def gradients_of_autograd(change: Callable[[Twice], object] = lambda module: None) -> tuple[dict[str, Tensor], Tensor]:
    module, x = module_and_input()
    change(module)
    loss_of(module, x).backward()
    assert x.grad is not None
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}, x.grad


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("has_sums", [False, True])
def test_gradients_are_those_of_autograd(later: bool, has_sums: bool) -> None:
    expected, x_gradient = gradients_of_autograd()
    module, x = module_and_input()
    sums = {layer.weight: Sum() for layer in (module.inner, module.outer)} if has_sums else {}
    queue, completed = WeightGradientQueue(LinearProducts(), dict(sums)), list[Tensor]()
    module.inner.weight.register_post_accumulate_grad_hook(completed.append)
    take_weight_gradients(module, queue)
    if later:
        with queue.deferring("key"):
            loss_of(module, x).backward()
        assert module.outer.weight.grad is None and not any(each.products for each in sums.values())
        completed.clear()
        queue.compute("another")
        queue.compute("key")
        assert [each.completions for each in sums.values()] == [1] * len(sums)
    else:
        loss_of(module, x).backward()
    assert completed == [] if later and has_sums else len(completed) == 1
    torch.testing.assert_close(x.grad, x_gradient, rtol=1e-13, atol=1e-13)
    found = {name: p.grad if p not in sums else sums[p].total for name, p in module.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    assert [each.products for each in sums.values()] == ([2, 1] if has_sums else [])


@pytest.mark.parametrize("later", [False, True])
def test_hooks_of_a_weight_are_called(later: bool) -> None:
    def double(module: Twice) -> object:
        return module.inner.weight.register_hook(lambda gradient: 2 * gradient)

    expected, _ = gradients_of_autograd(double)
    module, x = module_and_input()
    double(module)
    unused = Sum()
    queue = WeightGradientQueue(LinearProducts(), {module.inner.weight: unused})
    take_weight_gradients(module, queue)
    with queue.deferring("key") if later else nullcontext():
        loss_of(module, x).backward()
    queue.compute("key")
    found = {name: p.grad for name, p in module.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    assert not unused.products


def layers_with_sums(*layers: nn.Linear) -> tuple[nn.Sequential, dict[Tensor, Sum]]:
    sums = {layer.weight: Sum() for layer in layers}
    module = nn.Sequential(*layers)
    take_weight_gradients(module, WeightGradientQueue(LinearProducts(), dict(sums)))
    return module, sums


def test_outputs_may_be_changed_in_place() -> None:
    expected, x = nn.Linear(5, 5).double(), torch.randn(2, 3, 5, dtype=torch.float64)
    changed, sums = layers_with_sums(copy.deepcopy(expected))
    nn.ReLU(inplace=True)(expected(x)).sum().backward()
    nn.ReLU(inplace=True)(changed(x)).sum().backward()
    torch.testing.assert_close(sums[changed[0].weight].total, expected.weight.grad, rtol=1e-13, atol=1e-13)


def test_gradients_that_a_forward_takes_are_not_added() -> None:
    layer, x = nn.Linear(5, 5).double(), torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    module, sums = layers_with_sums(layer)
    energy = module(x).square().sum()
    (x_gradient,) = torch.autograd.grad(energy, x, retain_graph=True)
    (weight_gradient,) = torch.autograd.grad(energy, layer.weight, retain_graph=True)
    assert not sums[layer.weight].products
    energy.backward()
    torch.testing.assert_close(
        (x.grad, sums[layer.weight].total), (x_gradient, weight_gradient), rtol=1e-13, atol=1e-13
    )


def test_gradients_can_be_differentiated() -> None:
    def penalty(module: nn.Module, x: Tensor) -> Tensor:
        (x_gradient,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        return x_gradient.square().sum()

    layer, x = nn.Linear(5, 5).double(), torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    module, sums = layers_with_sums(copy.deepcopy(layer))
    penalty(layer, x).backward()
    penalty(module, x).backward()
    found = module[0].weight
    torch.testing.assert_close(sums[found].total + found.grad, layer.weight.grad, rtol=1e-12, atol=1e-12)


def test_autocast_and_vmap_are_left_to_torch() -> None:
    layer, x = nn.Linear(5, 5), torch.randn(2, 3, 5)
    module, sums = layers_with_sums(copy.deepcopy(layer))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), layer(x))
        module(x).sum().backward()
    assert module[0].weight.grad is not None and not sums[module[0].weight].products
    torch.testing.assert_close(torch.func.vmap(module)(x), layer(x))
