"""`parallelize` with optimizers of torch: it trains as they do, says what trains, and refuses what it cannot do."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet import parallelize
from motet.core.errors import InputError

BATCHES = [(torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0])) for _ in range(4)]


def module_of() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def two_groups(module: Any) -> torch.optim.Optimizer:
    groups = [{"params": module[0].parameters(), "lr": 0.03}, {"params": module[2].parameters(), "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.2)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "class": lambda _: torch.optim.AdamW,
    "class with arguments": lambda _: partial(torch.optim.AdamW, lr=0.02, betas=(0.8, 0.9), eps=1e-6),
    "optimizer": lambda module: torch.optim.SGD(
        module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True
    ),
    "groups": two_groups,
    "Adam": lambda module: torch.optim.Adam(module.parameters(), lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_the_optimizer_of_torch(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = module_of(), module_of()
    engine = parallelize(ours, loss=loss, precision="fp64", optimizer=OPTIMIZERS[name](ours))
    optimizer = OPTIMIZERS[name](theirs)
    optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(theirs.parameters())
    for batch in BATCHES:
        engine.step(batch)
        loss(theirs, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for (key, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-12, atol=1e-14), key
    assert "no clipping" in capsys.readouterr().err


def test_it_says_what_trains_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    module = module_of()
    parallelize(module, loss=loss, precision="fp64", optimizer=two_groups(module))
    assert capsys.readouterr().err == (
        "parallelize: AdamW, learning rate 0.03 and 0.01, betas 0.9 and 0.999, eps 1e-08, weight decay 0.2 of 2 "
        "parameters (0.weight, 0.bias), weight decay 0 of 2 parameters (2.weight, 2.bias), no clipping\n"
    )
    parallelize(module_of(), loss=loss, precision="fp64")
    assert "weight decay 0.1 of 2 parameters (0.weight, 2.weight), weight decay 0 of 2" in capsys.readouterr().err


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    loss(module, BATCHES[0]).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda _: torch.optim.RMSprop, "optimizer RMSprop is not built into motet; use torch.optim.AdamW"),
        (lambda _: partial(torch.optim.Adam, weight_decay=0.1), "Adam adds weight_decay = 0.1 to gradients"),
        (lambda _: partial(torch.optim.AdamW, amsgrad=True), "AdamW with amsgrad = True is not built into motet"),
        (stepped, "AdamW has taken steps, whose state is not taken over"),
        (lambda m: torch.optim.SGD(m[0].parameters()), "SGD does not have 2.weight, 2.bias, which would be trained"),
        (lambda _: torch.optim.SGD(module_of().parameters()), "SGD has a parameter that is not of the module"),
    ],
)
def test_what_motet_cannot_do_is_refused(make: Callable[[nn.Module], Any], sentence: str) -> None:
    module = module_of()
    with pytest.raises(InputError, match=f"^parallelize: {sentence}"):
        parallelize(module, loss=loss, precision="fp64", optimizer=make(module))


def test_an_error_of_the_user_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: others.append(kind))
    for _ in range(2):  # The hook is installed once
        with pytest.raises(InputError) as caught:
            parallelize(module_of(), "dp2")
    sys.excepthook(InputError, caught.value, caught.value.__traceback__)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("motet: layout 'dp2': 'dp2' is not of the form key=value; write dp=2 (")
    assert f"{__file__}, line " in line
    sys.excepthook(KeyError, KeyError("x"), None)
    assert others == [KeyError]
