"""Tables of benchmarks/data_parallel.py, in the manner of the docs."""

import statistics
from dataclasses import replace

from parts.contenders import Contender
from parts.rounds import quartiles, ratios

Times = dict[Contender, list[float]]
"""Seconds of a step in each round."""


def table_of_ratios(times: Times, losses: dict[Contender, float], tokens: int) -> str:
    """Each contender compared with motet with its defaults at the same stage, which is the first of the stage."""
    lines = ["| stage | | backend | tokens/s | motet is (median) | quartiles | loss |", "|---|---|---|---|---|---|---|"]
    for contender, seconds in times.items():
        firsts = (each for each in times if each.stage == contender.stage and each.who == "motet")
        ours = times.get(next(firsts, contender))
        if contender.backend == "null" or contender.overlap == "none":
            continue
        name = "**motet**" if seconds is ours else contender.name
        ratio = "| " if ours is None or seconds is ours else ratio_cells(seconds, ours)
        speed = f"{tokens / statistics.median(seconds):,.0f}"
        loss = f"{losses[contender]:.5f}"
        lines.append(f"| {contender.stage} | {name} | {contender.backend} | {speed} | {ratio} | {loss} |")
    return "\n".join(lines) + "\n"


def ratio_cells(theirs: list[float], ours: list[float]) -> str:
    low, middle, high = quartiles(ratios(theirs, ours))
    return f"{middle:.2f}x | {low:.2f} to {high:.2f}"


def table_of_exposed(times: Times) -> str:
    """Exposed communication of a step: its time less that on the null backend."""
    lines = [
        "| stage | | backend | overlap | step (ms) | without communication (ms) | exposed (median) | quartiles |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for contender, seconds in times.items():
        quiet = times[replace(contender, backend="null", overlap="backward")]
        if quiet is seconds:
            continue
        low, middle, high = quartiles([(a - b) / a for a, b in zip(seconds, quiet, strict=True)])
        overlap = contender.overlap if contender.who == "motet" else "its own"
        lines.append(
            f"| {contender.stage} | {contender.name} | {contender.backend} | {overlap} "
            f"| {statistics.median(seconds) * 1e3:.1f} | {statistics.median(quiet) * 1e3:.1f} "
            f"| {middle:.1%} | {low:.1%} to {high:.1%} |"
        )
    return "\n".join(lines) + "\n"


def sections(tables: dict[str, list[str]]) -> list[str]:
    """The tables of each size under headings."""
    return [
        part
        for title, (against, *exposed) in tables.items()
        for part in (
            f"## {title}",
            against,
            *(p for table in exposed for p in (f"### Exposed communication, {title}", table)),
        )
    ]
