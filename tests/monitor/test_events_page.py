"""The page about the events is the one that the types give."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    page = runpy.run_path(str(ROOT / "scripts/write_events_page.py"))["page"]()
    assert (ROOT / "docs/reference/events.md").read_text() == page, "run scripts/write_events_page.py"
