"""The layout of state in files: alignment, padding, and the bytes of an update counted by hand."""

import pytest

from motet.memory.tiers.file_layout import BUFFERED_PIECES, FileLayout, Piece

PAGE = 4096
WIDTHS = {"master": 4, "exp_avg": 8, "exp_avg_sq": 2}


def test_the_bytes_of_an_update_counted_by_hand() -> None:
    layout = FileLayout({"master": 4, "moment": 2}, (1, 2049, 0), piece_bytes=2 * PAGE)
    assert layout.piece_elements == 2048
    assert [list(layout.pieces(index)) for index in range(3)] == [
        [Piece(0, 0, 1)],
        [Piece(1, 0, 2048), Piece(1, 2048, 2049)],
        [],
    ]
    assert [layout.slice_bytes(index) for index in range(3)] == [2 * PAGE, (3 + 2) * PAGE, 0]
    assert (layout.file_bytes("master"), layout.file_bytes("moment"), layout.update_bytes) == (
        4 * PAGE,
        3 * PAGE,
        7 * PAGE,
    )
    assert [layout.offset("master", piece) for piece in layout.pieces(1)] == [PAGE, 3 * PAGE]
    assert [layout.offset("moment", piece) for piece in layout.pieces(1)] == [PAGE, 2 * PAGE]
    assert layout.memory_bytes == BUFFERED_PIECES * (2 + 1) * PAGE


@pytest.mark.parametrize("piece_bytes", [1, 8 * PAGE, 100_000, 4 * 2**20])
def test_pieces_are_aligned_and_cover_each_file_once(piece_bytes: int) -> None:
    layout = FileLayout(WIDTHS, (70_001, 0, 5, 2_000_000, 4096, 1), piece_bytes)
    pieces = [piece for index in range(len(layout.lengths)) for piece in layout.pieces(index)]
    for kind, width in WIDTHS.items():
        end = 0
        for piece in pieces:
            assert layout.offset(kind, piece) == end and end % PAGE == 0
            assert layout.first_element(kind, piece.index) * width == end - piece.start * width
            end += layout.transfer_bytes(kind, piece)
            used = (piece.stop - piece.start) * width
            assert used <= layout.transfer_bytes(kind, piece) < used + PAGE
            assert layout.transfer_bytes(kind, piece) <= layout.buffer_bytes(kind)
            assert layout.buffer_bytes(kind) <= max(piece_bytes, 2048 * width)
        assert end == layout.file_bytes(kind)
    lengths = [0] * len(layout.lengths)
    for piece in pieces:
        assert piece.start == lengths[piece.index]
        lengths[piece.index] = piece.stop
    assert tuple(lengths) == layout.lengths


def test_a_state_without_elements_has_no_bytes() -> None:
    for lengths in ((), (0, 0)):
        layout = FileLayout(WIDTHS, lengths)
        assert (layout.update_bytes, layout.memory_bytes) == (0, 0)
