"""One-place changes of the source, made by machine: each is a mistake that a person could have typed."""

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], str]] = {
    ast.Lt: (ast.LtE, "<="),
    ast.LtE: (ast.Lt, "<"),
    ast.Gt: (ast.GtE, ">="),
    ast.GtE: (ast.Gt, ">"),
    ast.Eq: (ast.NotEq, "!="),
    ast.NotEq: (ast.Eq, "=="),
    ast.In: (ast.NotIn, "not in"),
    ast.NotIn: (ast.In, "in"),
    ast.Is: (ast.IsNot, "is not"),
    ast.IsNot: (ast.Is, "is"),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@dataclass(frozen=True)
class Mutant:
    """One expression or statement of one file, and its replacement."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str

    def apply(self, root: Path) -> None:
        """Write the changed file, after a look whether the text is still the one that the mutant was made from."""
        path = root / self.file
        source = path.read_bytes()
        start, end = self.span(source)
        if source[start:end].decode() != self.before:
            raise ValueError(f"{self.file}:{self.line} is no longer {self.before!r}: make the mutants again")
        path.write_bytes(source[:start] + self.after.encode() + source[end:])

    def span(self, source: bytes) -> tuple[int, int]:
        return _position(source, self.line, self.column), _position(source, self.end_line, self.end_column)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {_short(self.before)} -> {_short(self.after)}"


def _position(source: bytes, line: int, column: int) -> int:
    return sum(map(len, source.splitlines(keepends=True)[: line - 1])) + column


def _short(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= 60 else one_line[:57] + "..."


PROBES = """
import os

_written = set()


def reached(number):
    row = f"{number}\\t{os.environ.get('PYTEST_CURRENT_TEST', '')}\\n"
    if row not in _written:
        _written.add(row)
        with open(f"FOLDER/{os.getpid()}", "a") as file:
            file.write(row)
"""
"""The module that a probe calls; FOLDER is the place of the record, with a file for each process."""


def put_probes(root: Path, mutants: Sequence[Mutant], folder: Path) -> None:
    """Have the place of each mutant write its number and the test, when it is evaluated; where this is at import, every
    function of its file does."""
    (root / "src/reached_mutants.py").write_text(PROBES.replace("FOLDER", str(folder)))
    for file in {mutant.file for mutant in mutants}:
        source = (root / file).read_bytes()
        tree = ast.parse(source)
        inserted: list[tuple[int, int, bytes]] = []
        for number, mutant in enumerate(mutants):
            if mutant.file == file:
                inserted += _probe(mutant, number, source, tree)
        for place, _, text in sorted(inserted, reverse=True):
            source = source[:place] + text + source[place:]
        ast.parse(source)
        (root / file).write_bytes(source)


def _probe(mutant: Mutant, number: int, source: bytes, tree: ast.Module) -> Iterator[tuple[int, int, bytes]]:
    """Insertions (place, order, text): a call before a statement, or `(call or expression)`, inner ones inside."""
    call = f"__import__('reached_mutants').reached({number})"
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    if not any(node.body[0].lineno <= mutant.line <= (node.end_lineno or 0) for node in functions):
        for node in functions:
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            line = min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", []))])
            start = _position(source, line, first.col_offset)
            yield start, number, f"{call}\n{' ' * first.col_offset}".encode()
        return
    start, end = mutant.span(source)
    if not mutant.after.startswith(("pass", "return ")):
        yield start, -(end - start), f"({call} or (".encode()
        yield end, end - start, b"))"
    else:
        yield start, -(1 << 30), f"{call}; ".encode()


def sample(root: Path, folder: str, count: int, seed: int) -> list[Mutant]:
    """`count` mutants, drawn evenly from every place of the folder that can be changed."""
    files = sorted((root / folder).rglob("*.py"))
    every = [mutant for file in files for mutant in mutants_of(str(file.relative_to(root)), file.read_text())]
    return sorted(random.Random(seed).sample(every, count), key=lambda one: (one.file, one.line, one.column))


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Every mutant of one file: those of annotations, docstrings and messages of errors left out."""
    tree, text = ast.parse(source), source.encode()
    starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    skipped = {id(inner) for node in _texts_and_types(tree) for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, (ast.expr, ast.stmt)):
            continue
        for after in _replacements(node):
            assert node.end_lineno is not None and node.end_col_offset is not None
            place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
            start, end = starts[place[0] - 1] + place[1], starts[place[2] - 1] + place[3]
            before = text[start:end].decode()
            if after != before:
                found.append(Mutant(file, *place, before, after))
    return found


def _texts_and_types(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes in which a change does not affect behaviour: types, texts, imports, messages of errors."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.pattern)):
            yield node
        elif isinstance(node, ast.AnnAssign) or (isinstance(node, ast.arg) and node.annotation is not None):
            yield node.annotation
        elif isinstance(node, ast.FunctionDef):
            yield from filter(None, [node.returns, *node.decorator_list])
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id[0].isupper():
            yield node  # an alias of a type
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node


def _replacements(node: ast.expr | ast.stmt) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[operator]):
            other = COMPARISONS[type(operator)][0]
            yield ast.unparse(ast.Compare(node.left, [other()], node.comparators))
        case ast.BoolOp():
            other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield f"({ast.unparse(ast.BoolOp(other_op, node.values))})"
        case ast.BinOp() if type(node.op) in OPERATORS and not isinstance(node.left, (ast.List, ast.Constant)):
            yield f"({ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))})"
        case ast.UnaryOp(op=ast.Not()):
            yield f"({ast.unparse(node.operand)})"
        case ast.Constant(value=int()):
            yield str(not node.value if isinstance(node.value, bool) else node.value + 1)
        case ast.IfExp():
            yield f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "pass"
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            yield "return None"
