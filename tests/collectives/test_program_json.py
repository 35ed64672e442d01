"""Programs as JSON: what is written is read again, and what makes no sense is refused with a sentence."""

import json
from typing import Any

import pytest

from motet.collectives import Program, build
from motet.collectives.algorithms import find_algorithm
from motet.collectives.prove.program_checker import prove_program
from motet.core.errors import InputError
from program_library import ALL


def test_every_program_survives_being_written() -> None:
    for names in ALL:
        built = build(*names, next(filter(find_algorithm(*names).supports, range(4, 65))))
        assert Program.from_json(built.to_json()) == Program.from_json(json.loads(built.to_json())) == built


def test_the_fields_are_those_of_version_1() -> None:
    assert json.loads(build("all-reduce", "ring", 2).to_json()) == json.loads("""
        {"version": 1, "collective": "all-reduce", "algorithm": "ring", "ranks": 2, "chunks": 2, "sizes": [1, 1],
        "initial": [[0, 1], [0, 1]], "final": [{"0": [0, 1], "1": [0, 1]}, {"0": [0, 1], "1": [0, 1]}], "ports": 1,
        "steps": [
        [{"src": 0, "dst": 1, "chunk": [1, 1], "op": "reduce"}, {"src": 1, "dst": 0, "chunk": [0, 0], "op": "reduce"}],
        [{"src": 0, "dst": 1, "chunk": [0, 0], "op": "copy"}, {"src": 1, "dst": 0, "chunk": [1, 1], "op": "copy"}]]}
    """)


def test_a_program_of_another_tool_is_proven() -> None:
    """A chain of three ranks with chunks of unequal sizes."""
    record = {"version": 1, "collective": "broadcast", "algorithm": "chain-of-mine", "ranks": 3, "chunks": 2}
    steps = [[{"src": rank, "dst": rank + 1, "chunk": [0, 1], "op": "copy"}] for rank in range(2)]
    final = [{}, {"0": [0], "1": [0]}, {"1": [0], "0": [0]}]
    read = Program.from_json({**record, "sizes": [3, 1], "initial": [[0, 1], [], []], "final": final, "steps": steps})
    assert (prove_program(read).messages, read.ports, read.message_size_units) == (2, 1, 4)


def _ring(**changes: Any) -> dict[str, Any]:
    return {**json.loads(RING), **changes}


RING = build("all-reduce", "ring", 3).to_json()


def test_a_byte_order_mark_is_passed_over() -> None:
    marked = "\ufeff" + RING
    assert Program.from_json(marked) == Program.from_json(marked.encode()) == build("all-reduce", "ring", 3)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ("{", r"the file: Invalid JSON"),
        (_ring(version=2), r"version: Input should be 1"),
        (_ring(speed=3), r"speed: Extra inputs are not permitted"),
        (_ring(ranks="3"), r"ranks: Input should be a valid integer"),
        (_ring(chunks=4), r"chunks 4 with 3 sizes"),
        (_ring(sizes=[0, 0, 0]), r"sizes: one is negative, or all are 0"),
        (_ring(initial=[[0]]), r"initial and final have 1 and 3 entries for 3 ranks"),
        (_ring(initial=[[0, 7], [0], [0]]), r"rank 0 holds chunk 7; the last one is 2"),
        (_ring(initial=[[0, 2, 0], [0], [0]]), r"initial\[0\] names chunk 0 twice"),
        (RING.replace('"ranks": 3', '"ranks": 3, "ranks": 4'), r"the key 'ranks' is given twice in one object"),
        (RING.replace('{"0": [0, 1, 2]', '{"0": [0, 1, 2], "0": [1]', 1), r"the key '0' is given twice"),
        (RING.replace('"src": 0', '"src": 0, "src": 1', 1), r"the key 'src' is given twice"),
        (RING.encode("utf-16"), r"the file: Invalid JSON"),
        (_ring(final=[{"0": [5]}, {}, {}]), r"final\[0\] names rank 5; the last one is 2"),
        (_ring(final=[{"x": [1]}, {}, {}]), r"final\[0\]: 'x' is not the number of a chunk"),
        (_ring(final=[{"00": [1]}, {}, {}]), r"final\[0\]: '00' is not the number of a chunk"),
        (_ring(final=[{"9" * 5000: [1]}, {}, {}]), r"final\[0\]: '9+' is not the number of a chunk"),
        (_ring(final=[{"\u0661": [1]}, {}, {}]), r"final\[0\]: '\u0661' is not the number of a chunk"),
        (_ring(algorithm="r\x1b[31ming"), r"'all-reduce/r\\x1b.*': collective and algorithm are names, of one line"),
        (_ring(initial=[[], [], []], final=[{}, {}, {}]), r"no rank holds a chunk with a size"),
        (
            _ring(sizes=[0, 0, 1], initial=[[0], [0], [0]], final=[{}, {"0": [0]}, {}]),
            r"no rank holds a chunk with a size",
        ),
        (_ring(ports=0), r"ranks 3, ports 0: give at least 1 of each"),
        (_ring(collective="all-to-all"), r"chunks 3: all-to-all among 3 ranks has 9"),
        (_ring(steps=[[{"src": 0, "dst": 0, "chunk": [0, 0], "op": "copy"}]]), r"step 0: from rank 0 to 0"),
        (_ring(steps=[[{"src": 0, "dst": 3, "chunk": [0, 0], "op": "copy"}]]), r"step 0: from rank 0 to 3"),
        (
            _ring(steps=[[{"src": 0, "dst": 1, "chunk": [1, 0], "op": "copy"}]]),
            r"step 0: chunks 1 to 0; give an ascending range",
        ),
        (_ring(steps=[[{"src": 0, "dst": 1, "chunk": [0, 0], "op": "add"}]]), r"steps.0.0.op: Input should be 'copy'"),
        (None, "None is not a Program; give its JSON as text, as bytes or as a mapping"),
        ({"sizes": object()}, "Object of type object is not JSON serializable"),
        ("\ud800", "surrogates not allowed"),
        ("[" * 100_000, "recursion limit exceeded"),
    ],
)
def test_what_makes_no_sense_is_refused(record: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Program.from_json(record)
