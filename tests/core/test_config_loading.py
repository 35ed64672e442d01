"""Settings are read from files, and what is wrong is told wherever in a tree of settings it stands."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from motet.core.base_settings import FrozenSettings
from motet.core.config_loading import read_toml, settings_from_dict
from motet.core.errors import InputError


class Edge(FrozenSettings):
    length: float


class Circle(FrozenSettings):
    kind: Literal["circle"]
    radius: Annotated[float, Field(gt=0)]


class Square(FrozenSettings):
    kind: Literal["square"]
    edge: Edge


class Drawing(FrozenSettings):
    shapes: tuple[Annotated[Circle | Square, Field(discriminator="kind")], ...] = ()
    frame: Annotated[Circle | Square, Field(discriminator="kind")] | None = None
    pen: Literal["thin", "thick"] = "thin"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"shapes": [{"kind": "circle", "radius": -1}]}, "shapes.0.radius = -1 must be more than 0.0"),
        ({"shapes": [{"kind": "circl"}]}, "shapes.0.kind = 'circl' must be one of 'circle', 'square'; did you mean"),
        ({"shapes": [{"radius": 2}]}, "shapes.0.kind is missing; give one of circle, square"),
        (
            {"shapes": [{"kind": "square", "edge": {"length": 1, "lenght": 2}}]},
            "unknown key 'shapes.0.edge.lenght'; did you mean 'length'?",
        ),
        ({"frame": {"kind": "circle", "radius": 1, "edge": 2}}, "unknown key 'frame.edge'; valid here: kind, radius"),
        ({"frame": {"kind": "square", "edge": {}}}, "frame.edge.length is missing; give it a value, e.g. frame.edge."),
        ({"frame": {"kind": "square", "edge": 3}}, "frame.edge = 3 must be a section with keys"),
        ({"pen": "thik"}, "pen = 'thik' must be 'thin' or 'thick'; did you mean 'thick'?"),
        ({"pen": "\udcff"}, "a text in it is not Unicode; write it in UTF-8"),
        ({"pen": "thik", "frame": 3}, "frame = 3 must be a section with keys; pen = 'thik' must be"),
    ],
)
def test_a_sentence_names_the_place_as_it_is_written(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        settings_from_dict(Drawing, tree, "d.toml")
    assert str(caught.value).startswith(f"d.toml: {words}")


def test_what_is_no_file(tmp_path: Path) -> None:
    assert read_toml("drawing", "house", {"house": "pen = 'thick'"}) == {"pen": "thick"}
    with pytest.raises(InputError, match=r"^no drawing 'hous': did you mean 'house'\? it is neither a file nor one of"):
        read_toml("drawing", "hous", {"house": ""})
    with pytest.raises(InputError, match=r"^no drawing '.*': look elsewhere; it is neither a file nor one of house$"):
        read_toml("drawing", str(tmp_path), {"house": ""}, "look elsewhere;")
    with pytest.raises(InputError, match=r"^cannot read drawing x*: File name too long; give another TOML file$"):
        read_toml("drawing", "x" * 300, {})
