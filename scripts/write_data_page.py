"""Writes the tables of docs/guide/data-parallelism.md: bytes sent and kept by stage, from the same code that is tested."""

from pathlib import Path

from motet.parallel.buckets import Bucket, cut_buckets
from motet.parallel.communication import CommunicationSettings
from motet.parallel.layout import Layout
from motet.parallel.placement import memory, traffic
from motet.precision.recipe import RECIPES

PAGE = Path(__file__).parents[1] / "docs/guide/data-parallelism.md"
RINGS = CommunicationSettings(all_reduce="ring", reduce_scatter="ring", all_gather="ring")
MATRICES, NUMEL = 16, 2**20
"""A model of 16 Mi parameters, which every number of ranks here divides."""


def tables() -> dict[str, str]:
    """Name of a place on the page -> its table."""
    return {"traffic": traffic_table(), "memory": memory_table()}


def traffic_table() -> str:
    rows = ["| | stage 0 | stage 1 | stage 2 | stage 2, 4 micro-batches |", "|---|---|---|---|---|"]
    for recipe in ("fp32", "bf16"):
        for ranks in (2, 4, 8):
            cells = [
                _sent(ranks, zero, recipe, parts) / (MATRICES * NUMEL)
                for zero, parts in ((0, 1), (1, 1), (2, 1), (2, 4))
            ]
            rows.append(f"| `{recipe}`, {ranks} ranks | " + " | ".join(f"{cell:g}" for cell in cells) + " |")
    return "\n".join(rows)


def _buckets(layout: Layout) -> tuple[Bucket, ...]:
    return cut_buckets({f"w{i}": (0, NUMEL) for i in range(MATRICES)}, layout.shards, 4 * NUMEL)


def _sent(ranks: int, zero: int, recipe: str, parts: int) -> int:
    layout = Layout(ranks, parts, zero, ranks if zero else 1)
    found = {traffic(_buckets(layout), layout, RECIPES[recipe], RINGS, rank).total for rank in range(ranks)}
    assert len(found) == 1
    return found.pop()


def memory_table() -> str:
    rows = ["| | parameters | masters | gradients | moments | together |", "|---|---|---|---|---|---|"]
    for recipe in ("fp32", "bf16"):
        for zero in (0, 1, 2):
            layout = Layout(8, 1, zero, 8 if zero else 1)
            kept = memory(_buckets(layout), layout, RECIPES[recipe], 2)
            cells = (kept.parameters, kept.masters, kept.gradients, kept.moments, kept.total)
            shares = " | ".join(f"{cell / (MATRICES * NUMEL):g}" for cell in cells)
            rows.append(f"| `{recipe}`, stage {zero} | {shares} |")
    return "\n".join(rows)


def page() -> str:
    """The page as it is, with its tables made anew."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables().items():
        before, rest = text.split(f"<!-- {name} -->\n")
        _, after = rest.split("<!-- end -->", 1)
        text = f"{before}<!-- {name} -->\n\n{table}\n\n<!-- end -->{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
