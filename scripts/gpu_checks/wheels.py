"""Packages that a machine without a network is missing, from a folder of wheels for several versions of Python."""

import platform
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection")


class MissingWheelError(Exception):
    """A needed package is neither installed nor among the wheels."""


def fits(wheel: str) -> bool:
    """Whether this Python can import the content of the wheel of this name."""
    python, abi, system = wheel.removesuffix(".whl").split("-")[-3:]
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    own_abis = {"none", "abi3", version + getattr(sys, "abiflags", "")}
    is_pure = "py3" in python.split(".") and abi == "none" and system == "any"
    is_native = version in python.split(".") and abi in own_abis
    return is_pure or (is_native and sys.platform in system and system.endswith(platform.machine()))


def unpack_needed(folder: Path | None, into: Path) -> list[str]:
    """Unpack the needed packages unless all are installed; returns the folders to import from."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not missing:
        return []
    wheels = sorted(path for path in folder.glob("*.whl") if fits(path.name)) if folder else []
    by_name = {path.name.split("-")[0].lower(): path for path in wheels}
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if absent := [name for name in missing if name not in by_name]:
        place = f"{folder} has no wheel of it" if folder else "no --wheels FOLDER is given"
        raise MissingWheelError(
            f"{absent[0]} is not installed, and {place} for Python {version} on {platform.machine()}; "
            f"run `make gpu-wheels PY={version}` where there is a network, and bring build/gpu-wheels along"
        )
    for name in NEEDED:  # All packages, since their versions belong together
        if name in by_name:
            zipfile.ZipFile(by_name[name]).extractall(into)
    return [str(into)]
