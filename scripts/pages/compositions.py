"""The tables of docs/reference/compositions.md: the techniques of distributed training that work together."""

from itertools import groupby

from motet.parallel.techniques import REFUSALS, TECHNIQUES, technique_pairs
from pages import fill_blocks, markdown_table


def page() -> str:
    blocks = {"pairs": pairs_table(), "refusals": refusals_table(), "not-built": unbuilt_table()}
    blocks["beyond-the-device"] = beyond_the_device_table()
    return fill_blocks("reference/compositions.md", blocks)


def pairs_table() -> str:
    """A row and a column for each technique that is built."""
    built = [technique for technique, other, cell in technique_pairs() if technique == other and cell == "+"]
    rows = []
    for technique, group in groupby(technique_pairs(), key=lambda pair: pair[0]):
        if technique in built:
            cells = [cell for _, other, cell in group if other in built]
            name = f"**{built.index(technique) + 1}** {technique}"
            rows.append([name, *cells, *[""] * (len(built) - len(cells))])
    return markdown_table(["", *(str(number + 1) for number in range(len(built)))], rows)


def refusals_table() -> str:
    texts = {
        cell: REFUSALS[cell].format(row=_setting(technique), column=_setting(other))
        for technique, other, cell in technique_pairs()
        if cell in REFUSALS and cell != "n"
    }
    return markdown_table(["", "refused because"], sorted(texts.items()))


def beyond_the_device_table() -> str:
    """A row for each technique that keeps something off the device: its settings, the stages that have it, and the
    reason for each refusal."""
    rows = []
    for technique, settings in TECHNIQUES.items():
        key, accepted = next(iter(settings.items()))
        if not key.startswith("memory.") or key == "memory.recompute" or isinstance(accepted, str):
            continue
        cells = {(a, b): cell for a, b, cell in technique_pairs()}
        partners = [(other, cells.get((technique, other)) or cells[other, technique]) for other in TECHNIQUES]
        stages = [other.removeprefix("stage ") for other, cell in partners if "stage " in other[:6] and cell == "+"]
        reasons = dict[str, list[str]]()
        for other, cell in partners:
            if cell in REFUSALS and cell != "n" and not other.startswith("stage "):
                row, column = (technique, other) if (technique, other) in cells else (other, technique)
                reason = REFUSALS[cell].format(row=_setting(row), column=_setting(column)).partition(";")[0]
                reasons.setdefault(reason, []).append(other)
        refused = "<br>".join(f"{', '.join(others)}: {reason}" for reason, others in reasons.items())
        values = " and ".join(f"`{key} = {' or '.join(map(repr, value))}`" for key, value in settings.items())
        rows.append([technique, values.replace("'", '"'), ", ".join(stages), refused])
    return markdown_table(["technique", "settings", "stages", "refused with"], rows)


def unbuilt_table() -> str:
    unbuilt = [technique for technique, other, cell in technique_pairs() if technique == other and cell == "n"]
    return markdown_table(["not built yet", "setting"], [[name, _setting(name)] for name in unbuilt])


def _setting(technique: str) -> str:
    return f"`{next(iter(TECHNIQUES[technique]))}`"
