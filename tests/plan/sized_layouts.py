"""Layouts of planned steps by their sizes, with the words of `[layout]`."""

from typing import Any

from motet.parallel.layout import Layout, layout_of_sizes, parse_stages


def sized_layout(*, reduce_gradients: str = "microbatch", stages: str | None = None, **sizes: Any) -> Layout:
    cuts = parse_stages(stages) if stages else ()
    return layout_of_sizes(reduces_once=reduce_gradients == "step", stages=cuts, **sizes)


def sized(*, recompute: str = "none", **sizes: Any) -> dict[str, Any]:
    """The layout and the recomputation of a step."""
    return {"layout": sized_layout(**sizes), "recompute": recompute}
