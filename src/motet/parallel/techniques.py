"""The techniques of distributed training that settings choose, and the table of the pairs that work together.

docs/reference/compositions.md is made from the table; tests/train/test_techniques.py compares it with jobs.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from motet.core.errors import InputError

AcceptedValues = tuple[str | int | None, ...] | Literal["set", "unset", "above 1"]


def is_accepted(value: object, accepted: AcceptedValues) -> bool:
    """Whether a setting has one of the accepted values."""
    if accepted == "above 1":
        return isinstance(value, int) and value > 1
    return value in accepted if isinstance(accepted, tuple) else bool(value) == (accepted == "set")


# Technique -> the settings with which a job uses it; the first of them stands in messages.
TECHNIQUES: dict[str, dict[str, AcceptedValues]] = {
    **{f"stage {stage}": {"layout.zero": (stage,)} for stage in range(4)},
    "shard groups": {"layout.shard_group": "set"},
    "secondary shard groups": {"layout.secondary_group": "set"},
    "forward overlap at stage 0": {
        "communication.overlap": ("forward",),
        "layout.zero": (0,),
        "outer.every": (None,),  # A replica of stage 0 is one rank, which has nothing to overlap
    },
    "forward overlap at stages 1 and 2": {"communication.overlap": ("forward",), "layout.zero": (1, 2)},
    "compression of gradients": {"communication.compress_gradients": "set"},
    "compression of parameters": {"communication.compress_parameters": "set"},
    "independent replicas": {"outer.every": "set"},
    "parameter server of processes": {
        "layout.data": ("parameter_server",),
        "layout.server.transport": ("point-to-point",),
    },
    "parameter server by collectives": {
        "layout.data": ("parameter_server",),
        "layout.server.transport": ("collectives",),
    },
    "reproducible layouts": {"run.reproducible": "set"},
    "replica checks": {"monitor.replica_check_every": "set"},
    "tensor parallelism": {"layout.tp": "above 1"},
    "sequence parallelism": {"layout.sp": "set", "layout.tp": "above 1"},
    "pipeline parallelism": {"layout.pp": "above 1"},
    "context parallelism": {"layout.cp": "above 1"},
    "expert parallelism": {"layout.ep": "above 1"},
    "loss scaling": {"precision.recipe": ("fp16",)},
    "numerics monitor": {"monitor.numerics_every": "set"},
    "compact moments": {"precision.moment_dtype": "set"},
    "states on the host": {"memory.optimizer": ("host",)},
    "states on disk": {"memory.optimizer": ("disk",)},
    "parameters on the host": {"memory.parameters": ("host",), "memory.optimizer": ("host", "disk")},
    "activations on the host": {"memory.activations": ("host",)},
    "delayed updates": {"memory.update": ("delayed",), "memory.optimizer": ("host", "disk")},
    "parameters on disk": {"memory.parameters": ("disk",), "memory.optimizer": ("disk",)},
    "forward overlap at stage 3": {
        "communication.overlap": ("forward",),
        "layout.zero": (3,),
        "memory.optimizer": ("host", "disk"),
    },
    "simulated device limit": {"memory.device_limit": "set"},
    "selective recomputation": {"memory.recompute": ("selective",)},
    "recomputation within a budget": {"memory.recompute": ("auto",)},
    "mixture of experts": {"model.experts": "set"},
    "compiled blocks": {"run.compile": ("blocks",)},
}

# One row a technique, one column a technique, in the order above. `+` works, `=` takes two values of one setting, a
# letter is refused because of a line below. The diagonal is the technique itself.
_TABLE = """
+
= +
= = +
= = = +
z + + + +
s s s + + +
+ = = = z s +
= + + = + s = +
+ + + + + + f + +
z + + + + + z + + +
+ + + + + w = + + + +
k k k k k k k k k k k +
k k k k k k k k k k k = +
+ + + + + + t + c c i o o +
+ + + + + + + + + + + m + + +
+ + + + + + + + + + a v v r + +
+ + + + + + + + + + a v v r + + +
+ + + + + + + + + + a v v + p + + +
+ + + + + + + + + + F G G H + + + + +
n n n n n n n n n n n n n n n n n n n n
+ + + + + + + + e + j l l + + + + + + n +
+ + + + + + + + + + + u + + + + + + + n + +
+ + + + + + + + + + + q + + + + + + + n + + +
+ + + + + + g + + + b d d + + + + + + n + + + +
+ + + + + + g + + + b d d + + + + + + n + + x = +
y y y + + h y y + + b d d A + + + + + n + + + + + +
+ + + + + + + + + + + B + + + + + + + n + + + + + + +
+ + + + + + g + + + b d d + + + + + + n + + + + + D + +
y y y + + h y y + + b d d A + + + + + n + + x = + = + E +
= = = + + + = = + + b d d + + + + + + n + + + + + + + + C +
+ + + + + + + + + + + P P + + + + + + n + + + + + + + + + + +
+ + + + + + + + + + + + + + + + + + + n + + + + + + + + + + + +
+ + + + + + + + + + + + + + + + + + + n + + + + + + R + + + + = +
+ + + + + + + + + + + Q + + + + + + + n + + + + + + + + + + + + + +
+ + + + + + J J + + + O + K + + + + L n + + + + + + M + + + I I I N +
"""

_CONFLICT = "{row} does not go with {column}: REASON; leave one of them out"
# Letter -> why the pair is refused, or the whole sentence.
REFUSALS: dict[str, str] = {
    "z": "at stage 0 every rank holds all parameters",
    "s": "only stage 3 gathers parameters again for backward",
    "w": "a replica has no secondary copies",
    "k": "servers sum the gradients and keep the parameters",
    "c": "a codec rounds by the elements on one rank",
    "i": "another number of independent replicas is another training",
    "a": "independent replicas average whole models, and a rank holds a part of one",
    "v": "servers keep whole tensors, and workers compute whole models",
    "r": "the ranks of a split layer add partial sums, which round differently for each number of them",
    "p": "a rank that repeats the work of another has some of the blocks, and no loss",
    "o": "servers add gradients in the order in which workers push them",
    "f": "{column} with layout.zero = 0 sends gradients uncompressed; use layout.zero = 1, or leave "
    "communication.compress_gradients out",
    "t": "{column} with layout.zero = 0 cannot be had with {row}, whose sums arrive together; use layout.zero = 1, or "
    "leave communication.overlap out",
    "m": "{row} compares ranks that take a step together, which workers of a parameter server do not; leave it out, or "
    "set layout.server.transport=collectives",
    "e": "the error of a codec is added to gradients of the next step, whose loss scale may differ",
    "j": "an overflow would change the loss scale of one replica alone",
    "l": "servers decide about updates by themselves, without a loss scale",
    "u": "{row} counts tensors of ranks that take a step together, which workers of a parameter server do not; leave "
    "it out, or set layout.server.transport=collectives",
    "q": "servers of processes update with torch's optimizers, whose moments have the dtype of the masters",
    "g": "{column} with layout.zero = 0 updates all masters on every device as sums arrive, and {row} updates them on "
    "the host; use layout.zero = 1, or leave communication.overlap out",
    "b": "independent replicas average masters on their devices",
    "d": "the states of a parameter server lie in the memory of its processes",
    "y": "{row} needs layout.zero = 3, at which a block is gathered before it computes; set layout.zero=3, also with "
    "one rank, or leave memory.parameters out",
    "h": "ranks keep secondary shards of gathered parameters on their devices",
    "A": "a shard group of one rank exchanges no partial sums at stage 3",
    "D": "{row} changes masters while a step computes, and {column} lets it compute with them; leave one of them out",
    "E": "{column} changes masters while a step computes, and {row} lets it compute with them; leave one of them out",
    "x": "pieces of a file have one dtype for all parameters",
    "B": "workers of server processes keep the activations of whole models on their devices",
    "C": "the host reads rows of the next blocks ahead, which are not updated yet then",
    "F": "a replica is one shard group, and ranks of several replicas would compute parts of the same rows",
    "G": "workers of a parameter server compute whole rows",
    "I": "a setting that follows each kernel of a step cannot see inside of a graph",
    "J": "layers wait for their own values in a forward, and a compiled block is one graph",
    "K": "compiled code may add in another order for another number of rows",
    "L": "attention exchanges keys between ranks while a block runs, which is no part of a graph",
    "M": "the tensors that a compiled block keeps are chosen by the compiler",
    "N": "experts compute with numbers of rows that follow from the data, and a graph has fixed shapes",
    "O": "workers of a parameter server run their blocks eagerly",
    "P": "servers and workers hold tensors in the memory of their processes",
    "Q": "{column}: the loads of experts are sums over the ranks that take a step together, which workers of servers "
    "do not; set layout.server.transport=collectives, or leave {row} out",
    "R": "a budget decides which tensors are kept, and the host keeps the others",
    "H": "the ranks that share a row add partial sums, which round differently for each number of them",
    "n": "{row}: {technique} is not built yet; leave {setting} out",
}


def technique_pairs() -> Iterator[tuple[str, str, str]]:
    """(technique, itself or an earlier one, `+`, `=` or the letter of a refusal)."""
    for technique, cells in zip(TECHNIQUES, _TABLE.strip().splitlines(), strict=True):
        yield from ((technique, other, cell) for other, cell in zip(TECHNIQUES, cells.split(), strict=False))


def used_techniques(settings: Mapping[str, Any]) -> dict[str, str]:
    """Technique -> the setting that chooses it, such as `layout.tp = 2`, of the sections of a job as nested values."""
    used = {}
    for technique, needed in TECHNIQUES.items():
        values = {key: nested_value(settings, key) for key in needed}
        if all(is_accepted(values[key], accepted) for key, accepted in needed.items()):
            key, value = next(iter(values.items()))
            text = f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
            used[technique] = f"[{key}]" if isinstance(value, Mapping) else text
    return used


def conflict_with(technique: str, settings: Mapping[str, Any]) -> str | None:
    """Why a technique would not go together with settings, as nested values without ineffective ones."""
    used = used_techniques(settings)
    for row, column, cell in technique_pairs():
        other = {row: column, column: row}.get(technique)
        if other in used and cell in REFUSALS:
            return f"{used[other]}: {REFUSALS[cell]}"
    return None


def check_techniques(settings: Mapping[str, Any]) -> None:
    """Refuse settings, as nested values without ineffective ones, whose techniques do not work together."""
    used = used_techniques(settings)
    for technique, other, cell in technique_pairs():
        if technique in used and other in used and cell in REFUSALS:
            text = REFUSALS[cell] if "{" in REFUSALS[cell] else _CONFLICT.replace("REASON", REFUSALS[cell])
            setting = next(iter(TECHNIQUES[technique]))
            row, column = used[technique], used[other]
            raise InputError(text.format(row=row, column=column, technique=technique, setting=setting))


def nested_value(settings: Mapping[str, Any], key: str) -> Any:
    """The value of a setting `section.name` in nested values, or None without it."""
    value: Any = settings
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
