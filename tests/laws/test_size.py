"""The gate that keeps files and functions small (`make check` runs it over everything) can fail."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "size_gate.py"


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("size_gate", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("", []),
        ("x = 1\n" * 400, []),
        ("x = 1\n" * 401, ["a.py: 401 lines, 400 at most"]),
        ("x = 1\n" * 400 + "y = 2", ["a.py: 401 lines, 400 at most"]),
        ("def f():\n" + "    x = 1\n" * 59, []),
        ("@once\ndef f():\n" + "    x = 1\n" * 60, ["a.py:2 f: 61 lines, 60 at most"]),
        ("class A:\n    async def f(self):\n" + "        x = 1\n" * 60, ["a.py:2 f: 61 lines, 60 at most"]),
    ],
)
def test_the_gate(gate: ModuleType, tmp_path: Path, text: str, complaints: list[str]) -> None:
    (tmp_path / "a.py").write_text(text)
    assert list(gate.too_large(tmp_path / "a.py", tmp_path)) == complaints
