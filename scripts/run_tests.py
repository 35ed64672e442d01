"""Run the tests. With `--coverage`, print the line coverage of the torch-free half too, which must be at least 95 %.

Other arguments are handed to pytest. The torch-free files are those of tests/laws/torch_free.txt. Three processes take
turns at the tests, for many of these wait most of the time; `-n 0` runs them one after another.
"""

import compileall
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEAST_PERCENT = 95


def main() -> int:
    for folder in ("src", "tests"):  # Hundreds of processes load these files
        compileall.compile_dir(ROOT / folder, quiet=1)
    arguments = [argument for argument in sys.argv[1:] if argument != "--coverage"]
    command = [sys.executable, "-m", "pytest", "-n", "3", "--dist", "worksteal", *arguments]
    if len(arguments) == len(sys.argv) - 1:
        return subprocess.run(command, cwd=ROOT, check=False).returncode
    pure = (ROOT / "tests/laws/torch_free.txt").read_text().split()
    include = "".join(f"\n    {ROOT / path}" for path in pure)
    with tempfile.TemporaryDirectory(prefix="motet-coverage-") as folder:
        config = Path(folder) / "coveragerc"
        # Commands and supervisors run as separate processes; their lines count too.
        config.write_text(
            f"[run]\ninclude = {include}\ndata_file = {folder}/data\nparallel = true\npatch = subprocess, _exit\n"
            f"[report]\ninclude = {include}\nskip_covered = true\n"
        )
        coverage = ["--cov", f"--cov-config={config}", "--cov-report=term", f"--cov-fail-under={LEAST_PERCENT}"]
        return subprocess.run([*command, *coverage], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
