"""The rows of the report: their choice within the time, and their JSON and page, written after each."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from gpu_checks.pool import Pool, WorkerError


class LeftOutError(Exception):
    """A row needs something that is missing, which the text names."""


@dataclass
class Outcome:
    """The result of a row. `holds` is None for a figure without a requirement."""

    result: str
    holds: bool | None = None
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A check or a measurement."""

    name: str
    estimate_s: float  # 0 for a row that only reads the values of others: it always runs, and runs again
    run: Callable[["Report"], Outcome]


@dataclass(frozen=True)
class Section:
    """Rows that share a part of the time."""

    title: str
    share_s: float  # Share of 300 s; unused time goes to the sections after it
    rows: Sequence[Row]


class Report:
    """All rows that are known, by name, and the workers that compute them."""

    def __init__(self, path: Path, facts: dict[str, str], pool: Pool, seconds: float) -> None:
        self.path, self.facts, self.pool = path, facts, pool
        self.begin_s, self.seconds = monotonic(), seconds
        self.end_s = self.begin_s + seconds
        self.rows: dict[str, dict[str, Any]] = {}

    def resume(self) -> int:
        """Take over the finished rows of an earlier run on the same device; returns their number."""
        if not self.path.exists():
            return 0
        earlier = json.loads(self.path.read_text())
        for name in ("device", "torch"):
            if earlier["facts"].get(name) != self.facts[name]:
                raise ValueError(
                    f"{self.path} has rows of {name} {earlier['facts'].get(name)}, but this is {self.facts[name]}; "
                    "give another file with --json"
                )
        self.rows = {name: row for name, row in earlier["rows"].items() if row["state"] == "done"}
        return len(self.rows)

    def value(self, row: str, key: str) -> Any:
        """A value of a row that is done; None if there is none."""
        return self.rows.get(row, {}).get("values", {}).get(key)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function in the worker of one rank."""
        return self.pool.call(function, *arguments, timeout_s=self._limit_s())

    def ranks(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of a function on ranks that share the device."""
        return self.pool.ranks(world, function, *arguments, timeout_s=self._limit_s())

    def _limit_s(self) -> float:
        return max(1.0, self._row_end_s - monotonic())

    def run(self, row: Row, section_end_s: float) -> None:
        """Run a row if its time allows, and store its result."""
        left_s = min(section_end_s, self.end_s) - monotonic()
        if row.estimate_s and self.rows.get(row.name, {}).get("state") == "done":
            return
        if row.estimate_s and left_s < row.estimate_s:
            reason = f"left out: {max(left_s, 0):.0f} s are left, and it takes about {row.estimate_s:.0f} s"
            self._store(row.name, "left out", Outcome(reason), 0.0)
            return
        start_s = monotonic()
        self._row_end_s = min(self.end_s + 5, start_s + max(20.0, 4 * row.estimate_s))
        try:
            outcome, state = row.run(self), "done"
        except LeftOutError as error:
            outcome, state = Outcome(f"left out: {error}"), "left out"
        except WorkerError as error:
            outcome, state = Outcome(f"failed: {error}", holds=False), "failed"
        except Exception as error:  # noqa: BLE001  # A defect of one row must not cost the others
            outcome, state = Outcome(f"failed: {type(error).__name__}: {error}", holds=False), "failed"
        self._store(row.name, state, outcome, monotonic() - start_s)

    def _store(self, name: str, state: str, outcome: Outcome, seconds: float) -> None:
        self.rows[name] = {"state": state, "seconds": round(seconds, 2), **asdict(outcome)}
        verdict = {True: "holds", False: "DOES NOT HOLD", None: ""}[outcome.holds]
        print(f"[{monotonic() - self.begin_s:5.0f} s] {name}: {outcome.result}  {verdict}".rstrip(), flush=True)
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial_file = self.path.with_suffix(".partial")
        partial_file.write_text(json.dumps({"facts": self.facts, "rows": self.rows}, indent=1) + "\n")
        partial_file.replace(self.path)


def slug(name: str) -> str:
    """`NVIDIA H100 80GB HBM3` -> `nvidia-h100-80gb-hbm3`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def page(report: Report, sections: Sequence[Section], options: str) -> str:
    """The page of the report, with a line for every row."""
    facts = report.facts
    machine = f"{facts['device']}, {facts['cores']} cores, {facts['platform']}, torch {facts['torch']}"
    head = f"Written by `python scripts/gpu.py{options}` at commit `{facts['commit']}` on {machine}."
    lines = [f"# {facts['device']}", "", "Correctness, speed and memory of one device.", "", "<!-- results -->", ""]
    lines += [head, ""]
    verdicts = {True: "holds", False: "**does not hold**", None: ""}
    for section in sections:
        lines += [f"## {section.title}", "", "| row | result | |", "|---|---|---|"]
        for row in section.rows:
            stored = report.rows.get(row.name, {"result": "not checked", "holds": None})
            text = stored["result"].strip().replace("|", "\\|").replace("\n", "<br>")
            lines.append(f"| {row.name} | {text} | {verdicts[stored['holds']]} |")
        lines.append("")
    return "\n".join([*lines, "<!-- end -->", ""])
