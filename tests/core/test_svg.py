"""Pages of SVG: text and legends stay inside, and what a reader gives is escaped."""

import re
from xml.etree import ElementTree

from motet.core.svg import Scale, grid, labelled_box, round_ticks, svg_page, text_width

NAME = "{http://www.w3.org/2000/svg}"


def test_long_notes_and_legends_take_more_lines_and_stay_on_the_page() -> None:
    legend = [("#123456", ""), *(("#1f5fbf", f"meaning {number}") for number in range(30))]
    page = svg_page("a <b> & c", "word " * 60, [], height=100, width=600, legend=legend)
    root = ElementTree.fromstring(page)
    width, height = map(float, root.get("viewBox", "").split()[2:])
    texts = [each for each in root.iter(f"{NAME}text") if each.text]
    assert sum((each.text or "").count("word") for each in texts) == 60 and texts[0].text == "a <b> & c"
    assert sum((each.text or "").startswith("meaning") for each in texts) == 30
    for each in texts:
        x, y = float(each.get("x", "")), float(each.get("y", ""))
        assert 0 < y < height and x + 0.9 * text_width(each.text or "") < width
    notes = {each.get("y") for each in texts if "word" in (each.text or "")}
    assert len(notes) == 4
    plain = ElementTree.fromstring(svg_page("a", "", [], height=100))
    assert float(plain.get("viewBox", "").split()[3]) < height - 100


def test_a_box_has_the_first_label_with_room() -> None:
    place = {"x": 0.0, "y": 0.0, "height": 20.0, "fill": "#1f5fbf"}
    labels = "a long name", "short", "s"
    shown = [labelled_box("box", labels, 'says "<x>"', width=width, **place) for width in (200.0, 50.0, 10.0, 3.0)]
    assert [re.findall("<text[^>]*>([^<]*)", each) for each in shown] == [["a long name"], ["short"], ["s"], []]
    assert all("<title>says &quot;&lt;x&gt;&quot;</title>" in each for each in shown)


def test_scales_and_ticks() -> None:
    linear, logarithmic = Scale(2, 4, 100, 0), Scale(1, 100, 0, 50, is_logarithmic=True)
    assert [linear(2), linear(3), linear(4)] == [100, 50, 0] and logarithmic(10) == 25
    assert round_ticks(44.4) == [0, 10, 20, 30, 40] and round_ticks(3.7e-3) == [n * 5e-4 for n in range(8)]
    lines = "".join(grid(Scale(0, 1, 10, 110), linear, x_ticks={0.5: "half"}, y_ticks={3: ""}))
    assert 'd="M60.0 0 V100"' in lines and 'd="M10 50.0 H110"' in lines and lines.count("<text") == 1
