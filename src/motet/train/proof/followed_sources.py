"""The Python files that code may run: they are read, never imported, and followed by the imports in their text.

A file of an installed package stands for the whole package, by the times and sizes of its files. The standard library,
torch and motet are known by their versions and motet's digest. Torch is not imported here.
"""

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

_INSTALLED = ("site-packages", "dist-packages")
_DIGESTED_OTHERWISE = {"torch", "motet", *sys.stdlib_module_names}
_ENVIRONMENT = ("environ", "environb", "getenv", "getenvb")
# Calls of code that no import statement names
_RUNS_OTHER_CODE = ("exec", "eval")
_IMPORTS_OTHER_CODE = (
    "__import__",
    "import_module",
    "run_path",
    "run_module",
    "spec_from_file_location",
    "exec_module",
)
_MAX_FILES = 1000


class UnknownCodeError(Exception):
    """Something that a proof depends on cannot be digested, so the proof is not kept."""


@dataclass(frozen=True)
class SourceFile:
    """A file of the user's code, and the modules that it imports."""

    text: str
    first_imports: tuple[str, ...]  # Imports that run when the file itself is imported
    later_imports: tuple[str, ...]  # Imports in functions
    variables: tuple[str, ...]  # Environment variables that the file names

    def texts(self) -> Iterator[str]:
        """The text, and the values of the environment variables."""
        yield self.text
        for name in self.variables:
            value = os.environ.get(name)  # noqa: TID251  (the user's code reads it)
            yield f"{name} is {value!r}"


def is_known_by_version(name: str) -> bool:
    """Whether a module is from the standard library, torch or motet."""
    return name.partition(".")[0] in _DIGESTED_OTHERWISE


def is_installed(name: str) -> bool:
    """Whether a module is known without its own text: from the standard library, torch, motet or another package."""
    if is_known_by_version(name):
        return True
    return any(part in _INSTALLED for place in _places(name.partition(".")[0]) for part in Path(place).parts)


def source_of(name: str) -> SourceFile | None:
    """The file of a module that is not installed; None for a folder without code, or if there is no such module."""
    path = next(iter(_places(name)), "")
    if not path:
        return None
    package = getattr(sys.modules.get(name), "__package__", None)
    if package is None:
        package = name if Path(path).name == "__init__.py" else name.rpartition(".")[0]
    try:
        text = Path(path).read_text("utf-8")
        return _parse(text, package)
    except (OSError, ValueError, SyntaxError) as error:  # A compiled module, or a program in an archive
        raise UnknownCodeError(path) from error


def texts_of_sources(first: Iterable[str]) -> list[str]:
    """The files of modules and of all that they import, in the order of their names."""
    texts, packages, waiting = dict[str, list[str]](), set[str](), sorted(first)
    while waiting:
        name = waiting.pop()
        if name in texts:
            continue
        if len(texts) == _MAX_FILES:
            raise UnknownCodeError("too many files")
        if is_installed(name):
            packages.add(name.partition(".")[0])
        else:
            source = source_of(name)
            texts[name] = [] if source is None else [*source.texts()]
            waiting += [] if source is None else [*source.first_imports, *source.later_imports]
    files = [str(stats) for each in sorted(packages) for stats in _package_stats(each)]
    return [text for name in sorted(texts) for text in (name, *texts[name])] + files


def installed_packages() -> list[str]:
    """The names and versions of all packages that Python finds, whatever the order of its folders."""
    folders = {Path(folder).resolve() for folder in sys.path}
    return sorted(
        path.name for folder in folders for kind in ("*.dist-info", "*.egg-info") for path in folder.glob(kind)
    )


def file_stats(files: Iterable[Path]) -> Iterator[tuple[str, int, int]]:
    """Each file with its size and the time of its last change."""
    for file in sorted(files):
        status = file.stat()
        yield str(file), status.st_size, status.st_mtime_ns


def _package_stats(name: str) -> Iterator[tuple[str, int, int]]:
    if is_known_by_version(name):
        return
    try:
        for place in filter(None, _places(name)):
            yield from file_stats(Path(place).rglob("*.py") if Path(place).is_dir() else [Path(place)])
    except OSError as error:
        raise UnknownCodeError(name) from error


def _places(name: str) -> list[str]:
    """The file of a module, which is empty if it has none, and the folders of a package."""
    if (module := sys.modules.get(name)) is not None:
        return [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    spec = _spec(name)
    return [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]


def _spec(name: str) -> ModuleSpec | None:
    """The file that Python would import, found without the import of a parent."""
    spec, places = None, None
    words = name.split(".")
    for end in range(1, len(words) + 1):
        part = ".".join(words[:end])
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        spec = next((spec for find in finders if find and (spec := find(part, places)) is not None), None)
        if spec is None:
            return None
        places = spec.submodule_search_locations
        if places is None and end < len(words):
            return None
    return spec


def _parse(text: str, package: str) -> SourceFile:
    tree = ast.parse(text)
    first, later, variables, literal = set[str](), set[str](), set[str](), set[ast.AST]()
    in_functions = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if (variable := _variable(node)) is not None:
            variables.add(variable[1])
            literal.add(variable[0])
    for node in ast.walk(tree):
        names = [*_imports(node, package)]
        (later if node in in_functions else first).update(names)
        if _hides_its_input(node) and node not in literal:
            raise UnknownCodeError(f"line {getattr(node, 'lineno', 0)}")
    return SourceFile(text, tuple(sorted(first)), tuple(sorted(later - first)), tuple(sorted(variables)))


def _imports(node: ast.AST, package: str) -> Iterator[str]:
    """The modules, with all packages around them, of an import; perhaps also names in a module that are not modules."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".")
        base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
        base = ".".join(filter(None, [base, node.module]))
        names = [base, *(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")]
    else:
        return
    for name in names:
        words = name.split(".")
        yield from (".".join(words[:end]) for end in range(1, len(words) + 1))


def _word(node: ast.AST) -> str | None:
    """The last name of a reference."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def _variable(node: ast.AST) -> tuple[ast.AST, str] | None:
    """The reference to the environment, and the variable, of an expression with a literal name."""
    reference: ast.AST | None = None
    key: ast.AST | None = None
    if isinstance(node, ast.Subscript):
        reference, key = node.value, node.slice
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        reference, key = node.comparators[0], node.left
    elif isinstance(node, ast.Call) and node.args:
        reference, key = node.func, node.args[0]
        if isinstance(reference, ast.Attribute) and _word(reference.value) in _ENVIRONMENT:  # A method of the mapping
            reference = reference.value
    if reference is None or _word(reference) not in _ENVIRONMENT or not isinstance(key, ast.Constant):
        return None
    value = key.value.decode() if isinstance(key.value, bytes) else key.value
    return (reference, value) if isinstance(value, str) else None


def _hides_its_input(node: ast.AST) -> bool:
    """Whether code runs something, or reads a variable of the environment, without naming it in its text."""
    if isinstance(node, ast.ImportFrom):
        renamed = [alias.name for alias in node.names if alias.asname not in (None, alias.name)]
        return any(name in (*_ENVIRONMENT, *_IMPORTS_OTHER_CODE) for name in renamed)
    if isinstance(node, ast.Name) and node.id in _RUNS_OTHER_CODE:
        return True
    return _word(node) in (*_ENVIRONMENT, *_IMPORTS_OTHER_CODE)
