"""The only file that reads and changes the environment; others take variables as arguments.

The backend `motet` reads its run token itself, because torch starts it.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from motet.core.errors import check_input


def read_environment() -> dict[str, str]:
    """A copy of the environment of this process."""
    return dict(os.environ)


def set_environment_variables(variables: Mapping[str, str]) -> None:
    """Set variables of this process, and of the processes that it starts."""
    os.environ.update(variables)


def set_compiler_variables(cache: Path | None) -> None:
    """Let PyTorch keep compiled code in a cache folder, here and in ranks, unless the user has chosen another. Where
    the cache cannot be written, a temporary folder of this user keeps it, and Triton's kernels. torch makes the folder
    for eager jobs, too."""
    if chosen := os.environ.get(name := "TORCHINDUCTOR_CACHE_DIR"):
        problem = _problem_of_folder(Path(chosen))
        check_input(not problem, f"{name} = {chosen!r}: {problem}; name a folder that you can write, or unset it")
    elif cache is not None and not _problem_of_folder(folder := cache / "compiled"):
        os.environ[name] = str(folder)
    elif not _problem_of_folder(folder := Path(tempfile.gettempdir()) / f"motet-{os.getuid()}", is_private=True):
        os.environ[name] = str(folder)
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def _problem_of_folder(folder: Path, *, is_private: bool = False) -> str:
    """Why nothing can be written into a folder, which is made; code in a private one is this user's alone."""
    try:
        folder.mkdir(0o700 if is_private else 0o777, parents=True, exist_ok=True)
        is_foreign = is_private and folder.lstat().st_uid != os.getuid()
    except OSError as error:
        return f"it cannot be made ({error.strerror})"
    return "" if os.access(folder, os.W_OK | os.X_OK) and not is_foreign else "it cannot be written"


def set_device_variables(*, reproducible: bool) -> None:
    """Set the variables that PyTorch reads when CUDA starts, here and in ranks, unless the user has set them: memory in
    segments that grow, which fragments less, and for reproducible runs cuBLAS with one order of additions."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
