"""Classes that see each kernel or function of torch are few: another question goes to a mode that is there."""

import ast
from collections.abc import Iterable
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "motet"
MODES = {"TorchDispatchMode", "TorchFunctionMode"}
MOST = 7  # May fall, and never rise


def modes_in(sources: Iterable[str]) -> set[str]:
    """The names of classes that derive from a mode of torch, directly or through others."""
    classes = [node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    bases = {
        node.name: {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases} for node in classes
    }
    modes = set[str]()
    while more := {name for name, of_class in bases.items() if of_class & (MODES | modes)} - modes:
        modes |= more
    return modes


def test_modes_are_counted_through_subclasses() -> None:
    first = "from torch import overrides\nclass A(overrides.TorchFunctionMode): ...\nclass B: ..."
    second = "class Inner(Middle[int]): ...\nclass Middle(B, A): ...\ndef f():\n    class C(TorchDispatchMode): ..."
    assert modes_in([first, second]) == {"A", "Middle", "Inner", "C"}


def test_there_are_few_modes_of_torch() -> None:
    modes = modes_in(path.read_text(encoding="utf-8") for path in SRC.rglob("*.py"))
    assert len(modes) <= MOST, f"{sorted(modes)}: let StorageTracker or InterceptedFunctions call a function instead"
