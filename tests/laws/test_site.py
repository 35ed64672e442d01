"""The site and the README: links open, code on pages runs, and figures are those of the pages that measure them."""

import importlib.util
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from unicodedata import normalize

import pytest
from pages import DOCS, ROOT, command_outputs, planning_constants

from motet.collectives.algorithms.registry import _ALGORITHMS
from motet.parallel.data_parallel.zero import ZERO_STAGES
from motet.parallel.pipeline.schedules import SCHEDULES
from motet.train.job import load_job

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
MADE_WITH_THE_SITE = {DOCS / "pictures/ring.html", DOCS / "pictures/halving-doubling.html"}


def prose(path: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors of headings, as Python-Markdown makes them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading) for heading in headings)
    ascii_only = (normalize("NFKD", heading).encode("ascii", "ignore").decode() for heading in plain)
    named = re.findall(r"^#+ .*\{ ?#([\w-]+) ?\}$", text, re.MULTILINE)
    return {
        *named,
        *(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in ascii_only),
    }


def broken_links(path: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^()\s]+)\)", prose(path)):
        if not re.match(r"\w+:", link):
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            is_missing = not target.exists() and target not in MADE_WITH_THE_SITE
            if is_missing or (anchor and anchor not in anchors(target)):
                broken.append(f"{path.relative_to(ROOT)}: {link}")
    return broken


def test_every_internal_link_of_a_page_opens() -> None:
    assert [link for page in PAGES for link in broken_links(page)] == []
    hook = (ROOT / "scripts/mkdocs_hook.py").read_text(encoding="utf-8")
    assert all(f'"{page.stem}"' in hook for page in MADE_WITH_THE_SITE)


def test_every_page_is_in_the_menu_once() -> None:
    menu = re.findall(r"\s([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("name", command_outputs.PAGES)
def test_output_on_a_page_stands_in_a_block_that_a_script_fills(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- \$\$? (.*?) -->\n```text\n\$ (.*?)\n(.*?)```\n<!-- end -->", text, re.DOTALL)
    if "tutorial" in name:
        assert text.count("\n$ ") == len(blocks) > 0
    assert text.count("<!-- $") == len(blocks)
    assert all(command == shown and output.strip() for command, shown, output in blocks)


def test_the_code_of_the_page_on_additions_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_ALGORITHMS, "all-gather", {**_ALGORITHMS["all-gather"]})
    monkeypatch.setitem(SCHEDULES, "eager-1f1b", SCHEDULES["1f1b"])
    monkeypatch.setitem(ZERO_STAGES, 4, ZERO_STAGES[3])
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "adding.md").read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
    assert len(names["proofs"]) == 15 and "12 messages" in names["picture"]
    assert (names["cost"].alpha, names["cost"].beta * 8) == (7, 7)
    assert "chunk 1 of rank 0 has not arrived" in names["complaint"]
    assert names["faster"] and names["larger"] and names["states"] == (True, True, True)


def test_the_job_of_the_page_on_other_frameworks_has_the_layout_of_the_page(tmp_path: Path) -> None:
    text = (DOCS / "guide/coming-from.md").read_text(encoding="utf-8")
    job_file = tmp_path / "llama.toml"
    job_file.write_text(re.findall(r"```toml\n# llama.toml\n(.*?)```", text, re.DOTALL)[0], encoding="utf-8")
    job = load_job(str(job_file))
    layout = re.findall(r'--layout "(.*?)"', text)[0]
    sizes = dict(word.split("=") for word in layout.split())
    assert (job.layout.tp, job.layout.zero, job.layout.microbatches) == tuple(
        int(sizes[name]) for name in ("tp", "zero", "microbatches")
    )
    assert job.layout.sp and job.memory.recompute == sizes["recompute"]
    assert job.data.batch_sequences == int(re.findall(r"data.batch_sequences=(\d+)", text)[0])


def test_pages_cite_the_planners_error_on_sources_that_were_left_out() -> None:
    error = planning_constants.held_out_error()
    for name in (command_outputs.README, "guide/planning.md"):
        text = (DOCS / name).read_text(encoding="utf-8")
        cited = re.findall(r"([\d.]+) %\S* ?(?:on )?(?:\[published steps|\]?\(\.\./reference/planning-constants)", text)
        assert cited == [error], name


class _Links(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.ids = list[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.ids.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("material") is None:
        pytest.skip("the site needs mkdocs-material: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.proof
def test_every_internal_link_of_the_built_site_opens(site: Path) -> None:
    parsed = {
        path: _Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"
    }
    broken = []
    for path, page in parsed.items():
        for link in page.links:
            if re.match(r"[\w-]+:|//", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            anchored = not anchor or (target in parsed and anchor in {*parsed[target].ids, "__comments"})
            if not target.exists() or not anchored:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert len(parsed) > 80 and broken == []


_WIDTHS = """<script>
onload = () => setTimeout(() => { document.title = [...document.querySelectorAll("iframe")].map(frame =>
  frame.contentDocument.documentElement.scrollWidth).join(" ") }, 1500)
</script>"""


@pytest.mark.proof
def test_no_page_is_wider_than_a_phone(site: Path) -> None:
    """Chromium lays the pages out in frames of 390 pixels; a picture that is wider moves within its paragraph."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("the widths of pages need Chromium; on Debian: apt-get install chromium")
    names = ("", "tutorial/data-parallelism/", "tutorial/pipelines/", "guide/planning/", "guide/coming-from/")
    frames = "".join(
        f'<iframe src="{name}index.html" width="390" height="800" frameborder="0"></iframe>' for name in names
    )
    (site / "widths.html").write_text(f"<html><head>{_WIDTHS}</head><body>{frames}</body></html>", encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--allow-file-access-from-files",
        "--dump-dom",
    ]
    command = [chromium, *options, "--virtual-time-budget=8000", (site / "widths.html").as_uri()]
    dom = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    widths = re.findall(r"<title>(.*?)</title>", dom)
    assert widths == [" ".join(["390"] * len(names))]
