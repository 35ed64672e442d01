"""The key of a proof differs where anything that the proof depends on differs, and is the same in two processes."""

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from motet.train.proof import module_key
from motet.train.proof.module_key import proof_key

_FILES = {
    "key_model.py": """
import os
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple
import torch
from torch import nn
import key_consts
from key_consts import INTER
from key_package import blocks as inner

ORDER = {"queries", "keys", "values", "heads"}

class Sizes(NamedTuple):
    heads: int = 4

@dataclass
class Config:
    inter: bool = False
    names: list[str] = field(default_factory=list)

class Slots:
    __slots__ = ("inter",)

@lru_cache
def scale(width):
    return width**-0.5

def before(module, inputs):
    return inputs

class Attention(inner.Base):
    layout = ["blocks"]

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.config, self.plain = Config(), {"flags": [{"inter": False}]}
        self.space, self.slots, self.sizes = SimpleNamespace(inter=False), Slots(), Sizes()
        self.slots.inter = False
        self.config.attention = self  # A cycle
        self.config._original_object_hash = hash("text")  # As in transformers
        self.order = {"a", "b", "c", "d"}
        self.register_buffer("table", torch.zeros(3))
        self.register_buffer("floats", torch.zeros(3, dtype=torch.bfloat16))
        self.number = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.register_forward_pre_hook(before)

    def forward(self, x):
        from key_lazy import split
        import absent
        if os.environ.get("KEY_INTER"):
            return split(x)
        return self.layer(x) * scale(4)

def other(self, x):
    return x

def make():
    return Attention()
""",
    "key_consts.py": """
import json
import pathlib
INTER = False
SETTINGS = json.loads(pathlib.Path(__file__).with_name("settings.json").read_text())
""",
    "key_lazy.py": "from key_lazier import second\n\ndef split(x):\n    return second(x)\n",
    "key_lazier.py": "def second(x):\n    return x[1]\n",
    "key_patch.py": (
        "import key_model\n\ndef forward(self, x):\n    return x\n\n"
        "key_model.Attention.forward = forward\nmake = key_model.make\n"
    ),
    "key_factory.py": "import key_model\nmake = key_model.make\n",
    "key_package/__init__.py": "",
    "key_package/blocks.py": (
        "from torch import nn\n\nclass Base(nn.Module):\n    def rotate(self, x):\n"
        "        from ..key_package.rotary import rotate\n        return rotate(x)\n"
    ),
    "key_package/rotary.py": "def rotate(x):\n    return -x\n",
    "settings.json": "{}",
    "site-packages/key_library.py": "def gate(x):\n    return x\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the code of a model, which can be imported."""
    for name, text in _FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.startswith("key_")]:
        del sys.modules[name]
    invalidate_caches()


def _key(change: Callable[[Any], object] = lambda model: None, factory: str = "key_model") -> str | None:
    """The key as another process would have it, of a model that was changed after it was made."""
    _forget()
    model = import_module(factory).make()
    change(model)
    return proof_key(model, {"tp": 2}, factory=factory)


def _replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return replace


_FILE_CHANGES = {
    "a constant that is imported": _replace("key_consts.py", "INTER = False", "INTER = True"),
    "a setting that a file read when it was imported": _replace("settings.json", "{}", '{"inter": true}'),
    "a function that is imported where it is called": _replace("key_lazy.py", "second(x)", "second(-x)"),
    "what that function imports": _replace("key_lazier.py", "x[1]", "x[0]"),
    "a relative import where it is called": _replace("key_package/rotary.py", "-x", "x"),
    "a package's own file": _replace("key_package/__init__.py", "", "import torch"),
    "a module that was absent": lambda folder: (folder / "absent.py").write_text("nothing = 1"),
    "an attribute of a class": _replace("key_model.py", '["blocks"]', '["heads"]'),
    "the time of a file of a library": lambda folder: os.utime(folder / "site-packages/key_library.py", (1, 1)),
    "a package that is installed": lambda folder: (folder / "kernels-1.0.dist-info").mkdir(),
}


@pytest.mark.parametrize("change", _FILE_CHANGES.values(), ids=_FILE_CHANGES)
def test_another_file_is_another_key(folder: Path, change: Callable[[Path], None]) -> None:
    _replace("key_model.py", "import key_consts", "import key_consts, key_library")(folder)
    before = _key()
    assert before is not None and before == _key()
    change(folder)
    assert _key() not in (before, None)


def _set(path: str, value: object) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        *parents, name = path.split(".")
        owner = functools.reduce(getattr, parents, model)
        setattr(owner, name, value)

    return change


def _add_hook(model: Any) -> None:
    model.register_forward_pre_hook(sys.modules["key_model"].make)


def _replace_function(of: int, name: str) -> Callable[[Any], None]:
    return lambda model: setattr(type(model).__mro__[of], name, sys.modules["key_model"].other)


_MODEL_CHANGES: dict[str, Callable[[Any], object]] = {
    "a flag of a dataclass": _set("config.inter", True),
    "a flag of a namespace": _set("space.inter", True),
    "a flag in a slot": _set("slots.inter", True),
    "a flag in a list in a dictionary": lambda model: model.plain["flags"][0].update(inter=True),
    "another type": _set("config.inter", 0),
    "an attribute of the class": lambda model: setattr(type(model), "layout", ["heads"]),
    "an entry of a set": lambda model: model.order.add("e"),
    "a tied weight": lambda model: setattr(model.head, "weight", model.layer.weight),
    "another tied weight": lambda model: setattr(model.head, "bias", model.layer.bias),
    "a value of a buffer": lambda model: model.table.fill_(1),
    "a value of a buffer in bfloat16": lambda model: model.floats.fill_(1),
    "the value of an integer parameter": lambda model: model.number.fill_(4),
    "a frozen weight": lambda model: model.layer.weight.requires_grad_(False),
    "a hook": _add_hook,
    "another hook": lambda model: model._forward_pre_hooks.update(dict.fromkeys(model._forward_pre_hooks, print)),
    "a function of the class": _replace_function(0, "forward"),
    "a function of the base class": _replace_function(1, "rotate"),
    "a forward of the instance": _set("forward", functools.partial(print, 1)),
    "a global value": lambda model: setattr(sys.modules["key_consts"], "INTER", True),
    "a mode": lambda model: model.eval(),
}


@pytest.mark.parametrize("change", _MODEL_CHANGES.values(), ids=_MODEL_CHANGES)
def test_another_model_is_another_key(folder: Path, change: Callable[[Any], object]) -> None:
    with torch.no_grad():
        assert _key(change) not in (_key(), None)


def test_the_code_of_a_function_counts_and_not_its_name(folder: Path) -> None:
    keys = []
    for number in (1, 2):
        values: dict[str, Any] = {}
        exec(f"def forward(self, x):\n    return [each * {number} for each in x]", values)
        keys.append(_key(lambda model, new=values["forward"]: setattr(type(model).forward, "__code__", new.__code__)))
    assert None not in keys and keys[0] != keys[1]


def test_a_compiled_function_counts_by_the_function_and_not_by_the_state_of_the_compiler(folder: Path) -> None:
    def compile_as_torch_does(name: str) -> Callable[[Any], None]:
        def change(model: Any) -> None:
            compiled = nn.Module.__dict__["compile"]
            compiled = type(compiled)(compiled.__code__, compiled.__globals__, "compiled", (threading.Lock(),))
            compiled._torchdynamo_orig_callable = getattr(sys.modules["key_model"], name)
            model.gate = compiled

        return change

    assert len({_key(compile_as_torch_does(name)) for name in ("before", "other")} | {None}) == 3


def test_a_function_of_the_standard_classes_that_was_replaced_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = proof_key(nn.Linear(4, 4))
    monkeypatch.setattr(nn.Linear, "forward", module_key._is_filled)
    assert proof_key(nn.Linear(4, 4)) not in (before, None)


def test_the_file_of_the_factory_counts_if_it_replaces_a_function(folder: Path) -> None:
    plain, patched = _key(), _key(factory="key_patch")
    _replace("key_patch.py", "return x", "return -x")(folder)
    assert len({plain, patched, _key(factory="key_patch"), None}) == 4


def test_the_file_of_the_factory_counts_if_nothing_in_the_model_is_its_own(folder: Path) -> None:
    before = _key(factory="key_factory")
    _replace("key_factory.py", "make =", "print('another model')\nmake =")(folder)
    assert _key(factory="key_factory") not in (before, None)


def test_a_variable_that_the_code_reads_counts_and_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [_key()]
    for value in ("", "1"):
        monkeypatch.setenv("KEY_INTER", value)
        keys.append(_key())
    monkeypatch.setenv("KEY_OTHER", "1")
    assert len({*keys, None}) == 4 and _key() == keys[-1]


@pytest.mark.parametrize(
    ("code", "variables"),
    [
        ("os.environ['A'], os.environ.get('B', 'x'), os.getenv('C')", ("A", "B", "C")),
        ("getenv('A'), environ.setdefault('B', '1'), 'C' in os.environ, os.environb[b'D']", ("A", "B", "C", "D")),
    ],
)
def test_variables_with_literal_names(code: str, variables: tuple[str, ...]) -> None:
    from motet.train.proof.followed_sources import _parse

    assert _parse(code, "").variables == variables


@pytest.mark.parametrize(
    "code",
    [
        "os.environ[name]",
        "os.getenv('KEY_' + name)",
        "dict(os.environ)",
        "'KEY' in os.environ.keys()",
        "environment = os.environ",
        "from os import environ as variables",
        "exec('x = 1')",
        "importlib.import_module('key_' + 'lazy')",
        "__import__('key_lazy')",
        "from importlib import import_module as load",
    ],
)
def test_code_with_unknown_input_has_no_key(folder: Path, code: str) -> None:
    _replace("key_lazier.py", "    return", f"    {code}\n    return")(folder)
    assert _key() is None


def _made_by_exec(model: Any) -> None:
    values: dict[str, Any] = {"__name__": "key_model"}
    exec("def forward(self, x):\n    return x", values)
    model.forward = values["forward"]


@pytest.mark.parametrize(
    "change",
    [
        _set("other", threading.Lock()),
        _set("other", memoryview(b"values")),
        _set("other", functools.reduce(lambda inner, _: [inner], range(200), [0])),
        lambda model: setattr(type(model), "__module__", "nowhere"),
        _made_by_exec,
    ],
    ids=["a lock", "an object of C", "too deep", "a class without a file", "made by exec"],
)
def test_what_cannot_be_digested_has_no_key(folder: Path, change: Callable[[Any], object]) -> None:
    assert _key() is not None
    assert _key(change) is None


def test_the_key_is_the_same_in_two_processes(folder: Path) -> None:
    code = (
        "import sys, key_model\nfrom torch import nn\nfrom motet.train.proof.module_key import proof_key\n"
        "hooks = [nn.Linear(2, 2).register_forward_hook(print) for _ in range(int(sys.argv[1]))]\n"
        "print(proof_key(key_model.make(), {'tp': 2}, factory='key_model'))"
    )
    path = os.pathsep.join([str(folder), *sys.path])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, seed],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate()[0].strip() for process in processes)
    assert first == second and len(first) == 40
