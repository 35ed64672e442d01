"""The pages of the reference are those that the code gives."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "function", "page"),
    [
        ("write_job_page.py", "page", "reference/job.md"),
        ("write_cli_page.py", "commands_page", "reference/cli.md"),
        ("write_cli_page.py", "codes_page", "reference/exit-codes.md"),
        ("write_data_page.py", "page", "guide/data-parallelism.md"),
    ],
)
def test_the_page_is_up_to_date(script: str, function: str, page: str) -> None:
    now = runpy.run_path(str(ROOT / "scripts" / script))[function]()
    kept = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert kept == now, f"run scripts/{script}"


def test_the_pictures_of_a_step_are_up_to_date() -> None:
    for name, content in runpy.run_path(str(ROOT / "scripts/write_data_page.py"))["pictures"]():
        assert (ROOT / "docs/pictures" / name).read_text(encoding="utf-8") == content, "run scripts/write_data_page.py"


def test_every_setting_is_on_the_page_of_the_job() -> None:
    """The script draws tables; the list of settings is the one that is frozen."""
    page = (ROOT / "docs/reference/job.md").read_text(encoding="utf-8")
    frozen = (ROOT / "tests/laws/job_fields.txt").read_text(encoding="utf-8").splitlines()
    places = [line.partition(":")[0] for line in frozen]
    keys = {place.rpartition(".")[2] for place in places if "." in place} - {"family"}
    assert {key for key in keys if f"| `{key}` |" not in page} == set()


def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts/draw_rooms.py"))
    kept = script["PICTURE"].read_text(encoding="utf-8")
    assert kept == script["draw"](script["layers"](), script["imports"]()), "run scripts/draw_rooms.py"
