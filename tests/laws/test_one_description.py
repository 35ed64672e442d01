"""One description of each thing: counts of what tells it again, which may fall and never rise."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

parsed = cache(ast.parse)
SRC = Path(__file__).parents[2] / "src" / "motet"
MODES = {"TorchDispatchMode", "TorchFunctionMode"}
MOST_MODES = 7
MOST_COMPARISONS = 9
CLOSE = {"allclose", "assert_close"}
MOST_COMPARATORS = 7  # Two compare with what is right; one fits sums, three find out a property of a module


def modes_in(sources: Iterable[str]) -> set[str]:
    """The names of classes that derive from a mode of torch, directly or through others."""
    classes = [node for text in sources for node in ast.walk(parsed(text)) if isinstance(node, ast.ClassDef)]
    bases = {
        node.name: {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases} for node in classes
    }
    modes = set[str]()
    while more := {name for name, base_names in bases.items() if base_names & (MODES | modes)} - modes:
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
    compared = (node for node in ast.walk(parsed(text)) if isinstance(node, ast.Compare))
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


def functions_of(text: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(parsed(text)) if isinstance(node, ast.FunctionDef)]


def calls_in(node: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Each call, with the last part of the name that is called."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute | ast.Name):
            yield call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id, call


def comparators_in(text: str) -> list[str]:
    """Functions that say how far two tensors are from one another: `allclose`, or a norm or maximum of a difference."""
    return [
        function.name
        for function in functions_of(text)
        if any(
            name in CLOSE or (name == "vector_norm" and any(map(is_difference, ast.walk(call)))) or is_size(call)
            for name, call in calls_in(function)
        )
    ]


def is_difference(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)


def is_size(call: ast.Call) -> bool:
    """A norm or maximum of a difference, after other methods: `(a - b).abs().max()`."""
    function: ast.expr = call.func
    is_method_of_size = isinstance(function, ast.Attribute) and function.attr in ("norm", "max", "amax")
    while isinstance(function, ast.Attribute):
        function = function.value.func if isinstance(function.value, ast.Call) else function.value
    return is_method_of_size and is_difference(function)


def test_comparators_are_counted() -> None:
    lines = ["torch.allclose(a, b)", "(a - b).abs().max()", "norms.vector_norm(f(a - b))", "(a - b).norm()"]
    others = ["a.norm() - b.norm()", "torch.equal(a, b)", "max(a - b, 0)", "f(a - b).abs()"]
    text = "\n".join(f"def f{number}(): return {line}" for number, line in enumerate([*lines, *others]))
    assert comparators_in(text) == ["f0", "f1", "f2", "f3"]


def test_few_functions_compare_tensors() -> None:
    """`distance` (parallel/proof/comparison.py) compares the runs of one process, `relative_distance`
    records, `_largest_difference` the tensors of two checkpoints."""
    comparators = [
        f"{path.name}: {name}"
        for path in SRC.rglob("*.py")
        for name in comparators_in(path.read_text(encoding="utf-8"))
    ]
    assert len(comparators) <= MOST_COMPARATORS, comparators


def layout_parsers_in(sources: Iterable[str]) -> list[str]:
    """Functions from a text to a layout that do not leave its words to another one."""
    candidates = {
        function.name: function
        for text in sources
        for function in functions_of(text)
        if re.search(r"\bLayout(Settings)?\b", ast.unparse(function.returns or ast.Constant("")))
        and any(ast.unparse(each.annotation or each) == "str" for each in function.args.args)
    }
    return [
        name
        for name, function in candidates.items()
        if not {called for called, _ in calls_in(function)} & {*candidates}
    ]


def test_parsers_of_a_layout_are_counted() -> None:
    first = "def a(text: str) -> LayoutSettings: ...\ndef b(rank: int) -> Layout: ..."
    second = "def c(text: str) -> tuple[Layout, int]: return x.a(text), 1\ndef d(words: str) -> list['Layout']: ..."
    assert layout_parsers_in([first, second]) == ["a", "d"]


def test_one_function_parses_layouts() -> None:
    assert layout_parsers_in(path.read_text(encoding="utf-8") for path in SRC.rglob("*.py")) == ["parse_layout"]
