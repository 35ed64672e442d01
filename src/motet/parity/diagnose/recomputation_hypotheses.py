"""Hypotheses about recomputation: backward computes something again, and gets other numbers than forward."""

from motet.parity.diagnose.mismatch_evidence import MismatchEvidence
from motet.parity.record.recomputed_tensors import LEFT_CHANGED
from motet.parity.record.tensor_recorder import RecordedTensor

_CAUSES_FIRST = ("buffer ", "random mask ", "activation ")  # What is first may have caused the others
AFTER_BACKWARD = ("activation gradient", "gradient", "norm", "clipped gradient", "state", "parameter", "buffer")


def is_recomputed_differently(e: MismatchEvidence) -> str:
    """Words for what a rank recorded of a recomputation whose bits are not those of the forward."""
    if e.kind not in AFTER_BACKWARD:
        return ""
    recorded = ((rank, r) for rank, records in enumerate(e.source.records_by_rank) for r in records)
    different = [(rank, record) for rank, record in recorded if record.kind == "recomputed"]
    if not different:
        return ""
    is_of_buffers = e.kind == "buffer"  # Recomputation has changed them, whatever it has computed from them
    rank, record = min(  # The earliest of equals
        different,
        key=lambda each: (
            is_of_buffers and not each[1].name.endswith(LEFT_CHANGED),
            each[0] != e.rank,
            _order(each[1]),
        ),
    )
    place = f"micro-batch {record.microbatch} of rank {rank}" if record.microbatch >= 0 else f"rank {rank}"
    return f"{_words(record.name)} (first on {place})"


def _order(record: RecordedTensor) -> int:
    return next(index for index, prefix in enumerate(_CAUSES_FIRST) if record.name.startswith(prefix))


def _words(name: str) -> str:
    if name.endswith(LEFT_CHANGED):
        return f"{name}, which computes the forward again: it counts what the forward has counted"
    if name.startswith("buffer "):
        return f"backward computes the forward again with another buffer: {name}"
    return f"backward computes the forward again and gets another {name}"
