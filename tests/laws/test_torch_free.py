"""The pure halves stay pure: `torch_free.txt` lists exactly the files that can be imported without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from golden import FOLDER, compare

SRC = Path(__file__).parents[2] / "src"


def name_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted((SRC / "motet").rglob("*.py"))}


@cache
def imported(path: Path) -> set[str]:
    """Names of the modules that are imported when the file is: not those that a function imports when called."""
    found: set[str] = set()
    for node in at_import(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def at_import(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from at_import(ast.Module([other], []))
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from at_import(child)


@cache
def reached(name: str) -> frozenset[str]:
    """All modules of motet that importing one of them imports, with the packages that they lie in."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        module = todo.pop()
        if module in FILES and module not in seen:
            seen.add(module)
            todo += [*imported(FILES[module]), module.rpartition(".")[0]]
    return frozenset(seen)


def needs_torch(name: str) -> bool:
    return any(module.split(".")[0] == "torch" for inner in reached(name) for module in imported(FILES[inner]))


def in_fresh_interpreter(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_list_is_exactly_the_files_that_need_no_torch(regenerate: bool) -> None:
    pure = [path for name, path in FILES.items() if not needs_torch(name)]
    compare("torch_free.txt", "".join(f"src/{path.relative_to(SRC)}\n" for path in pure), regenerate)


def test_importing_all_of_them_loads_no_torch() -> None:
    listed = (FOLDER / "torch_free.txt").read_text().split()
    names = [name_of(SRC.parent / line) for line in listed]
    names.remove("motet.__main__")  # importing it runs the command
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {{name}} loads torch")
print("pure")
"""
    assert in_fresh_interpreter(code) == "pure"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["train", "--print-job"]])
def test_commands_that_compute_nothing_load_no_torch(arguments: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["motet", *{arguments!r}]
from motet.cli.main import main
try:
    main()
except SystemExit as done:
    assert not done.code
print("torch" if "torch" in sys.modules else "pure")
"""
    assert in_fresh_interpreter(code).splitlines()[-1] == "pure"


def test_a_package_does_not_reach_further_than_its_parts() -> None:
    """The walk itself: a file of the torch half is seen as such, through others too."""
    assert needs_torch("motet.parallel.process.process_group")
    assert not needs_torch("motet.parallel.process.launch_environment") and needs_torch("motet.train.build")
    assert "motet.core.errors" in reached("motet.train.launch.run_folder")


_HEAVY = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "sympy", "transformers", "tokenizers")


@pytest.mark.parametrize("module", ["motet.cli.show.layout_report", "motet.train.proof.proposed_sharding"])
def test_layouts_are_shown_without_the_engine_and_what_it_needs(module: str) -> None:
    """Each of these takes as long to import as torch, or much of it."""
    code = f"""
import importlib, sys
importlib.import_module({module!r})
print(*[name for name in (*{_HEAVY!r}, "pyarrow", "matplotlib", "motet.train.engine") if name in sys.modules])
"""
    assert in_fresh_interpreter(code) == ""
