"""Changes of bytes, and of the values in a tree of plain values such as JSON and TOML have them."""

import random
import string
from collections.abc import Callable, Sequence
from typing import Any

Path = tuple[str | int, ...]

INTERESTING_BYTES = (
    b"\0",
    b"\xff" * 8,
    b"\x80\x02c",  # The start of a pickle
    b"\n",
    b'"',
    b"{" * 50,
    b"[" * 3000,
    b"9" * 5000,
    b"\xed\xa0\x80",  # Half of a surrogate pair
    b"\xef\xbb\xbf",  # A byte-order mark
    b"1e999",
    b"NaN",
    b"-",
    b"../",
)


def _flip_bit(rng: random.Random, data: bytearray) -> str:
    index, bit = rng.randrange(len(data)), rng.randrange(8)
    data[index] ^= 1 << bit
    return f"bit {bit} of byte {index} flipped"


def _set_byte(rng: random.Random, data: bytearray) -> str:
    index = rng.randrange(len(data))
    data[index] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return f"byte {index} set to {data[index]}"


def _cut_tail(rng: random.Random, data: bytearray) -> str:
    length = rng.choice((0, len(data) - 1, rng.randrange(len(data))))
    del data[length:]
    return f"cut to {length} bytes"


def _span(rng: random.Random, data: bytearray) -> slice:
    start = rng.randrange(len(data))
    return slice(start, start + 1 + rng.randrange(min(len(data) - start, rng.choice((4, 64, 4096)))))


def _delete(rng: random.Random, data: bytearray) -> str:
    span = _span(rng, data)
    del data[span]
    return f"bytes {span.start} to {span.stop} deleted"


def _insert(rng: random.Random, data: bytearray) -> str:
    index = rng.randrange(len(data) + 1)
    inserted = rng.choice((*INTERESTING_BYTES, rng.randbytes(rng.choice((1, 4, 100)))))
    data[index:index] = inserted
    return f"{inserted[:20]!r} inserted at {index}"


def _repeat(rng: random.Random, data: bytearray) -> str:
    span, times = _span(rng, data), rng.choice((1, 2, 50))
    data[span.stop : span.stop] = bytes(data[span]) * times
    return f"bytes {span.start} to {span.stop} repeated {times} times"


def _swap(rng: random.Random, data: bytearray) -> str:
    (first, second) = sorted((_span(rng, data), _span(rng, data)), key=lambda span: span.start)
    second = slice(max(second.start, first.stop), max(second.stop, first.stop))
    data[first.start : second.stop] = data[second] + data[first.stop : second.start] + data[first]
    return f"bytes {first.start} to {first.stop} and {second.start} to {second.stop} swapped"


def _overwrite(rng: random.Random, data: bytearray) -> str:
    span, fill = _span(rng, data), rng.choice((b"\0", b"\xff", b" ", None))
    length = len(data[span])
    data[span] = rng.randbytes(length) if fill is None else fill * length
    return f"bytes {span.start} to {span.stop} overwritten with {fill or 'noise'!r}"


BYTE_CHANGES: tuple[Callable[[random.Random, bytearray], str], ...] = (
    _flip_bit,
    _set_byte,
    _cut_tail,
    _delete,
    _insert,
    _repeat,
    _swap,
    _overwrite,
)


def change_bytes(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """The content after one to three changes, and the changes in words."""
    data, changes = bytearray(content), []
    for _ in range(rng.choice((1, 1, 2, 3))):
        changes.append(rng.choice(BYTE_CHANGES)(rng, data) if data else _insert(rng, data))
    return bytes(data), "; ".join(changes)


# --- values ------------------------------------------------------------------------------------------

INTEGERS = (0, 1, -1, 2, 255, 256, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64)
HUGE_INTEGER = 10**400
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.5, 1e308, 1e-320, 1e-9, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    " ",
    "0",
    "-1",
    "true",
    "null",
    "a\0b",
    "a\nb",
    "\x1b[31m",
    "\u202e",
    "\ud800",
    "é" * 300,
    "x" * 5000,
    "../../../etc/passwd",
    "/dev/zero",
    "/",
    ".",
    "~",
    "~nobody-of-this-name/x",
    "*",
    "[",
    "%s%n",
    "{0}",
    "${HOME}",
    "$(touch canary)",
    "os:system",
    "__import__('os').system('touch canary')",
    "step-00000004",
    "manifest.json",
    "nan",
    "9" * 5000,
)


def nested(depth: int, kind: type) -> Any:
    """A list or a mapping in another one, `depth` times."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


def other_value(rng: random.Random, value: Any) -> Any:
    """A value instead of `value`: similar, of another type, or extreme."""
    similar: list[Callable[[], Any]] = [lambda: rng.choice(INTEGERS), lambda: rng.choice(FLOATS)]
    if isinstance(value, bool):
        similar = [lambda: not value, lambda: int(value)]
    elif isinstance(value, int | float):
        similar += [lambda: value + 1, lambda: value - 1, lambda: -value, lambda: value * 2, lambda: str(value)]
    elif isinstance(value, str) and value:
        similar = [
            lambda: value[:-1],
            lambda: value + rng.choice(string.printable),
            lambda: value.upper(),
            lambda: value.replace(rng.choice(value), rng.choice(string.printable)),
            lambda: rng.choice(TEXTS),
        ]
    elif isinstance(value, list) and value:
        similar = [lambda: value[:-1], lambda: [*value, value[-1]], lambda: value[::-1], list, lambda: value[0]]
    elif isinstance(value, dict) and value:
        similar = [dict, lambda: list(value.values()), lambda: {**value, "unknown": 1}]
    extreme: list[Callable[[], Any]] = [
        lambda: rng.choice(INTEGERS),
        lambda: rng.choice(FLOATS),
        lambda: rng.choice(TEXTS),
        lambda: rng.choice((True, False)),
        lambda: None,
        list,
        dict,
        lambda: [value],
        lambda: {"a": value},
        lambda: HUGE_INTEGER * rng.choice((1, -1)),
        lambda: nested(rng.choice((5, 100)), rng.choice((list, dict))),
    ]
    return rng.choice(similar if rng.random() < 0.6 else extreme)()


def paths(tree: Any, prefix: Path = ()) -> list[Path]:
    """The places of all values in a tree, with that of the tree itself first."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [prefix, *(path for key, value in items for path in paths(value, (*prefix, key)))]


def value_at(tree: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def change_tree(rng: random.Random, tree: Any) -> tuple[Any, str]:
    """The tree with one value changed, deleted, doubled, renamed or exchanged, in place, and the change in words."""
    path = rng.choice(paths(tree)[1:] or [()])
    if not path:
        return other_value(rng, tree), "the value itself replaced"
    parent, key = value_at(tree, path[:-1]), path[-1]
    name, old = ".".join(map(str, path)), parent[key]
    match rng.choice(("replace",) * 6 + ("delete", "add", "rename", "exchange")):
        case "delete":
            del parent[key]
            return tree, f"{name} deleted"
        case "add":
            added = other_value(rng, old)
            if isinstance(parent, list):
                parent.insert(rng.randrange(len(parent) + 1), added)
            else:
                parent[rng.choice(("unknown", f"{key}2", "", "__class__"))] = added
            return tree, f"{added!r:.200} added to {name}"
        case "rename" if isinstance(parent, dict):
            other = rng.choice((f"{key}_", str(key).upper(), str(key)[:-1], "self"))
            parent[other] = parent.pop(key)
            return tree, f"{name} renamed to {other}"
        case "exchange":
            other_path = rng.choice(paths(tree)[1:])
            other_parent, other_key = value_at(tree, other_path[:-1]), other_path[-1]
            value = other_parent[other_key]
            if path[: len(other_path)] != other_path and other_path[: len(path)] != path:
                parent[key], other_parent[other_key] = value, old
            return tree, f"{name} exchanged with {'.'.join(map(str, other_path))}"
    parent[key] = other_value(rng, old)
    return tree, f"{name}: {old!r:.100} -> {parent[key]!r:.200}"
