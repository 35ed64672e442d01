"""The page docs/code-of-one-step.md: the files that a step, its set-up and a short run enter, traced on CPU ranks.

A profile function notes each function of motet that the main thread enters. Backward is among them, since autograd
runs it on a CPU in the thread that calls it. Bodies of modules that are imported on the way are left out, with all of
their calls. So a walk does not depend on earlier imports.
"""

import ast
import functools
import gc
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from pages import ROOT, import_from_tests, markdown_table

if TYPE_CHECKING:
    from motet.parallel.process.launch_environment import RankEnvironment
    from motet.parallel.process.process_group import RankGroup
    from ranks import Ranks

PAGE = "code-of-one-step.md"
SOURCE = ROOT / "src/motet"
LAYOUT, RANKS, TRACED_STEP = ("layout.zero=2", "layout.tp=2"), 4, 2
LIMIT_S = 300.0  # Four processes import the engine, on a machine that may do other work
INTRODUCTION = """\
# The code of one step

A step of training enters {step} of about {all_files} files of motet. This page lists them in the order of first entry,
with the first sentence of each file. `python scripts/docs.py {page}` traces the run and writes the page; a test
compares the page with a new trace.

The run has {ranks} CPU ranks in the layout `tp=2 zero=2`: two ranks share each layer of a small decoder, and two such
pairs divide the batch. Rank 0 traces its step {number}, without the loop around it; what runs once, in the first steps,
is not in it. Collectives are those of gloo; with the backend `motet` they go on in `collectives/shm_backend/`.
[Architecture](architecture.md) says how the parts fit together, and its walks name the functions on the way of a
gradient or a batch.

## The step

*During* is the span of `events.jsonl` in which the file is entered first, and *enters at* the first function that runs.

"""
SETUP = """
## Its set-up

Before the first step, rank 0 makes the data and the model, proves the split of its layers, plans the steps, checks the
memory and makes the engine. It enters {setup} files; these {more} are not in the step:

"""
FIRST_LOSS = """
## A run on one rank, to its first loss

`motet.run` with one rank enters {run} files before it reports the first loss; these {more} are in neither list:

"""


# Parts of the qualified names of functions; Python 3.12 enters no comprehension.
_COMPREHENSIONS = re.compile(r"\.<(locals|listcomp|setcomp|dictcomp|genexpr)>")


class EnteredFile(NamedTuple):
    """A file of src/motet in a walk."""

    path: str
    span: str  # The innermost open span at the first entry
    function: str  # The first function that is entered


@dataclass
class Walk:
    """The files and functions of motet that a thread enters, in order."""

    files: dict[str, EnteredFile] = field(default_factory=dict)
    functions: set[tuple[str, str]] = field(default_factory=set)  # (path, qualified name)
    _spans: list[str] = field(default_factory=list)
    _running_imports: int = 0

    @contextmanager
    def trace(self) -> Iterator[None]:
        """Trace this thread. Finalizers run where the garbage collector finds work, so it has none inside."""
        from motet.core import trace

        assert Path(trace.__file__).is_relative_to(SOURCE), f"{trace.__file__} is not traced"
        gc.collect()
        gc.disable()
        try:
            with trace.install_sink(self), trace.profiler_ranges(self._open_span):
                sys.setprofile(self._on_profile_event)
                yield
        finally:
            self.stop()
            gc.enable()

    def stop(self) -> None:
        """End the trace, inside of the block or at its end."""
        sys.setprofile(None)

    def on_span(self, *ended: Any) -> None:
        """Do nothing: `_open_span` follows the spans."""

    def on_count(self, *counted: Any) -> None:
        """Do nothing."""

    @contextmanager
    def _open_span(self, action: str) -> Iterator[None]:
        self._spans.append(action)
        yield
        self._spans.pop()

    def _on_profile_event(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_name == "<module>" and event in ("call", "return"):
            self._running_imports += 1 if event == "call" else -1
        elif event == "call" and not self._running_imports and code.co_filename.startswith(f"{SOURCE}/"):
            path, name = code.co_filename.removeprefix(f"{SOURCE}/"), _COMPREHENSIONS.sub("", code.co_qualname)
            if not path.endswith("__init__.py"):
                span = self._spans[-1] if self._spans else ""
                self.files.setdefault(path, EnteredFile(path, span, name))
                self.functions.add((path, name))


class Walks(NamedTuple):
    """The three walks of the page."""

    step: Walk
    setup: Walk
    first_loss: Walk


def trace_walks(ranks: "Ranks") -> Walks:
    """Train on processes of the pool, and trace the files that the first of them enters."""
    setup, step = ranks.on("gloo").run(RANKS, trace_step_on_rank, timeout_s=LIMIT_S)[0]
    (first_loss,) = ranks.run_places(1, trace_first_loss, timeout_s=LIMIT_S)
    return Walks(step, setup, first_loss)


def trace_step_on_rank(group: "RankGroup") -> tuple[Walk, Walk]:
    """The walks of the set-up and of a step; those of ranks other than 0 are empty."""
    from motet.train.build import build_components, precision_context
    from train.runs import small_job

    setup, step = Walk(), Walk()

    def traced(walk: Walk, work: Callable[[], Any]) -> Any:
        if group.rank:
            return work()
        with walk.trace():
            return work()

    _clear_caches()
    with tempfile.TemporaryDirectory() as folder:
        job = small_job(Path(folder), "precision.recipe=fp32", *LAYOUT)
        with precision_context(job):
            parts = traced(setup, lambda: build_components(job, group, Path(folder)))
            train_step = parts.make_train_step(job)
            for number in range(TRACED_STEP):
                train_step.step(number, 0.001)
            traced(step, lambda: train_step.step(TRACED_STEP, 0.001))
    return setup, step


def trace_first_loss(place: "RankEnvironment") -> Walk:
    """The walk of a run in this process, up to the report of its first step."""
    import motet
    from train.runs import small_job

    walk = Walk()

    class StopAtLoss(motet.Callback):
        def on_step(self, event: Any) -> None:
            walk.stop()

    _clear_caches()
    with tempfile.TemporaryDirectory() as folder:
        settings = ("precision.recipe=fp32", "run.steps=1", "monitor.predict=false", f"run.folder={folder}/run")
        job = small_job(Path(folder), *settings)
        with walk.trace():
            motet.run(job, [StopAtLoss()])
    return walk


def _clear_caches() -> None:
    """Forget the results of functions that are called once for each argument."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "motet"]
    for owner in [
        *modules,
        *(value for module in modules for value in vars(module).values() if inspect.isclass(value)),
    ]:
        for value in [*vars(owner).values()]:
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def page(ranks: "Ranks | None" = None) -> str:
    """The text of the page, traced on the pool of ranks or on one that is made for it."""
    if ranks is not None:
        return page_of_walks(trace_walks(ranks))
    import_from_tests()
    from ranks import Ranks

    pool = Ranks()
    try:
        return page_of_walks(trace_walks(pool))
    finally:
        pool.close()


def page_of_walks(walks: Walks) -> str:
    step, setup, first_loss = (walk.files for walk in walks)
    only_setup = [path for path in setup if path not in step]
    only_run = [path for path in first_loss if path not in {*step, *setup}]
    rows = [[span, f"`{path}`", f"`{function}`", first_sentence(path)] for path, span, function in step.values()]
    names = {"page": PAGE, "ranks": RANKS, "number": TRACED_STEP + 1, "all_files": len(source_files())}
    return (
        INTRODUCTION.format(step=len(step), **names)
        + markdown_table(["during", "file", "enters at", "the file"], rows)
        + SETUP.format(setup=len(setup), more=len(only_setup))
        + _table_of_files(only_setup)
        + FIRST_LOSS.format(run=len(first_loss), more=len(only_run))
        + _table_of_files(only_run)
    )


def _table_of_files(paths: Iterable[str]) -> str:
    return markdown_table(["file", ""], [[f"`{path}`", first_sentence(path)] for path in paths])


def first_sentence(path: str) -> str:
    """The first sentence of a module's docstring, for a cell of a table."""
    text = ast.get_docstring(ast.parse((SOURCE / path).read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=\.)\s|\n\n", text, maxsplit=1)[0]
    return " ".join(sentence.split()).replace("|", "\\|")


def source_files() -> list[Path]:
    """The files that a walk may enter."""
    return [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]


def lines_of_functions(functions: Iterable[tuple[str, str]]) -> int:
    """The source lines of functions; a function inside of another one is part of it."""
    names_of_file: dict[str, set[str]] = {}
    for path, name in functions:
        names_of_file.setdefault(path, set()).add(name)
    return sum(len(_lines_of(path, names)) for path, names in names_of_file.items())


def _lines_of(path: str, names: set[str]) -> set[int]:
    lines: set[int] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else ""
            if isinstance(child, ast.FunctionDef) and name in names:
                lines.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
            visit(child, f"{name}." if name else prefix)

    visit(ast.parse((SOURCE / path).read_text(encoding="utf-8")), "")
    return lines
