"""Each rule of scripts/source_rules.py reports a planted violation, and nothing in what is right.

`make check` applies the rules to the project.
"""

from collections.abc import Callable, Iterator

import pytest
import source_rules
from source_rules import RULES, Sources

A, B = "src/motet/train/a.py", "src/motet/train/b.py"


def violations(rule: str, files: dict[str, str], exempt: str = "") -> list[str]:
    python = {path: text for path, text in files.items() if path.endswith(".py")}
    pages = {path: text for path, text in files.items() if path.endswith(".md")}
    rules: dict[str, Callable[[Sources], Iterator[str]]] = {each.__name__: each for each in RULES}
    return list(rules[rule](Sources(python, pages, exempt)))


# (rule, files, words of each violation)
CASES: list[tuple[str, dict[str, str], list[str]]] = [
    ("file_lengths", {A: "x = 1\n" * 600}, []),
    ("file_lengths", {A: "x = 1\n" * 601}, [f"{A}: 601 lines"]),
    ("file_lengths", {"tests/a.py": "x = 1\n" * 600 + "y = 2"}, ["601 lines"]),
    ("function_lengths", {A: "def f():\n" + "    x = 1\n" * 59}, []),
    ("function_lengths", {A: "@cache\ndef f():\n" + "    x = 1\n" * 60}, [f"{A}:2 f: 61 lines"]),
    ("function_lengths", {A: "class C:\n    async def f(self):\n" + "        x = 1\n" * 60}, ["C.f: 61 lines"]),
    ("folder_sizes", {f"src/motet/train/m{i}.py": "" for i in range(13)} | {"src/motet/train/__init__.py": ""}, []),
    ("folder_sizes", {f"src/motet/train/m{i}.py": "" for i in range(14)}, ["src/motet/train: 14 modules"]),
    ("unique_class_names", {A: "class C: ...", B: "class D: ...", "tests/c.py": "class C: ..."}, []),
    ("unique_class_names", {A: "class C: ...", B: "def f():\n    class C: ..."}, ["class C is defined 2 times"]),
    ("unique_class_names", {A: "class C:\n    class C: ..."}, [f"{A}:1, {A}:2"]),
    ("unique_file_names", {"src/motet/train/x/a.py": "", "src/motet/data/a.py": "", A: "", B: ""}, ["a.py stands 2"]),
    ("unique_file_names", {"src/motet/data/a.py": "", A: "", "src/motet/train/x/__init__.py": ""}, []),
    ("docstring_starts", {A: '"""The ranks of a step."""\ndef f():\n    """Return it."""'}, []),
    ("docstring_starts", {A: '"""Of a step."""'}, [f"{A}:1 module: the docstring begins with 'Of'"]),
    ("docstring_starts", {A: 'class C:\n    async def f(self):\n        """(where it is)"""'}, ["f: the docstring"]),
    ("banned_words", {A: 'x = "lane"\n"""A stream."""', "docs/a.md": "Run `motet lane`.", "docs/log.md": "desk"}, []),
    ("banned_words", {A: "# a lane\nx = 1  # and a desk"}, [":1: 'lane'", ":2: 'desk'"]),
    ("banned_words", {A: 'raise E(f"rank {n} lacks a value")'}, ["'lacks' is a banned word (lack)"]),
    ("banned_words", {A: 'def f():\n    """A sum.\n\n    Both are sent at\n    once.\n    """'}, [":4: 'at once'"]),
    ("banned_words", {"docs/a.md": "First\n\nAnchors, and so\nmany ranks"}, ["md:3: 'Anchors'", "md:3: 'so many'"]),
    ("banned_words", {"tests/a.py": "# a lane"}, []),
    (
        "paths_on_pages",
        {A: "", "docs/a.md": "`train/a.py`, a.py, src/motet/train/a.py, `motet/`, `train/` and `runs/`"},
        [],
    ),
    (
        "paths_on_pages",
        {A: "", "docs/a.md": "x\n`train/c.py`, `plan/a.py` and [a](../b.py)"},
        ["md:2: there is no file"] * 3,
    ),
    ("paths_on_pages", {A: "", "docs/a.md": "mymodel.py `*.py`", "docs/log.md": "`train/c.py`"}, []),
    ("paths_on_pages", {A: "", "docs/a.md": "`train/x/` `motet/`"}, ["md:1: there is no folder train/x/"]),
    ("paths_on_pages", {A: "", "docs/a.md": "| file in `train/` |\n| `a.py` |\n\n`a.py`"}, []),
    (
        "paths_on_pages",
        {A: "", "src/motet/plan/b.py": "", "docs/a.md": "`b.py`\n| x | file in `train/` |\n|---|---|\n| x | `b.py` |"},
        ["md:4: there is no file train/b.py"],
    ),
    (
        "names_on_pages",
        {
            "src/motet/train/__init__.py": "",
            A: "class Pair:\n    x_y: int = 0",
            "docs/a.md": "`Pair.x_y` `motet.train.a.Pair` `motet.train` `x_y` `word` `a.b_c`",
        },
        [],
    ),
    (
        "names_on_pages",
        {A: "class Pair: ...", "docs/a.md": "`Pair.x_y()`, `motet.train.a.Pear`, `motet.plan`\n`TwoWords` `x_y`"},
        ["1: there is no Pair.x_y", "no motet.train.a.Pear", "no motet.plan", "2: there is no TwoWords", "no x_y"],
    ),
    (
        "names_on_pages",
        {A: "", "docs/log.md": "`TwoWords`", "docs/a.md": "TwoWords `NCCL_ALGO` `x_y = 1`"},
        [],
    ),
    ("headless_phrases", {A: "rank_records = part_of_step = 1  # Bytes of a rank", "tests/a.py": "# Of a rank"}, []),
    ("headless_phrases", {A: "def f(_of_rank): pass", "tests/a.py": "of_step = 1"}, ["_of_rank", "of_step"]),
    ("headless_phrases", {A: "x = 1  # Of the ranks"}, ["a.py:1: the comment"]),
    ("forbidden_locals", {A: "x = [one for one in y]\nz = [a for own, a in y]\nmodel.whole = 1"}, []),
    ("forbidden_locals", {A: "found = 1\nfor own in x: pass\nwith f() as told: pass"}, ["found", "own", "told"]),
    ("forbidden_locals", {A: "def f(a, *, given): pass\ng = lambda mine: 1"}, ["given", "mine"]),
    ("forbidden_locals", {A: "if (one := 1): pass\ntry: pass\nexcept E as there: pass"}, ["one", "there"]),
    ("forbidden_locals", {A: "import x as whole\nmatch x:\n    case [*apart]: pass"}, ["whole", "apart"]),
    ("forbidden_locals", {A: "def f():\n    async def found(): pass\nx, (own, y) = z"}, ["own", "found"]),
    ("functions_named_like_modules", {"src/motet/train/main.py": "def main(): ..."}, []),
    ("functions_named_like_modules", {A: "def c(): ...\nclass C:\n    def b(self): ...", B: ""}, []),
    ("functions_named_like_modules", {A: "", B: "if x:\n    async def a(): ..."}, [f"{B}:2: function a"]),
    (
        "functions_named_like_modules",
        {"src/motet/train/x/c.py": "", A: "def x(): ...\ndef train(): ..."},
        ["x", "train"],
    ),
    ("import_cycles", {A: "import motet.train.b", B: "import motet.core.c", "src/motet/core/c.py": ""}, []),
    (
        "import_cycles",
        {A: "import motet.train.b as b", B: "def f():\n    from motet.train import a"},
        ["a <-> motet.train.b"],
    ),
    ("import_cycles", {A: "from motet.train.b import f", B: "from motet.train.a import *"}, ["import cycle"]),
    ("import_cycles", {A: "if TYPE_CHECKING:\n    import motet.train.b", B: "import motet.train.a"}, ["import cycle"]),
    ("private_torch_names", {A: "import torch\ntorch._C", B: "import torch\ntorch.nn.__name__\nmodel._x"}, []),
    ("private_torch_names", {A: "import torch\ntorch._C", B: "from torch._C import x"}, ["train: private names"]),
    (
        "private_torch_names",
        {A: "import torch.nn as n\nn._x", B: "import torch\ngetattr(torch.nn, '_y')"},
        ["torch.nn._y"],
    ),
    ("private_torch_names", {A: "import torch\nm = torch.nn\nm._x", B: "import torch._dynamo"}, ["torch._dynamo"]),
    ("private_torch_names", {A: "from torch import nn as _n\n_n.x", B: "f('torch._inductor.config')"}, []),
    (
        "private_torch_names",
        {A: "import torch\ntorch._C", B: "f('torch._inductor.config')"},
        ["torch._inductor.config"],
    ),
    ("positional_parameters", {A: "class C:\n    def f(self, a, b, c, *, d, **e): ..."}, []),
    (
        "positional_parameters",
        {A: "class C:\n    async def f(self, a, b, c, d=1): ..."},
        ["C.f: 4 positional parameters"],
    ),
    ("positional_parameters", {A: "@triton.jit\ndef f(a, b, c, d): ..."}, []),
    ("positional_parameters", {A: "@cache\ndef f(a, b, c, d): ..."}, ["f: 4 positional parameters"]),
    ("positional_parameters", {A: "def f():\n    def g(a, b, /, c, d): ..."}, ["f.g: 4 positional parameters"]),
]


@pytest.mark.parametrize(("rule", "files", "words"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_a_rule_reports_what_breaks_it(rule: str, files: dict[str, str], words: list[str]) -> None:
    lines = violations(rule, files)
    assert len(lines) == len(words), lines
    assert all(any(word in line for line in lines) for word in words), lines


def test_every_rule_has_a_case_of_both_kinds() -> None:
    for kind in (True, False):
        assert {rule for rule, _, words in CASES if bool(words) == kind} == {rule.__name__ for rule in RULES}


def test_the_list_of_exemptions_can_only_shrink() -> None:
    files = {A: "def f(a, b, c, d): ...\ndef g(a): ..."}
    assert violations("positional_parameters", files, "# why\nmotet.train.a:f\n") == []
    (line,) = violations("positional_parameters", files, "motet.train.a:f\nmotet.train.a:g\n")
    assert "motet.train.a:g keeps the rule or is gone" in line
    (line,) = violations("positional_parameters", files, "motet.train.a:f\nmotet.train.a:f\n")
    assert "not sorted, or repeat" in line


def test_an_allowed_word_is_allowed_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_rules, "BANNED_WORDS_ALLOWED", {("docs/a.md", "lane"): "SIMD lanes"})
    (line,) = violations("banned_words", {"docs/a.md": "lanes", "docs/b.md": "lanes"})
    assert line.startswith("docs/b.md:1")


def test_an_unknown_rule_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["source_rules.py", "file_length"])
    assert source_rules.main() == 2 and "no rule file_length; there are file_lengths" in capsys.readouterr().out
