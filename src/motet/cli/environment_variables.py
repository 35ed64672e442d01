"""The only file that reads and changes the environment; others take variables as arguments.

The backend `motet` reads its run token itself, because torch starts it.
"""

import os
from collections.abc import Mapping
from pathlib import Path


def read_environment() -> dict[str, str]:
    """A copy of the environment of this process."""
    return dict(os.environ)


def set_environment_variables(variables: Mapping[str, str]) -> None:
    """Set variables of this process, and of the processes that it starts."""
    os.environ.update(variables)


def set_compiler_variables(cache: Path | None) -> None:
    """Let PyTorch keep compiled code in a cache folder, here and in ranks, unless the user has chosen one."""
    if cache is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "compiled"))


def set_device_variables(*, reproducible: bool) -> None:
    """Set the variables that PyTorch reads when CUDA starts, here and in ranks, unless the user has set them: memory in
    segments that grow, which fragments less, and for reproducible runs cuBLAS with one order of additions."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
