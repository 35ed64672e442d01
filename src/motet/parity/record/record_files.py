"""The files in which ranks leave the records of a layout, and a run reads them."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from motet.parity.record.recorded_phases import NATIVE_PHASE, PhaseStep, phases_and_steps
from motet.parity.record.tensor_recorder import RecordedTensor


@dataclass(frozen=True)
class RecordFolder(Mapping[PhaseStep, list[list[RecordedTensor]]]):
    """The records of one layout by each rank, for every phase and step that it did; read when they are asked for."""

    folder: Path
    layout_index: int
    world: int
    steps: int = 0  # Phases are listed for as many

    @property
    def checkpoint_subfolder(self) -> str:
        return f"layout-{self.layout_index}"

    def __getitem__(self, at: PhaseStep) -> list[list[RecordedTensor]]:
        files = (self._file(at, rank) for rank in range(self.world))
        return [[RecordedTensor(*fields) for fields in torch.load(file, weights_only=True)] for file in files]

    def __iter__(self) -> Iterator[PhaseStep]:
        return (at for at in phases_and_steps(self.steps) if self._file(at, 0).exists())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def native_records(self) -> list[list[RecordedTensor]]:
        return self[PhaseStep(NATIVE_PHASE, 0)]

    def save(self, at: PhaseStep, rank: int, records: list[RecordedTensor]) -> None:
        torch.save([tuple(record) for record in records], self._file(at, rank))

    def mark_done(self, rank: int) -> None:
        self._done_file(rank).touch()

    def is_done(self) -> bool:
        return all(self._done_file(rank).exists() for rank in range(self.world))

    def delete(self) -> None:
        """Delete records and checkpoints; the marks of ranks that are done stay."""
        shutil.rmtree(self.folder / self.checkpoint_subfolder)
        for file in self.folder.glob(f"layout-{self.layout_index}-*-rank-*.pt"):
            file.unlink()

    def _file(self, at: PhaseStep, rank: int) -> Path:
        return self.folder / f"layout-{self.layout_index}-{at.phase.replace(' ', '-')}-{at.step}-rank-{rank}.pt"

    def _done_file(self, rank: int) -> Path:
        return self.folder / f"layout-{self.layout_index}-done-{rank}"


def native_folder(folder: Path) -> Path:
    """The job in its own precision, if it is verified in that too."""
    return folder / "native"
