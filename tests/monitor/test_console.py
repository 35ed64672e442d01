"""One place prints: on the stream that is there at that moment, without eating brackets, JSON that any reader takes."""

import json
import math
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from motet.monitor.stdout_stderr import encode_nonfinite_floats, print_json, stderr_console, stdout_console

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def test_results_and_errors_go_their_own_ways_with_their_brackets(capsys):
    stdout_console().print("[model] has [bold]no[/bold] key :smile:")
    stderr_console().print("x" * 300)
    out, err = capsys.readouterr()
    assert (out, err) == ("[model] has [bold]no[/bold] key :smile:\n", "x" * 300 + "\n")


def test_a_stream_that_is_exchanged_is_followed(capsys):
    for text in ("first", "second"):
        stdout_console().print(text)
        assert capsys.readouterr().out == f"{text}\n"


def test_json_is_printed_as_one_document(capsys):
    print_json({"long": ["y" * 200], "loss": math.nan, "pair": (1, math.inf), "[b]": -math.inf})
    document = json.loads(capsys.readouterr().out)
    assert document == {"long": ["y" * 200], "loss": "NaN", "pair": [1, "Infinity"], "[b]": "-Infinity"}


@given(PLAIN)
def test_whatever_is_printed_is_strict_json_that_float_reads_back(value):
    text = json.dumps(encode_nonfinite_floats(value), allow_nan=False)
    if isinstance(value, float):
        assert repr(float(json.loads(text))) == repr(value)


def test_importing_it_does_not_load_rich():
    code = "import sys, motet.monitor.stdout_stderr; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
