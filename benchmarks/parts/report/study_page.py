"""The page and the pictures of a study, from its finished runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from parts.loss_curves import Curve
from parts.report.pages import DOCS, fill
from parts.report.plots import Axis, Line, save_line_plot
from parts.study import Study

Curves = Mapping[tuple[str, int], Curve]
"""Curves by variant and seed."""
HIGHEST_LOSS, HIGHEST_GAP = 9.0, 1.6
"""The pictures are cut off there: a model that knows nothing has 8.3."""
SMOOTHED = 5
"""Windows whose mean is a point of the picture of gaps."""


def write_page(study: Study, curves: Curves, steps: int, tables: Sequence[str]) -> None:
    """Write the page of a study, with `tables` above the pictures."""
    page, losses = DOCS / f"{study.page}.md", DOCS / f"{study.page}.svg"
    draw_losses(losses, study, curves, steps=steps)
    parts = [what_is_there(study, curves, steps), *tables]
    parts.append(f"![Loss over the steps, for each variant]({losses.name})")
    picture = DOCS / f"{study.page}-gap.svg"
    if draw_gaps(picture, study, curves, steps=steps):
        parts.append(f"![Loss less that of {study.reference_run}, for each variant]({picture.name})")
    fill(page, parts)
    print(f"{page.name} is written from {len(curves)} runs")


def what_is_there(study: Study, curves: Curves, steps: int) -> str:
    seeds = {name: seeds_of(curves, name) for name in study.variants}
    most = sorted({seed for _, seed in curves})
    missing = [
        f"{study.variants[name].words} (has {', '.join(map(str, has)) or 'none'})"
        for name, has in seeds.items()
        if has != most
    ]
    total = len(study.variants) * len(most)
    text = f"{len(curves)} of {total} runs of {steps} steps are there; seeds {', '.join(map(str, most))}"
    text += f". Not all seeds: {'; '.join(missing)}." if missing else ", each of every variant."
    versions = ", ".join(sorted({curve.torch for curve in curves.values()}))
    shown = " ".join(setting for setting in study.common if setting.startswith(("data.", "optimizer.", "layout.")))
    return f"{text} `motet train tiny --ranks {study.ranks} {shown}`, torch {versions}."


def seeds_of(curves: Curves, name: str) -> list[int]:
    return sorted(seed for variant, seed in curves if variant == name)


def loss_cells(curves: Curves, name: str) -> list[str]:
    """Mean and range of the validation loss."""
    return cells([curves[name, seed].validation for seed in seeds_of(curves, name)], ".4f")


def gap_cells(study: Study, curves: Curves, name: str) -> list[str]:
    """Gap of the validation loss to the reference's, seed by seed; empty for the reference itself."""
    if name == study.reference:
        return ["", ""]
    gaps: list[float | None] = []
    for seed in seeds_of(curves, name):
        other, own = curves.get((study.reference, seed)), curves[name, seed].validation
        if other is not None and other.validation is not None:
            gaps.append(None if own is None else own - other.validation)
    return cells(gaps, "+.4f")


def cells(values: list[float | None], form: str) -> list[str]:
    """The mean, and the smallest and the largest value; None is a run that diverged."""
    there = [value for value in values if value is not None]
    lost = len(values) - len(there)
    if not there:
        return ["diverged" if lost else "not there", ""]
    mean = format(fmean(there), form) + (f", {lost} diverged" if lost else "")
    return [mean, f"{min(there):{form}} to {max(there):{form}}" if len(there) > 1 else "one seed"]


def draw_losses(path: Path, study: Study, curves: Curves, *, steps: int) -> None:
    lines = []
    for name in study.variants:
        found = [curves[name, seed].losses for seed in seeds_of(curves, name)]
        lines.append(line_of(study, name, mean_curve(found, steps_of(curves))))
    title = f"Training loss of tiny over {steps} steps {study.where}"
    note = "; ".join(filter(None, ["mean over the seeds, of windows of steps", study.dashed]))
    high = HIGHEST_LOSS if max(y for line in lines for _, y in line.points) > HIGHEST_LOSS else None
    axes = {"x": Axis("step", low=0, high=steps), "y": Axis("loss", high=high)}
    save_line_plot(path, shown(lines), title=title, note=note, **axes)


def draw_gaps(path: Path, study: Study, curves: Curves, *, steps: int) -> bool:
    """Whether there are runs to compare."""
    lines = []
    for name in study.variants:
        seeds = [seed for seed in seeds_of(curves, name) if (study.reference, seed) in curves]
        differences = []
        for seed in seeds if name != study.reference else []:
            pairs = zip(curves[name, seed].losses, curves[study.reference, seed].losses, strict=False)
            differences.append(smooth([own - other for own, other in pairs]))
        lines.append(line_of(study, name, mean_curve(differences, steps_of(curves))))
    if not shown(lines):
        return False
    note = "; ".join(filter(None, [f"mean over the seeds, of {SMOOTHED} windows", study.dashed]))
    low, high = ends(lines)
    title = f"Training loss less that of {study.reference_run}"
    axes = {"x": Axis("step", low=0, high=steps), "y": Axis(f"loss less {study.reference}", low=low, high=high)}
    save_line_plot(path, shown(lines), title=title, note=note, **axes)
    return True


def line_of(study: Study, name: str, points: list[tuple[float, float]]) -> Line:
    variant = study.variants[name]
    label = variant.label or name.replace("-off", ", no feedback")
    return Line(label, points, variant.colour, variant.dashed or variant.is_without)


def ends(lines: list[Line]) -> tuple[float, float]:
    """Ends of the axis, from the second tenth of the run on; earlier points and outliers may be cut off."""
    later = [y for line in lines for _, y in line.points[len(line.points) // 10 :]]
    low, high = min([0.0, *later]), max([0.0, *later])
    margin = 0.05 * (high - low) or 0.1
    return max(low - margin, -HIGHEST_GAP), min(high + margin, HIGHEST_GAP)


def mean_curve(found: list[list[float]], each: int) -> list[tuple[float, float]]:
    """The mean of curves up to the end of the shortest; a window is drawn at its middle."""
    shortest = min(map(len, found), default=0)
    return [((number + 0.5) * each, fmean(losses[number] for losses in found)) for number in range(shortest)]


def smooth(values: list[float]) -> list[float]:
    """Means of each value and the values around it."""
    half = SMOOTHED // 2
    return [fmean(values[max(0, n - half) : n + half + 1]) for n in range(len(values))]


def steps_of(curves: Curves) -> int:
    """The number of steps in a window."""
    return next(iter(curves.values())).steps_per_window


def shown(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line.points]
