"""The page and the pictures of benchmarks/compressed_training.py, from whatever runs are there."""

from collections.abc import Mapping
from statistics import fmean

from parts.curves import Curve
from parts.pages import DOCS, fill, table
from parts.plot import Axis, Line, line_plot
from parts.variants import COMMON, VARIANTS, bytes_per_parameter

Curves = Mapping[tuple[str, int], Curve]
"""By variant and seed."""
PAGE = DOCS / "compressed-training.md"
LOSSES, GAPS = DOCS / "compressed-training.svg", DOCS / "compressed-training-gap.svg"
HIGHEST_LOSS, HIGHEST_GAP = 9.0, 1.6
"""The pictures are cut off there: a model that knows nothing has 8.3."""
SMOOTHED = 5
"""Windows that a point of the picture of gaps is a mean of."""


def write_page(curves: Curves, steps: int) -> None:
    if not curves:
        print("no run is there, so the page stays as it is")
        return
    LOSSES.write_text(picture_of_losses(curves, steps), encoding="utf-8")
    parts = [what_is_there(curves, steps), table_of(curves)]
    parts.append(f"![Loss over the steps, for each variant]({LOSSES.name})")
    gaps = picture_of_gaps(curves, steps)
    if gaps:
        GAPS.write_text(gaps, encoding="utf-8")
        parts.append(f"![Loss less that of the exact run, for each variant]({GAPS.name})")
    fill(PAGE, parts)
    print(f"{PAGE.name} is written from {len(curves)} runs")


def what_is_there(curves: Curves, steps: int) -> str:
    seeds = {name: seeds_of(curves, name) for name in VARIANTS}
    most = sorted({seed for _, seed in curves})
    lacking = [
        f"{VARIANTS[name].words} (has {', '.join(map(str, has)) or 'none'})"
        for name, has in seeds.items()
        if has != most
    ]
    total = len(VARIANTS) * len(most)
    text = f"{len(curves)} of {total} runs of {steps} steps are there; seeds {', '.join(map(str, most))}"
    text += f". Not all seeds: {'; '.join(lacking)}." if lacking else ", each of every variant."
    versions = ", ".join(sorted({curve.torch for curve in curves.values()}))
    shown = " ".join(setting for setting in COMMON if setting.startswith(("data.", "optimizer.")))
    return f"{text} `motet train tiny --ranks 2 {shown}`, torch {versions}."


def seeds_of(curves: Curves, name: str) -> list[int]:
    return sorted(seed for variant, seed in curves if variant == name)


def table_of(curves: Curves) -> str:
    head = [
        "variant", "bytes per parameter and step", "validation loss", "over seeds", "gap to exact", "over seeds",
        "gap without error feedback", "over seeds",
    ]  # fmt: skip
    rows = []
    for name, variant in VARIANTS.items():
        if variant.is_without or not seeds_of(curves, name):
            continue
        without = gap_cells(curves, variant.without) if variant.without else ["", ""]
        losses = [curve.validation for (of, _), curve in curves.items() if of == name]
        sent = f"{bytes_per_parameter([*COMMON, *variant.settings]):.3g}"
        gaps = ["", ""] if name == "exact" else gap_cells(curves, name)
        rows.append([variant.words, sent, *cells(losses, ".4f"), *gaps, *without])
    return table(head, rows)


def gap_cells(curves: Curves, name: str) -> list[str]:
    """Of the validation loss, seed by seed."""
    gaps: list[float | None] = []
    for seed in seeds_of(curves, name):
        exact, own = curves.get(("exact", seed)), curves[name, seed].validation
        if exact is not None and exact.validation is not None:
            gaps.append(None if own is None else own - exact.validation)
    return cells(gaps, "+.4f")


def cells(values: list[float | None], form: str) -> list[str]:
    """The mean, and the least and the most; None is a run that diverged."""
    there = [value for value in values if value is not None]
    lost = len(values) - len(there)
    if not there:
        return ["diverged" if lost else "not there", ""]
    mean = format(fmean(there), form) + (f", {lost} diverged" if lost else "")
    return [mean, f"{min(there):{form}} to {max(there):{form}}" if len(there) > 1 else "one seed"]


def picture_of_losses(curves: Curves, steps: int) -> str:
    lines = []
    for name, variant in VARIANTS.items():
        found = [curves[name, seed].losses for seed in seeds_of(curves, name)]
        lines.append(Line(label(name), mean_curve(found, steps_of(curves)), variant.colour, is_dashed(name)))
    title = f"Training loss of tiny over {steps} steps on two ranks"
    note = "mean over the seeds, of windows of steps; dashed: without error feedback (averaging too)"
    high = HIGHEST_LOSS if max(y for line in lines for _, y in line.points) > HIGHEST_LOSS else None
    return line_plot(title, note, shown(lines), Axis("step", low=0, high=steps), Axis("loss", high=high))


def picture_of_gaps(curves: Curves, steps: int) -> str | None:
    lines = []
    for name, variant in VARIANTS.items():
        seeds = [seed for seed in seeds_of(curves, name) if ("exact", seed) in curves]
        differences = []
        for seed in seeds if name != "exact" else []:
            pairs = zip(curves[name, seed].losses, curves["exact", seed].losses, strict=False)
            differences.append(smooth([own - exact for own, exact in pairs]))
        points = mean_curve(differences, steps_of(curves))
        lines.append(Line(label(name), points, variant.colour, is_dashed(name)))
    if not shown(lines):
        return None
    note = f"mean over the seeds, of {SMOOTHED} windows; dashed: without error feedback (averaging too)"
    low, high = ends(lines)
    title = "Training loss less that of the exact run"
    axes = Axis("step", low=0, high=steps), Axis("loss less exact", low=low, high=high)
    return line_plot(title, note, shown(lines), *axes)


def ends(lines: list[Line]) -> tuple[float, float]:
    """Of the axis: from the second tenth of the run on. What happens before may be cut off, and what is far off."""
    later = [y for line in lines for _, y in line.points[len(line.points) // 10 :]]
    low, high = min([0.0, *later]), max([0.0, *later])
    margin = 0.05 * (high - low) or 0.1
    return max(low - margin, -HIGHEST_GAP), min(high + margin, HIGHEST_GAP)


def mean_curve(found: list[list[float]], each: int) -> list[tuple[float, float]]:
    """As far as all of them go; a window stands at its middle."""
    shortest = min(map(len, found), default=0)
    return [((number + 0.5) * each, fmean(losses[number] for losses in found)) for number in range(shortest)]


def smooth(values: list[float]) -> list[float]:
    """Each is the mean of those around it."""
    half = SMOOTHED // 2
    return [fmean(values[max(0, n - half) : n + half + 1]) for n in range(len(values))]


def steps_of(curves: Curves) -> int:
    """In a window."""
    return next(iter(curves.values())).steps_per_window


def shown(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line.points]


def label(name: str) -> str:
    short = {"zero-plus-plus": "ZeRO++, stage 3", "diloco": "DiLoCo, 20", "average": "averaging, 20"}
    return short.get(name, name.replace("-off", ", no feedback"))


def is_dashed(name: str) -> bool:
    return VARIANTS[name].is_without or name == "average"
