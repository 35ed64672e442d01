"""A Program step by step: the contents of each rank after every step, as values and as text for a terminal."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from motet.collectives.program import Contributors, Program, Step, contiguous_ranges, group_by_pair
from motet.collectives.prove import program_checker

_MAX_CHUNK_COLUMNS = 16  # With more chunks the text has groups of chunks in place of columns


@dataclass(frozen=True)
class CollectiveStepFrame:
    """A step, and the contents of every rank after it. The first frame is the start, without transfers."""

    step: Step
    contents: tuple[Mapping[int, Contributors], ...]
    error: str | None = None  # Why the step cannot be executed; `contents` are then those before it


def program_frames(program: Program) -> list[CollectiveStepFrame]:
    """The start, then each step up to the first that cannot be executed."""
    contents = program_checker.initial_contents(program.initial)
    frames = [CollectiveStepFrame((), _decode_contents(contents))]
    for step in program.steps:
        try:
            program_checker.apply_step(contents, step)
        except program_checker.InvalidCollectiveProgramError as error:
            return [*frames, CollectiveStepFrame(step, frames[-1].contents, str(error))]
        frames.append(CollectiveStepFrame(step, _decode_contents(contents)))
    return frames


def _decode_contents(contents: program_checker.RankContents) -> tuple[Mapping[int, Contributors], ...]:
    return tuple({chunk: _decode_cached(total) for chunk, total in sorted(chunks.items())} for chunks in contents)


_decode_cached = lru_cache(maxsize=4096)(program_checker.decode_contributors)


def program_title(program: Program) -> str:
    """`all-reduce/ring of 4 ranks: 4 chunks, 6 steps, 24 messages`"""
    counts = ((program.chunks, "chunk"), (len(program.steps), "step"), (program.message_count, "message"))
    return f"{program}: {', '.join(f'{count} {name}{plural_suffix(count)}' for count, name in counts)}"


def plural_suffix(count: int) -> str:
    return "" if count == 1 else "s"


def format_ranges(numbers: Iterable[int]) -> str:
    """`0-2,5`; with repeats `0,0` for two and `8x0` for more."""
    times = Counter(sorted(numbers))
    if max(times.values(), default=1) > 1:
        return ",".join(f"{n}x{number}" if n > 2 else ",".join([str(number)] * n) for number, n in times.items())
    return ",".join(f"{a}" if a == b else f"{a},{b}" if b == a + 1 else f"{a}-{b}" for a, b in contiguous_ranges(times))


def program_text(program: Program, only_step: int | None = None) -> str:
    """The transfers of each step, or of one step, and the contents of each rank after it.

    The numbers in a row are the ranks whose contributions a chunk contains; `[ ]` marks the chunks that the step wrote.
    """
    parts = [program_title(program)]
    for number, frame in enumerate(program_frames(program), start=-1):
        if only_step is not None and number not in (only_step - 1, only_step):
            continue
        name = "start" if number < 0 else f"step {number}"
        parts.append("\n".join([name, *align_columns(_table_rows(program, frame))]))
        if frame.error:
            parts.append(f"step {number} cannot be executed: {frame.error}")
    return "\n\n".join(parts) + "\n"


def _table_rows(program: Program, frame: CollectiveStepFrame) -> list[list[str]]:
    written = {(t.dst, chunk) for t in frame.step for chunk in t.chunks} if frame.error is None else set()
    send_texts = _describe_sends(frame.step)
    shows_each_chunk = program.chunks <= _MAX_CHUNK_COLUMNS
    columns = [f"chunk {chunk}" for chunk in range(program.chunks)] if shows_each_chunk else ["then holds"]
    rows = [["rank", "sends", *columns]]
    for rank, held in enumerate(frame.contents):
        cells = [_cell(held.get(chunk), (rank, chunk) in written) for chunk in range(program.chunks)]
        rows.append([str(rank), send_texts.get(rank, ""), *(cells if shows_each_chunk else [_group_cells(cells)])])
    return rows if frame.step else [[row[0], *row[2:]] for row in rows]


def _cell(sources: Contributors | None, is_written: bool) -> str:
    if sources is None:
        return "."
    return f"[{format_ranges(sources)}]" if is_written else format_ranges(sources)


def _group_cells(cells: Sequence[str]) -> str:
    """Chunks with the same contents together: `0-3: [0,1]  4-7: 2`."""
    groups: dict[str, list[int]] = {}
    for chunk, cell in enumerate(cells):
        if cell != ".":
            groups.setdefault(cell, []).append(chunk)
    return "  ".join(f"{format_ranges(chunks)}: {cell}" for cell, chunks in groups.items()) or "nothing"


def _describe_sends(step: Step) -> dict[int, str]:
    """A sentence for each sender; equal sends to several ranks are named once."""
    targets: dict[int, dict[str, list[int]]] = {}
    for (src, dst), transfers in group_by_pair(step).items():
        for op, verb in (("reduce", "adds"), ("copy", "copies")):
            chunks = [chunk for t in transfers if t.op == op for chunk in t.chunks]
            if chunks:
                words = f"{verb} chunk{plural_suffix(len(chunks))} {format_ranges(chunks)}"
                targets.setdefault(src, {}).setdefault(words, []).append(dst)

    def sentence(sends: dict[str, list[int]]) -> str:
        return "; ".join(f"{words} to rank{plural_suffix(len(to))} {format_ranges(to)}" for words, to in sends.items())

    return {src: sentence(sends) for src, sends in targets.items()}


def transfer_sentences(step: Step) -> list[str]:
    """`rank 0 adds chunk 3 to rank 1`"""
    return [f"rank {rank} {words}" for rank, words in sorted(_describe_sends(step).items())]


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"  {'  '.join(map(str.ljust, row, widths)).rstrip()}" for row in rows]
