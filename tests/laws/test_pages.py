"""The generated pages and pictures of docs/ are those that the code gives."""

import docs
import pytest
from docs import DOCS, PAGES, is_current
from golden import FOLDER


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_up_to_date(page: str) -> None:
    assert is_current(page), f"run: python scripts/docs.py {page}"


def test_every_setting_is_on_the_page_of_the_job() -> None:
    """The generator draws tables; the list of settings is the frozen one."""
    page = (DOCS / "reference/job.md").read_text(encoding="utf-8")
    frozen = (FOLDER / "job_fields.txt").read_text(encoding="utf-8").splitlines()
    settings = [line.partition(":")[0] for line in frozen]
    keys = {setting.rpartition(".")[2] for setting in settings if "." in setting} - {"family"}
    assert {key for key in keys if f"| `{key}` |" not in page} == set()


def test_every_picture_is_generated_and_shown() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    pictures = [f"pictures/{path.name}" for path in (DOCS / "pictures").iterdir()]
    assert [name for name in pictures if name not in PAGES or name not in text] == []


def test_an_unknown_page_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["reference/nothing.md"]) == 2
    assert "'reference/nothing.md' is none of the pages" in capsys.readouterr().out
