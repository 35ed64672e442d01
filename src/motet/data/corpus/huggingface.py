"""Hugging Face datasets as a source, through the package `datasets`: `hf:NAME`, `hf:NAME:CONFIG` or `hf:FOLDER`.

A folder is one that `Dataset.save_to_disk` wrote. Of several splits `train` is taken, since motet splits by itself.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from motet.core.errors import InputError


def describe_hf_dataset(source: str) -> tuple[int, int, str]:
    """Rows, bytes (roughly) and the fingerprint of a dataset."""
    dataset = open_hf_dataset(source)
    if len(dataset) == 0:
        raise InputError(f"data source {source!r} is empty (0 rows); give one that holds text")
    return len(dataset), int(dataset.data.nbytes), str(dataset._fingerprint)


@lru_cache(maxsize=4)
def open_hf_dataset(source: str) -> Any:
    """The dataset itself; opened once per process, since it is read in many pieces."""
    try:
        import datasets
    except ImportError:
        raise InputError(f"data source {source!r} needs the package `datasets`; install motet[hf]") from None
    name = source.removeprefix("hf:")
    folder = Path(name).expanduser()
    try:
        if folder.is_dir():
            dataset = datasets.load_from_disk(str(folder))
        else:
            repository, _, config = name.partition(":")
            dataset = datasets.load_dataset(repository, config or None)
    except Exception as error:  # noqa: BLE001 - the library raises kinds of its own for every host and format
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"data source {source!r} could not be loaded: {first_line}") from None
    if isinstance(dataset, dict):
        if "train" not in dataset:
            raise InputError(f"data source {source!r} has no split `train`, only {', '.join(dataset)}")
        dataset = dataset["train"]
    return dataset
