"""One description of each thing: counts of what tells it again, which may fall and never rise."""

import ast
from collections.abc import Iterable
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "motet"
MODES = {"TorchDispatchMode", "TorchFunctionMode"}
MOST_MODES = 7
MOST_COMPARISONS = 9


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
    assert len(modes) <= MOST_MODES, (
        f"{sorted(modes)}: let StorageTracker or InterceptedFunctions call a function instead"
    )


def comparisons_with_zero(text: str) -> list[str]:
    """Comparisons with the number of a stage of ZeRO, by their source."""
    compared = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Compare))
    return [
        ast.unparse(node)
        for node in compared
        if any(ast.unparse(each).rpartition(".")[2] == "zero" for each in (node.left, *node.comparators))
    ]


def test_comparisons_are_counted_in_any_order() -> None:
    text = "a = layout.zero == 3 and 2 < zero\nif 0 <= zero < 4 or is_zero == 1 or layout.zero:\n    pass"
    assert comparisons_with_zero(text) == ["layout.zero == 3", "2 < zero", "0 <= zero < 4"]


def test_few_places_compare_the_number_of_a_stage() -> None:
    """The table ZERO_STAGES says what a stage does; `sharded_states` and `stage_actions` read it."""
    texts = [path.read_text(encoding="utf-8") for path in SRC.rglob("*.py")]
    compared = [each for text in texts for each in comparisons_with_zero(text)]
    assert len(compared) <= MOST_COMPARISONS, compared
