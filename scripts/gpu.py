"""Checks one device: correctness, speed, memory and the plan; writes a JSON and docs/benchmarks/gpu-NAME.md.

Needs Python 3.11 or newer, torch 2.11 to 2.13 and numpy, but no installation of motet and no network: packages that are
missing come from a folder of wheels (`make gpu-wheels`). Keeps to its seconds, writes after every row, and continues
from the rows of its JSON. Ends with 0 when all holds, 1 when something does not, 2 when it cannot start.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

from gpu_checks import wheels  # noqa: E402
from gpu_checks.pool import Pool  # noqa: E402
from gpu_checks.rows import Report, Row, Section, page, slug  # noqa: E402

LAYOUTS = "Layouts of ranks that share the device"
LAYOUT_WORKERS = 4
PLANNED_SECONDS = 300


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=PLANNED_SECONDS, help="the time for all rows")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows or sections whose name contains one of these")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="wheels of packages that are missing here")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results; an existing file is continued")
    parser.add_argument("--page", type=Path, metavar="FILE", help="the page, instead of docs/benchmarks/gpu-NAME.md")
    parser.add_argument("--commit", help="the commit, where git is missing")
    return parser.parse_args()


def sections_for(device: str, folder: str) -> list[Section]:
    """All sections, in the order in which they run. The seconds are shares of 300; sections without a share run in the
    time that others leave, or in the next call, which has the rows of this one."""
    from gpu_checks.kernel_rows import kernel_rows
    from gpu_checks.model_rows import host_model_rows, model_rows, plan_rows, wait_rows
    from gpu_checks.parity_rows import host_rows, layout_rows, parity_rows
    from gpu_checks.speed_rows import block_rows, compiled_block_rows, more_rate_rows, rate_rows

    return [
        Section("Peak rates", 12, rate_rows(device)),
        Section("Waits of the host", 20, wait_rows(device, folder)),
        Section("Correctness", 75, parity_rows(device, folder)),
        Section("Blocks, forward and backward in bf16", 15, block_rows(device)),
        Section("Compiled blocks, forward and backward in bf16", 33, compiled_block_rows(device)),
        Section("Kernels of a block in bf16, forward and backward", 45, kernel_rows(device)),
        Section("Models, bf16 with float32 masters and AdamW", 65, model_rows(device)),
        Section("Plan against measurement", 35, plan_rows(device)),
        Section(LAYOUTS, 0, layout_rows(device, folder)),
        Section("More rates", 0, more_rate_rows(device)),
        Section("States, parameters and activations on the host", 0, host_rows(device, folder)),
        Section("Models with states on the host", 0, host_model_rows(device)),
    ]


def select_rows(sections: list[Section], only: list[str] | None) -> list[Section]:
    """The requested sections and rows."""

    def is_wanted(section: Section, row: Row) -> bool:
        return only is None or any(word.lower() in text.lower() for word in only for text in (section.title, row.name))

    chosen = [Section(s.title, s.share_s, [row for row in s.rows if is_wanted(s, row)]) for s in sections]
    return [section for section in chosen if section.rows]


def facts_of(device: str, commit: str | None) -> dict[str, str]:
    """Facts that are needed to compare the results with others."""
    import torch

    if commit is None:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty=+"]
        try:
            commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            commit = "unknown"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU {platform.machine()}"
    return {
        "device": name, "torch": torch.__version__, "cuda": str(torch.version.cuda), "commit": commit,
        "cores": str(os.cpu_count()), "platform": f"Python {platform.python_version()}, {platform.system()}",
        "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip


def run_all(report: Report, sections: list[Section], write: "PageWriter", *, is_complete: bool) -> None:
    """Run every row within the time of its section, if all are run; unused time goes to the next section."""
    scale, end_s = report.seconds / (sum(section.share_s for section in sections) or 1), report.begin_s
    for section in sections:
        end_s = end_s + section.share_s * scale if is_complete else report.end_s
        for row in section.rows:
            report.run(row, end_s)
            write(report)
        if section.title == LAYOUTS:
            report.pool.keep(1)  # The others hold memory of the device


class PageWriter:
    """Writes the page of all sections again after each row."""

    def __init__(self, path: Path, sections: list[Section], options: str) -> None:
        self._path, self._sections, self._options = path, sections, options

    def __call__(self, report: Report) -> None:
        write_page(self._path, page(report, self._sections, self._options))


def write_page(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main() -> int:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="motet-gpu-") as folder:
        try:
            sys.path[:0] = wheels.unpack_needed(arguments.wheels, Path(folder, "packages"))
        except wheels.MissingWheelError as error:
            print(f"gpu.py: {error}", file=sys.stderr)
            return 2
        return check_device(arguments, folder)


def check_device(arguments: argparse.Namespace, folder: str) -> int:
    """Run the rows, with all of their imports in place."""
    from motet.cli.environment_variables import set_device_variables, set_environment_variables

    set_device_variables(reproducible=True)
    interpreter = {"TRITON_INTERPRET": "1"} if arguments.device == "cpu" else {}
    path = os.pathsep.join(sys.path[:4])
    set_environment_variables({"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **interpreter})
    import torch

    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        print("gpu.py: torch finds no CUDA device here; --device cpu shows that the script starts", file=sys.stderr)
        return 2
    text = "".join(path.read_text() for path in sorted((ROOT / "src/motet/core").glob("*.py")))
    Path(folder, "text.md").write_text(text)
    facts, everything = facts_of(device, arguments.commit), sections_for(device, folder)
    sections = select_rows(everything, arguments.only)
    if not sections:
        print(f"gpu.py: no row or section has {' or '.join(arguments.only)} in its name", file=sys.stderr)
        return 2
    name = slug(facts["device"])
    place = ROOT / ("docs/benchmarks" if device == "cuda" else "build")
    json_path, page_path = arguments.json or ROOT / f"build/gpu-{name}.json", arguments.page or place / f"gpu-{name}.md"
    report = Report(json_path, facts, Pool(device, LAYOUT_WORKERS), arguments.seconds)
    try:
        known = report.resume()
    except ValueError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    count = sum(len(section.rows) for section in sections)
    print(f"{facts['device']}, torch {facts['torch']}: {count} rows in {arguments.seconds:g} s, {known} known already")
    for section in sections:
        print(f"  {section.title}: {len(section.rows)} rows, {sum(row.estimate_s for row in section.rows):g} s")
    write = PageWriter(page_path, everything, f" --seconds {arguments.seconds:g}")
    run_all(report, sections, write, is_complete=not arguments.only)
    report.pool.keep(0)
    states = [report.rows[row.name] for section in sections for row in section.rows]
    failed = [each for each in states if each["holds"] is False]
    left_out = [each for each in states if each["state"] == "left out"]
    print(f"{len(states)} rows: {len(failed)} failed, {len(left_out)} left out; {json_path} and {page_path} written")
    if left_out:
        print("The same call again keeps these rows, and has its time for the ones that were left out")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
