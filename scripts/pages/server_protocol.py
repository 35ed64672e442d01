"""The tables of docs/reference/server-protocol.md: explored systems of tests/parallel/parameter_server/scenarios.py."""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from pages import DOCS, fill_blocks, import_from_tests

if TYPE_CHECKING:
    from parallel.parameter_server.scenario import Scenario

PAGE = "reference/server-protocol.md"
SYSTEMS_HEAD = """\
| | workers x servers x steps | copies | twice | lost | cut | mode | states | from one to another | ends |
|---|---|---|---|---|---|---|---|---|---|
"""
MISTAKES_HEAD = """| what is wrong | the promise that it breaks | states |
|---|---|---|
"""


def measure(words: list[str]) -> tuple[str, bool]:
    """Explore for hours; `small` explores the smaller systems, and names of modes add the larger systems in them.

    The page keeps the rows of all others. A broken promise ends the exploration with an AssertionError.
    """
    import_from_tests()
    from parallel.parameter_server.scenarios import LARGE, RULES, SMALL

    modes = [] if words == ["small"] else words or list(RULES)
    blocks = {
        "small systems": SYSTEMS_HEAD + "\n".join(_rows(SMALL, RULES)),
        "large systems": SYSTEMS_HEAD + "\n".join(_rows(LARGE, modes)),
        "mistakes": MISTAKES_HEAD + "\n".join(_mistakes()),
    }
    return fill_blocks(PAGE, blocks), True


def _rows(systems: "dict[str, Scenario]", modes: Collection[str]) -> Iterator[str]:
    """A row for each system and mode: explored, or the page's own where the mode is not in `modes`."""
    from parallel.parameter_server.explorer import Exploration, Explorer, explore
    from parallel.parameter_server.scenarios import alike, modes_of, row, with_mode

    kept = {alike(line): line for line in (DOCS / PAGE).read_text(encoding="utf-8").splitlines()}
    for name, system in systems.items():
        for mode in modes_of(system):
            scenario_in_mode = with_mode(system, mode)
            if mode in modes:
                yield row(name, scenario_in_mode, explore(Explorer(scenario_in_mode)))
                print(f"{name}, {mode}", flush=True)
            elif (same := alike(row(name, scenario_in_mode, Exploration()))) in kept:
                yield kept[same]


def _mistakes() -> Iterator[str]:
    from parallel.parameter_server.explorer import Exploration, Explorer, explore
    from parallel.parameter_server.scenarios import MISTAKES, mistake_row

    for name, mistake in MISTAKES.items():
        states = Exploration()
        try:
            explore(Explorer(mistake.scenario), result=states)
        except AssertionError:
            yield mistake_row(name, states)
        else:
            raise AssertionError(f"{name} passed")
