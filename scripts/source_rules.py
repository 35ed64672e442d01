"""The rules of names, folders, prose and size that `make check` enforces; docs/glossary.md has the words.

Each rule is a function from `Sources` to lines of text, one for each violation. The script exits with 1 and prints
them all if there are any. tests/laws/test_source_rules.py plants a violation of each rule.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
PACKAGE = "src/motet"
FOLDERS = ("src", "tests", "scripts", "benchmarks")
FILE_LINES = 600
FUNCTION_LINES = 60
FOLDER_MODULES = 13
POSITIONAL_PARAMETERS = 3

# Functions with more positional parameters than are allowed. The list may only shrink.
POSITIONAL_EXEMPT_FILE = Path(__file__).with_name("positional_exempt.txt")

DOCSTRING_STARTS = frozenset(
    ["Of", "That", "Those", "What", "Who", "By", "In", "As", "With", "To", "For", "From", "Where", "And"]
)

FORBIDDEN_LOCALS = frozenset(["found", "given", "told", "there", "one", "own", "mine", "whole", "apart"])

# Each pattern is matched as whole words, in any case, in docs, docstrings, comments and messages.
BANNED_WORDS = {
    "mend": r"mend(s|ed|ing)?",
    "bear": r"bear(s|ing)?|bore|borne",
    "told of": r"(told|tells?|telling) of",
    "lane": r"lanes?",
    "desk": r"desks?",
    "office": r"offices?",
    "keeper": r"keepers?",
    "shelf": r"shelf|shelves",
    "attendant": r"attendants?",
    "meeting": r"meetings?",
    "anchor": r"anchors?",
    "as it is": r"as (it is|they are)",
    "so many": r"so many",
    "what has become of": r"what (has|have|had) become of",
    "those that": r"those (that|which|who)",
    "of one's own": r"of (one's|its|their|your|his|our|my) own",
    "at once": r"at once",
    "lack": r"lack(s|ed|ing)?",
    "judge": r"judg(e|es|ed|ing|ement|ements|ment|ments)",
    "apart": r"apart",
    "beside": r"beside",
    "what as a noun": r"(than|by|from|into|as) what",
}
_SPACE = r"(?:[ \t]+|[ \t]*\n[ \t]*)"  # A phrase may go on in the next line
_BANNED = {
    word: re.compile(rf"\b(?:{pattern.replace(' ', _SPACE)})\b", re.IGNORECASE)
    for word, pattern in BANNED_WORDS.items()
}

# (path pattern, banned word) -> why that text may say it.
BANNED_WORDS_ALLOWED: dict[tuple[str, str], str] = {
    ("src/motet/core/svg.py", "anchor"): "text-anchor is a property of SVG",
    ("docs/reference/cluster.md", "lane"): "PCIe lanes are the hardware's word",
}

# Pages that are a record of the past.
RECORDS = ("CHANGELOG.md", "docs/log.md")
# Banned words may stand there, and in the list that has the field's words for them.
UNCHECKED_PAGES = (*RECORDS, "docs/glossary.md")

# (page pattern, path) -> why the page may name a Python file that is not in the project.
FOREIGN_PATHS: dict[tuple[str, str], str] = {
    ("*", "mymodel.py"): "a file of the reader, as are the next ones",
    ("docs/guide/*", "classify.py"): "",
    ("docs/guide/one-matmul.md", "line.py"): "",
    ("docs/guide/one-matmul.md", "kernel.py"): "",
    ("docs/guide/*", "model.py"): "",
    ("docs/guide/hugging-face.md", "lora.py"): "",
    ("docs/guide/coming-from.md", "pretrain_gpt.py"): "a file of Megatron",
    ("docs/guide/symptoms.md", "torch/autograd/graph.py"): "a file of torch",
    ("docs/reference/bad-input.md", "models.py"): "a file of the reader",
    ("docs/reference/tensor-parallel-families.md", "modeling_bloom.py"): "a file of transformers",
    ("docs/reference/tensor-parallel-families.md", "modeling_olmo2.py"): "a file of transformers",
    ("docs/reference/context-parallel-families.md", "modeling_xglm.py"): "a file of transformers",
    ("docs/benchmarks/mutations.md", "*"): "the page names the commit that was measured",
}
# Settings of torchtitan, Megatron, DeepSpeed, transformers and Accelerate.
_SETTINGS_OF_OTHERS = """FULL_SHARD HYBRID_SHARD PipelineModule SHARD_GRAD_OP activation_checkpointing
data_parallel_replicate_degree data_parallel_shard_degree fsdp_config global_batch_size gradient_checkpointing
local_batch_size mixed_precision_param num_train_epochs pipeline_parallel_degree pipeline_parallel_schedule
resume_from_checkpoint save_total_limit tensor_parallel_degree tp_plan train_batch_size zero_hpz_partition_size"""
# Name -> whose it is, where no Python file of the project has it.
FOREIGN_NAMES = {
    "NCCL_ALGO": "an environment variable of NCCL",
    "NCCL_PROTO": "an environment variable of NCCL",
    "HCCL_ALGO": "an environment variable of Ascend's library",
    "static_graph": "a setting of DistributedDataParallel",
    "trust_remote_code": "a setting of transformers",
    **dict.fromkeys(_SETTINGS_OF_OTHERS.split(), "a setting of another framework"),
    "reduce_scatter_bytes": "a counter whose name the collective begins",
}


class Sources:
    """The text of every Python file and page that the rules look at, by its path from the root."""

    def __init__(self, python: dict[str, str], pages: dict[str, str], positional_exempt: str = "") -> None:
        self.python = python
        self.pages = pages
        self.positional_exempt = [line for line in positional_exempt.splitlines() if line and line[0] != "#"]
        self.trees = {path: ast.parse(text) for path, text in python.items()}
        self.product = {path: tree for path, tree in self.trees.items() if path.startswith(f"{PACKAGE}/")}


def read_sources(root: Path = ROOT) -> Sources:
    """Every Python file of the project, and every page of its docs."""
    python = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]

    def texts(paths: list[Path]) -> dict[str, str]:
        return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}

    return Sources(texts(python), texts(pages), POSITIONAL_EXEMPT_FILE.read_text(encoding="utf-8"))


def _top_package(path: str) -> str:
    """`src/motet/train/launch/entry.py` -> `train`."""
    parts = PurePosixPath(path).relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def file_lengths(sources: Sources) -> Iterator[str]:
    for path, text in sources.python.items():
        lines = text.count("\n") + (not text.endswith("\n") and text != "")
        if lines > FILE_LINES:
            yield f"{path}: {lines} lines, {FILE_LINES} at most"


def function_lengths(sources: Sources) -> Iterator[str]:
    for path, tree in sources.trees.items():
        for name, node in _qualified_functions(tree, ""):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{path}:{node.lineno} {name}: {length} lines, {FUNCTION_LINES} at most"


def folder_sizes(sources: Sources) -> Iterator[str]:
    modules: dict[str, int] = defaultdict(int)
    for path in sources.product:
        if not path.endswith("/__init__.py"):
            modules[path.rpartition("/")[0]] += 1
    for folder, count in sorted(modules.items()):
        if count > FOLDER_MODULES:
            yield f"{folder}: {count} modules, {FOLDER_MODULES} at most; make a sub-package"


def unique_class_names(sources: Sources) -> Iterator[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in sources.product.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield f"class {name} is defined {len(where)} times: {', '.join(where)}"


def unique_file_names(sources: Sources) -> Iterator[str]:
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sources.product:
        name = path.rpartition("/")[2]
        if name not in ("__init__.py", "__main__.py"):
            places[_top_package(path), name].append(path)
    for (package, name), where in sorted(places.items()):
        if len(where) > 1:
            yield f"{name} stands {len(where)} times in {package or 'motet'}: {', '.join(where)}"


def docstring_starts(sources: Sources) -> Iterator[str]:
    for path, tree in sources.trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            words = (ast.get_docstring(node) or "").split()
            if words and words[0].strip("\"'(),.:;`*").capitalize() in DOCSTRING_STARTS:
                name = getattr(node, "name", "module")
                line = getattr(node, "lineno", 1)
                yield f"{path}:{line} {name}: the docstring begins with {words[0]!r}; write a sentence or a noun phrase"


def banned_words(sources: Sources) -> Iterator[str]:
    """Pages, comments, docstrings, and strings of more than one word; a string of one word is a name."""
    for path, text in sources.pages.items():
        if path not in UNCHECKED_PAGES:
            yield from _banned_in(path, 1, text)
    for path, tree in sources.product.items():
        lines = sources.python[path].splitlines()
        comments = (re.search(r"(?:^|\s)#\s(.*)", line) for line in lines)
        yield from _banned_in(path, 1, "\n".join(comment[1] if comment else "" for comment in comments))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
                yield from _banned_in(path, node.lineno, node.value)


def _banned_in(path: str, first_line: int, text: str) -> Iterator[str]:
    prose = re.sub(r"`[^`\n]*`", "``", text)
    for word, pattern in _BANNED.items():
        if not any(PurePosixPath(path).match(allowed) and word == banned for allowed, banned in BANNED_WORDS_ALLOWED):
            for match in pattern.finditer(prose):
                line = first_line + prose.count("\n", 0, match.start())
                said = " ".join(match[0].split())
                yield f"{path}:{line}: {said!r} is a banned word ({word}); docs/glossary.md has the field's"


def paths_on_pages(sources: Sources) -> Iterator[str]:
    """Python files, and folders of the project, that a page names by the end of their path."""
    folders = {path.rpartition("/")[0] for path in sources.python}
    folders |= {parent.as_posix() for folder in folders for parent in PurePosixPath(folder).parents}
    first_parts = {*FOLDERS, *(_top_package(path) for path in sources.product)} - {""}
    for page, line_number, line, folder_of_table in _lines_of_pages(sources):
        for file in re.findall(r"(?<![\w/.*-])[\w./-]*\w\.py\b", line):
            is_in_table = folder_of_table and "/" not in file and f"| `{file}`" in line
            path = f"{folder_of_table}/{file}" if is_in_table else file
            is_foreign = any(PurePosixPath(page).match(p) and PurePosixPath(path).match(f) for p, f in FOREIGN_PATHS)
            if not is_foreign and not _ends_one_of(sources.python, path):
                yield f"{page}:{line_number}: there is no file {path}"
        for folder in re.findall(r"`([\w/-]+)/`", line):
            if folder.partition("/")[0] in first_parts and not _ends_one_of(folders, folder):
                yield f"{page}:{line_number}: there is no folder {folder}/"


def _ends_one_of(paths: Iterable[str], end: str) -> bool:
    return any(f"/{path}".endswith(f"/{end}") for path in paths)


def _lines_of_pages(sources: Sources) -> Iterator[tuple[str, int, str, str]]:
    """Each line of the pages that are not records: page, number, text, and the folder that heads its table."""
    for page, text in sources.pages.items():
        folder = ""
        for number, line in enumerate(text.splitlines(), 1):
            header = re.match(r"\|.*\| file in `([\w/]+)/`", f"|{line}")
            folder = header[1] if header else folder if line.startswith("|") else ""
            if page not in RECORDS:
                yield page, number, line, folder


def names_on_pages(sources: Sources) -> Iterator[str]:
    """Names in inline code: `motet.a.b`, `Class.attribute`, `ClassName` and `some_name` stand in the project's code."""
    names_by_file = {path: set(_identifiers(tree)) for path, tree in sources.trees.items()}
    modules = {_module_name(path): names_by_file[path] for path in sources.product}
    class_files = {
        node.name: path
        for path, tree in sources.product.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    known = {*FOREIGN_NAMES}.union(*names_by_file.values())
    for page, line_number, line, _ in _lines_of_pages(sources):
        for name in re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\([^`]*\))?`", line):
            first, *others = name.split(".")
            if first == "motet":
                owner = next(module for module in _parents(name) if module in modules or module == "motet")
                rest = name.removeprefix(owner).split(".")[1:]
                is_known = not rest or rest[0] in modules.get(owner, ())
            elif first in class_files and others:
                is_known = others[0] in modules[_module_name(class_files[first])]
            else:
                is_compound = "_" in name.strip("_") or re.fullmatch(r"_?([A-Z][a-z0-9]+){2,}", first)
                is_known = first in known or bool(others) or not is_compound
            if not is_known:
                yield f"{page}:{line_number}: there is no {name}"


def _parents(name: str) -> Iterator[str]:
    """`a.b.c` -> `a.b.c`, `a.b`, `a`."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _identifiers(tree: ast.AST) -> Iterator[str]:
    """Every name of a file, and strings that are names."""
    for node in ast.walk(tree):
        for attribute in ("name", "id", "attr", "arg", "asname", "module"):
            if isinstance(value := getattr(node, attribute, None), str):
                yield from value.split(".")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            yield from node.value.split(".")


def forbidden_locals(sources: Sources) -> Iterator[str]:
    for path, tree in sources.product.items():
        in_comprehensions = {
            name for node in ast.walk(tree) if isinstance(node, ast.comprehension) for name in ast.walk(node.target)
        }
        for node in ast.walk(tree):
            names = [] if node in in_comprehensions else _bound_names(node)
            for name in FORBIDDEN_LOCALS.intersection(names):
                line = getattr(node, "lineno", 1)
                yield f"{path}:{line}: a local is named {name!r}; name it after what it holds"


def headless_phrases(sources: Sources) -> Iterator[str]:
    """Names and comments that begin with "of" leave out their noun."""
    for path, tree in sources.trees.items():
        for node in ast.walk(tree):
            for name in _bound_names(node):
                if name and name.lstrip("_").startswith("of_"):
                    line = getattr(node, "lineno", 1)
                    yield f"{path}:{line}: the name {name!r} has no noun; name the thing, as in rank_records"
    for path in sources.product:
        for line, text in enumerate(sources.python[path].splitlines(), 1):
            if re.search(r"(?:^|\s)# Of [a-z]", text):
                yield f"{path}:{line}: the comment begins with 'Of'; write the noun first"


def _bound_names(node: ast.AST) -> list[str | None]:
    """The names that a node binds itself: targets of all kinds, parameters, `as` names, functions and classes."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
            return [name]
        case ast.MatchMapping(rest=name) | ast.alias(asname=name):
            return [name]
    return []


def functions_named_like_modules(sources: Sources) -> Iterator[str]:
    modules: dict[str, set[str]] = defaultdict(set)
    for path in sources.product:
        parts = PurePosixPath(path).with_suffix("").parts
        if parts[-1] != "__init__":
            modules["/".join(parts[:-1])].add(parts[-1])
        for depth in range(2, len(parts) - 1):
            modules["/".join(parts[:depth])].add(parts[depth])
    for path, tree in sources.product.items():
        folder = path.rpartition("/")[0]
        names = modules[folder] | {folder.rpartition("/")[2]}
        for name, node in _qualified_functions(tree, ""):
            if name in names and name != "main":  # the usual name of an entry point
                yield f"{path}:{node.lineno}: function {node.name} has the name of a module or package beside it"


def import_cycles(sources: Sources) -> Iterator[str]:
    """Imports of a module by another, wherever they stand: inside functions and under TYPE_CHECKING too."""
    modules = {_module_name(path): tree for path, tree in sources.product.items()}
    graph = {name: set(_imported(name, tree, modules)) for name, tree in modules.items()}
    for cycle in _strongly_connected(graph):
        yield f"import cycle: {' <-> '.join(sorted(cycle))}"


def _module_name(path: str) -> str:
    parts = PurePosixPath(path).relative_to("src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(importer: str, tree: ast.Module, modules: dict[str, ast.Module]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in submodules]
        else:
            continue
        yield from (name for name in names if name in modules and name != importer)


def _strongly_connected(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of more than one module that all reach one another (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], index[other])
        if lowest[name] == index[name]:
            start = stack.index(name)
            if len(stack) - start > 1:
                groups.append(stack[start:])
            del stack[start:]

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return groups


def private_torch_names(sources: Sources) -> Iterator[str]:
    """A package that needs private names of torch keeps them in one file, where a new version of torch is looked at."""
    users: dict[str, dict[str, str]] = defaultdict(dict)
    for path, tree in sources.product.items():
        for name in _private_torch(tree):
            users[_top_package(path)].setdefault(path, name)
    for package, files in sorted(users.items()):
        if len(files) > 1:
            places = ", ".join(f"{path} ({name})" for path, name in sorted(files.items()))
            yield f"{package}: private names of torch stand in {len(files)} files, one is allowed: {places}"


def _private_torch(tree: ast.Module) -> Iterator[str]:
    names = [dotted for _, dotted in _torch_imports(tree)]
    aliases = {alias: dotted for alias, dotted in _torch_imports(tree) if alias}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            dotted = _resolve(node.value, aliases)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            aliases |= {target.id: dotted for target in targets if dotted and isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.append(_resolve(node, aliases))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            owner, name = _resolve(node.args[0], aliases), node.args[1]
            if owner and isinstance(name, ast.Constant):
                names.append(f"{owner}.{name.value}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names += re.findall(r"^torch(?:\.\w+)+$", node.value)
    yield from filter(_is_private, names)


def _resolve(node: ast.expr, aliases: dict[str, str]) -> str:
    """The dotted name of torch that an expression stands for, or an empty text."""
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, aliases)
        return owner and f"{owner}.{node.attr}"
    return aliases.get(node.id, "") if isinstance(node, ast.Name) else ""


def _torch_imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each name that an import of torch binds, and the name of torch that it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    yield alias.asname or "", alias.name
                    yield "torch", "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def positional_parameters(sources: Sources) -> Iterator[str]:
    """A function takes at most three parameters by position, beyond `self`; the caller names the others. Triton knows
    no other parameters than those by position."""
    unused_exemptions = dict.fromkeys(sources.positional_exempt)
    if sources.positional_exempt != sorted(unused_exemptions):
        yield f"{POSITIONAL_EXEMPT_FILE.name}: the lines are not sorted, or repeat"
    for path, tree in sources.product.items():
        for name, node in _qualified_functions(tree, ""):
            parameters = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
            count = len(parameters) - (parameters[:1] in (["self"], ["cls"]))
            is_kernel = any(ast.unparse(each) == "triton.jit" for each in node.decorator_list)
            if count > POSITIONAL_PARAMETERS and not is_kernel:
                qualified = f"{_module_name(path)}:{name}"
                unused_exemptions.pop(qualified, None)
                if qualified not in sources.positional_exempt:
                    yield f"{path}:{node.lineno} {name}: {count} positional parameters, {POSITIONAL_PARAMETERS} at most"
    for qualified in unused_exemptions:
        yield f"{POSITIONAL_EXEMPT_FILE.name}: {qualified} keeps the rule or is gone; remove its line"


def _qualified_functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
            yield from _qualified_functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from _qualified_functions(node, f"{prefix}{node.name}.")
        else:
            yield from _qualified_functions(node, prefix)


RULES: tuple[Callable[[Sources], Iterator[str]], ...] = (
    file_lengths,
    function_lengths,
    folder_sizes,
    unique_class_names,
    unique_file_names,
    docstring_starts,
    banned_words,
    paths_on_pages,
    names_on_pages,
    forbidden_locals,
    headless_phrases,
    functions_named_like_modules,
    import_cycles,
    private_torch_names,
    positional_parameters,
)


def main() -> int:
    names = {rule.__name__: rule for rule in RULES}
    if unknown := set(sys.argv[1:]) - set(names):
        print(f"no rule {', '.join(sorted(unknown))}; there are {', '.join(names)}")
        return 2
    sources = read_sources()
    chosen = [rule for name, rule in names.items() if name in (sys.argv[1:] or names)]
    violations = {rule.__name__: list(rule(sources)) for rule in chosen}
    for rule, lines in violations.items():
        for line in lines:
            print(f"{line}   [{rule}]")
    if any(violations.values()):
        print(", ".join(f"{rule}: {len(lines)}" for rule, lines in violations.items() if lines))
        return 1
    print(f"{len(sources.python)} Python files and {len(sources.pages)} pages keep {len(chosen)} rules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
