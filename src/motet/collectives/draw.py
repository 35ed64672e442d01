"""A Program step by step: what each rank holds after every step, and the same as text for a terminal."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from motet.collectives.ledger import FaultError, Held, contributors, play, start
from motet.collectives.score import Contributors, Program, Step, messages, runs

_MOST_COLUMNS = 16
"""Of more chunks than this the text names groups in place of columns."""


@dataclass(frozen=True)
class Frame:
    """A step, and what every rank holds after it. Frame 0 is the start, and has no transfers."""

    step: Step
    held: tuple[Mapping[int, Contributors], ...]
    fault: str | None = None
    """Why the step cannot be played; `held` is then what there was before it."""

    def arrived(self) -> set[tuple[int, int]]:
        """(rank, chunk) that the step wrote."""
        return {(t.dst, chunk) for t in self.step for chunk in t.chunks}


def frames(program: Program) -> list[Frame]:
    """The start, then each step; the last one is where a Program that is wrong breaks off."""
    held = start(program.initial)
    found = [Frame((), _seen(held))]
    for step in program.steps:
        try:
            play(held, step)
        except FaultError as fault:
            return [*found, Frame(step, found[-1].held, str(fault))]
        found.append(Frame(step, _seen(held)))
    return found


def _seen(held: Held) -> tuple[Mapping[int, Contributors], ...]:
    return tuple({chunk: _contributors(total) for chunk, total in sorted(chunks.items())} for chunks in held)


_contributors = lru_cache(maxsize=4096)(contributors)


def title(program: Program) -> str:
    """`all-reduce/ring of 4 ranks: 4 chunks, 6 steps, 24 messages`"""
    counts = ((program.chunks, "chunk"), (len(program.steps), "step"), (program.messages, "message"))
    return f"{program}: {', '.join(f'{count} {name}{plural(count)}' for count, name in counts)}"


def plural(count: int) -> str:
    return "" if count == 1 else "s"


def spelled(numbers: Iterable[int]) -> str:
    """`0-2,5`; what comes twice stands twice, and what comes more often as in `8x0`."""
    listed = sorted(numbers)
    times = Counter(listed)
    if len(times) < len(listed):
        return ",".join(f"{n}x{number}" if n > 2 else ",".join([str(number)] * n) for number, n in times.items())
    return ",".join(f"{a}" if a == b else f"{a},{b}" if b == a + 1 else f"{a}-{b}" for a, b in runs(listed))


def text(program: Program, only: int | None = None) -> str:
    """Who sends what to whom in each step, and what each rank then holds; of one step only, or of all.

    The numbers in a row are the ranks whose contributions a chunk holds; `[ ]` marks what the step has written.
    """
    shown = list(enumerate(frames(program), start=-1))
    if only is not None:
        shown = [(number, frame) for number, frame in shown if number in (only - 1, only)]
    parts = [title(program)]
    for number, frame in shown:
        name = "start" if number < 0 else f"step {number}"
        parts.append("\n".join([name, *columns(_rows(program, frame))]))
        if frame.fault:
            parts.append(f"step {number} cannot be played: {frame.fault}")
    return "\n\n".join(parts) + "\n"


def _rows(program: Program, frame: Frame) -> list[list[str]]:
    """A table with a row for each rank."""
    arrived = frame.arrived() if frame.fault is None else set()
    sends = _sends(frame.step)
    few = program.chunks <= _MOST_COLUMNS
    head = ["rank", "sends", *([f"chunk {chunk}" for chunk in range(program.chunks)] if few else ["then holds"])]
    rows = [head]
    for rank, held in enumerate(frame.held):
        cells = [_cell(held.get(chunk), (rank, chunk) in arrived) for chunk in range(program.chunks)]
        rows.append([str(rank), sends.get(rank, ""), *(cells if few else [_grouped(cells)])])
    return rows if frame.step else [[row[0], *row[2:]] for row in rows]


def _cell(sources: Contributors | None, arrived: bool) -> str:
    if sources is None:
        return "."
    return f"[{spelled(sources)}]" if arrived else spelled(sources)


def _grouped(cells: Sequence[str]) -> str:
    """Neighbouring chunks that are made of the same together: `0-3: [0,1]  4-7: 2`."""
    groups: dict[str, list[int]] = {}
    for chunk, cell in enumerate(cells):
        if cell != ".":
            groups.setdefault(cell, []).append(chunk)
    return "  ".join(f"{spelled(chunks)}: {cell}" for cell, chunks in groups.items()) or "nothing"


def _sends(step: Step) -> dict[int, str]:
    """What each rank does, in words; what it sends alike to several is said once."""
    alike: dict[int, dict[tuple[str, str], list[int]]] = {}
    for (src, dst), transfers in messages(step).items():
        for op in ("reduce", "copy"):
            chunks = [chunk for t in transfers if t.op == op for chunk in t.chunks]
            if chunks:
                words = f"{'adds' if op == 'reduce' else 'copies'} chunk{plural(len(chunks))} {spelled(chunks)}"
                alike.setdefault(src, {}).setdefault((op, words), []).append(dst)
    return {
        src: "; ".join(f"{words} to rank{plural(len(dst))} {spelled(dst)}" for (_, words), dst in said.items())
        for src, said in alike.items()
    }


def sentences(step: Step) -> list[str]:
    """`rank 0 adds chunk 3 to rank 1`"""
    return [f"rank {rank} {words}" for rank, words in sorted(_sends(step).items())]


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows as lines, their columns under each other; some of them flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(cell.rjust(width) if n in right else cell.ljust(width) for n, (cell, width) in cells)

    return [f"  {line(row).rstrip()}" for row in rows]
