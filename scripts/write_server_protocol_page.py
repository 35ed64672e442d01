"""Writes docs/reference/server-protocol.md: explores the systems of tests/server/systems.py, which takes hours.

With `small` it explores the smaller ones alone, and with names of modes the larger ones in those. Of the others the
page keeps its rows.
"""

import sys
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/server-protocol.md"
sys.path.insert(0, str(ROOT / "tests"))

from server.explore import Found, explore  # noqa: E402
from server.system import System  # noqa: E402
from server.systems import LARGE, RULES, SMALL, WRONG, alike, mistake_row, row, rules_of, with_rule  # noqa: E402

INTRODUCTION = """# The protocol of the parameter server

A [parameter server](../guide/parameter-server.md) is a desk, servers and workers. What each of them does with a
message is a function of what it knows: `motet.parallel.parameter_server.protocol.coordinator_state_machine`, `keeper` and `client` are state machines without
tensors, clocks or sockets, and `protocol` is what they say to each other. So a test can try everything that may happen
to a small system, with the code that runs. This page says what is promised, and what was tried.

## Promises

- **No push that was acknowledged is lost.** When a worker is told that its push is safe, all servers that keep the
  piece have it. When shares are chosen to be an update, all servers have all of them.
- **No value is torn.** What a worker pulls of a piece is of one version.
- **The bound is kept.** A share of step t is computed with all shares of steps before t - s: s = 0 in `sync` and
  `first-k`, `staleness` in `bounded`; `async` has no bound. (A piece that had one server, which was lost, has what its
  snapshot had.)
- **Each share is in one update**, or was dropped, where the mode allows it.
- **Everybody comes to the end.** From wherever it came to, the run can come to its end: all steps are done, all servers
  have all updates, and all workers know.

## What is tried

Messages arrive in any order, also those of one sender. Beyond that, as the tables say:

- A message arrives twice, the second time whenever it likes.
- A process ends at any time. Of what it had sent, any part arrives, whenever it likes. One worker is left, and one
  server of each piece, unless a server comes instead: with a snapshot of the last version or the one before, or with
  nothing where another has the piece.
- A connection is lost with all that is underway on it, and made again.
- A value is read from memory in two parts, with updates between them.
- The gradient of each piece is there at a time of its own.
- A run goes on from a checkpoint: servers have nothing, and are told what their pieces are, also by a connection that
  is lost and made again.
- A run rests after each step until the desk's owner lets it go on, and is told to stop at any time.

A state is what everybody knows and all messages underway. Every state that can be come to is looked at, but for what
makes no difference: other names of workers, messages that will be ignored, and the order of messages that come to the
same in any order (`tests/server/explore.py` says which, and why). Where a system is small enough it is tried both ways:
the ends are the same. Of the states below, those that have such a message underway are counted with the one that they
lead to. Bits of an update do not depend on the order of messages, so that they need not be tried.
"""

SYSTEMS = """## Systems

Copies are servers that keep a piece; then come messages that arrive twice, processes that end, and connections that are
lost. `bounded` has a bound of one step, and of none in systems of two steps. `make test` explores these, and looks for
the way to an end from each state:
"""

HEAD = "| | workers x servers x steps | copies | twice | lost | cut | mode | states | from one to another | ends |"
LINE = "|---|---|---|---|---|---|---|---|---|---|"

LARGER = """
And `make proof` these. Of the largest, those modes are listed that were tried to their end:
"""

MISTAKES = """
## Mistakes

The same is tried with a mistake in one of the machines. Each is found; some of them had been made. The number is that
of states until then, which depends on the order in which they are looked at.

| what is wrong | the promise that it breaks | states |
|---|---|---|
"""


def rows(systems: dict[str, System], modes: Collection[str]) -> Iterator[str]:
    """Those that the page has where a mode is not asked for."""
    kept = {alike(line): line for line in PAGE.read_text(encoding="utf-8").splitlines()}
    for name, system in systems.items():
        for mode in rules_of(system):
            asked = with_rule(system, mode)
            if mode in modes:
                yield row(name, asked, explore(asked))
                print(f"{name}, {mode}", flush=True)
            elif (same := alike(row(name, asked, Found()))) in kept:
                yield kept[same]


def mistakes() -> Iterator[str]:
    for name, mistake in WRONG.items():
        found = Found()
        try:
            explore(mistake.system, found=found)
        except AssertionError:
            yield mistake_row(name, found)
        else:
            raise AssertionError(f"{name} was not found")


def page(modes: Collection[str]) -> str:
    """Of larger systems in these modes alone."""
    small, large = [HEAD, LINE, *rows(SMALL, RULES)], [HEAD, LINE, *rows(LARGE, modes)]
    parts = [INTRODUCTION, SYSTEMS, *small, LARGER, *large]
    return "\n".join(parts) + "\n" + MISTAKES + "\n".join(mistakes()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page([] if sys.argv[1:] == ["small"] else sys.argv[1:] or RULES), encoding="utf-8")
