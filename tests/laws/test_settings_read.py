"""A setting that nothing reads is a promise that nobody keeps: each one is used by more than its own validation.

That some file reads an attribute of the same name is no proof. It must be read from something that is known to be of
the class that declares it: by an annotation, or because it was assigned from, or is looped over, such a thing.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib import import_module

import pytest
from test_torch_free import FILES

from motet.core.config_loading import FrozenSettings
from motet.parallel.techniques import TECHNIQUES, technique_pairs
from motet.train.config_rules import SETTING_REQUIREMENTS

DECLARING = sorted(name for name, path in FILES.items() if "Settings)" in path.read_text(encoding="utf-8"))
Classes = dict[str, set[str]]
"""Name of something in the code -> names of the classes that it may be of."""


def kinds() -> Iterator[type[FrozenSettings]]:
    todo = [FrozenSettings]
    for name in DECLARING:
        import_module(name)
    while todo:
        subclasses = todo.pop().__subclasses__()
        todo += subclasses
        yield from (kind for kind in subclasses if kind.__module__.startswith("motet."))


def name_of(node: ast.AST) -> str:
    """`schedule` of `job.optimizer.schedule`, `groups` of `settings.groups[0]`, `sources` of `data.sources()`."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def names_in(node: ast.AST | None) -> set[str]:
    inner_nodes = ast.walk(node) if node else ()
    return {name_of(inner) for inner in inner_nodes if isinstance(inner, ast.Name | ast.Attribute)}


def annotations(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, names_in(node.annotation)
        elif isinstance(node, ast.AnnAssign):
            yield name_of(node.target), names_in(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            yield node.name, names_in(node.returns)


def assignments(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(name, name of what it was taken from)"""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                yield from ((name_of(left), name_of(right)) for left, right in pairs)
        elif isinstance(node, ast.For | ast.comprehension):
            yield name_of(node.target), name_of(node.iter)


def reads(tree: ast.AST, known: Classes) -> Iterator[tuple[str, str]]:
    """(class, field) for every attribute that is read; `self` is of the class that it stands in."""
    for node in ast.iter_child_nodes(tree):
        inside = known
        if isinstance(node, ast.ClassDef):
            inside = {**known, "self": {node.name}}
        elif isinstance(node, ast.FunctionDef) and any("validator" in name_of(d) for d in node.decorator_list):
            continue  # it only looks at what it lets pass
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield from ((kind, node.attr) for kind in known.get(name_of(node.value), ()))
        yield from reads(node, inside)


def all_reads(texts: Iterable[str]) -> set[tuple[str, str]]:
    trees = [ast.parse(text) for text in texts]
    aliases = {name_of(n.targets[0]): names_in(n.value) for t in trees for n in t.body if isinstance(n, ast.Assign)}
    shared: Classes = defaultdict(set)  # a field is of its class in whatever file it is read
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for member in node.body:
            if isinstance(member, ast.AnnAssign):
                shared[name_of(member.target)] |= names_in(member.annotation)
            elif isinstance(member, ast.FunctionDef):
                shared[member.name] |= names_in(member.returns)
    found: set[tuple[str, str]] = set()
    for tree in trees:
        known: Classes = defaultdict(set, {name: set(classes) for name, classes in shared.items()})
        for name, classes in annotations(tree):
            known[name] |= classes
        for name, source in [*assignments(tree)] * 2:  # also from what was assigned
            known[name] |= known[source]
        for classes in known.values():
            classes.update(*(aliases.get(name, set()) for name in list(classes)))
        known.pop("", None)
        found.update(reads(tree, known))
    return found


def is_read(kind: type[FrozenSettings], field: str, found: set[tuple[str, str]]) -> bool:
    """Whether the field is read from the class itself, a base class, or a subclass."""
    return any((k.__name__, field) in found for k in kinds() if issubclass(k, kind) or issubclass(kind, k))


def keys_of_what_is_not_built() -> set[str]:
    """Settings that choose a technique whose row of the table refuses it, and those that need one of these."""
    chosen = {next(iter(TECHNIQUES[row])) for row, column, cell in technique_pairs() if row == column and cell == "n"}
    return chosen | {rule.setting for rule in SETTING_REQUIREMENTS if rule.depends_on in chosen}


NOT_BUILT = {key.removeprefix("layout.") for key in keys_of_what_is_not_built()}
READ = all_reads(path.read_text(encoding="utf-8") for path in FILES.values())
CASES = sorted({(k.__name__, f): (k, f) for k in kinds() for f in k.__annotations__ if f in k.model_fields}.items())


@pytest.mark.parametrize(("kind", "field"), [case for _, case in CASES], ids=[".".join(key) for key, _ in CASES])
def test_every_setting_is_read(kind: type[FrozenSettings], field: str) -> None:
    is_refused = kind.__name__ == "LayoutSettings" and field in NOT_BUILT
    assert is_refused or is_read(kind, field, READ), f"nothing reads {field} of {kind.__name__} in {kind.__module__}"


PLANTED = """
class Planted(Settings):
    count: int = 1
    @model_validator(mode="after")
    def _small(self):
        assert self.count < 3
        return self
class Job(Settings):
    planted: Planted
class Other:
    count: int
def f(job: Job, other: Other, planted):
    return other.count + "text".count("e")
"""


@pytest.mark.parametrize(
    ("reader", "found"),
    [
        ("", False),
        ("def g(job: Job): return job.count", False),
        ("def g(job: Job): job.planted.count = 3", False),
        ("def g(planted: Other): return planted.count", True),  # a name is shared: the price of being simple
        ("def g(job: Job): return job.planted.count", True),
        ("def g(p: Planted | None): return p.count", True),
        ("def g(job: Job):\n    a, p = 1, job.planted\n    return p.count", True),
        ("def g(job: Job):\n    mine = job.planted\n    return mine.count", True),
        ("def g(many: list[Planted]): return [one.count for one in many]", True),
    ],
)
def test_a_planted_setting_is_found_unread(reader: str, found: bool) -> None:
    assert (("Planted", "count") in all_reads([PLANTED, reader])) == found
