"""The page of the events of a run, from the types in motet/monitor/events.py and motet/core/trace.py."""

import inspect
import re
from dataclasses import fields
from typing import get_args

from pydantic import BaseModel

from motet.core.trace import TraceSpan
from motet.monitor import events

INTRODUCTION = """# The events of a run

`events.jsonl` in the run folder holds one JSON object a line, appended and handed to the operating system at each
event. `kill -9` loses only the line that is being written, which readers leave out and the next attempt cuts off.

- Each object has `event`, its kind, and `time`, seconds since 1970; then the fields of its kind, below.
- JSON has no NaN and no infinity: such a number is the string `"NaN"`, `"Infinity"` or `"-Infinity"`.
- motet reports every `monitor.every`-th step, and always the first and last step of an attempt and any step whose
  update was left out or whose loss is not finite.
- A resumed run continues the same file. Each attempt opens with `run_started`; steps from its `first_step` on replace
  those of earlier attempts. An attempt without `run_ended` was killed, or is still running.
- Only rank 0 writes.

In Python, `motet.monitor.events.read_events(path)` gives all events as typed values, `effective_events` leaves out what
was done again, and `read_steps(path)` gives the curve with each step once.
"""


def type_text(annotation: object) -> str:
    """`int | None` and the like, without module names."""
    text = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    return (
        text.replace("motet.core.trace.", "")
        .replace("motet.monitor.events.", "")
        .replace("typing.", "")
        .replace("NoneType", "None")
    )


def field_comments(kind: type) -> dict[str, str]:
    """The comments at the ends of the lines of a dataclass's fields."""
    matches = re.finditer(r"^    (\w+): [^#\n]*?#\s*(.*)$", inspect.getsource(kind), re.MULTILINE)
    return {match[1]: match[2] for match in matches}


def table(rows: list[tuple[str, str, str]]) -> list[str]:
    """A Markdown table; whitespace of docstrings folded."""
    lines = ["| field | type | |", "|---|---|---|"]
    for name, kind, meaning in rows:
        lines.append(f"| `{name}` | `{kind}` | {' '.join(meaning.split())} |".replace(" | None", " or None"))
    return lines


def model_rows(kind: type[BaseModel]) -> list[tuple[str, str, str]]:
    return [
        (name, type_text(field.annotation), field.description or "")
        for name, field in kind.model_fields.items()
        if name not in ("event", "time")
    ]


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    for kind in get_args(events.Event):
        lines += [f"## `{kind.model_fields['event'].default}`", "", inspect.cleandoc(kind.__doc__), ""]
        lines += [*table(model_rows(kind)), ""]
    work = events.ParameterServerStepStats
    lines += ["## Parameter servers", "", inspect.cleandoc(work.__doc__ or ""), "", *table(model_rows(work)), ""]
    lines += ["## Spans", "", inspect.cleandoc(TraceSpan.__doc__ or ""), ""]
    docs = field_comments(TraceSpan)
    lines += [
        *table([(field.name, type_text(field.type), docs.get(field.name, "")) for field in fields(TraceSpan)]),
        "",
    ]
    lines += [
        "A step's clock starts when the step before was handed over, so what happens between two steps (saving,",
        "evaluating, the writing of the report itself) is told with the later one. Spans of background threads overlap",
        "those of the main thread. On a CUDA device a span of a reported step is the time that the device took for",
        "what was started inside it; a step that is reported only because it was skipped has the times of the host.",
    ]
    return "\n".join(lines) + "\n"
