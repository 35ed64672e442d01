"""The names that torch gives to the tensors of a checkpoint: those of `torch.distributed.checkpoint.state_dict` for a
module and its optimizer, in a state dict with the keys `model` and `optimizer`. Nothing here imports torch.
"""

from collections.abc import Iterable

MODEL_KINDS = ("master", "frozen", "buffer")


def torch_names(names: Iterable[str]) -> dict[str, str]:
    """Torch's name -> that in the checkpoint, for the model and its optimizer.

    A count of steps that all parameters share has a name for each of them. State with which only the same layout can
    continue has none.
    """
    names = dict.fromkeys(names)
    parameters = [name.removeprefix("master/") for name in names if name.startswith("master/")]
    by_torch_name = dict[str, str]()
    for name in names:
        kind, _, rest = name.partition("/")
        if kind in MODEL_KINDS:
            by_torch_name[f"model.{rest}"] = name
        elif not rest:
            by_torch_name |= {f"optimizer.state.{parameter}.{kind}": name for parameter in parameters}
        elif f"master/{rest}" in names:
            by_torch_name[f"optimizer.state.{rest}.{kind}"] = name
    return by_torch_name


def aliases(names: Iterable[str]) -> dict[str, str]:
    """Every name under which a state dict may ask for a tensor -> that in the checkpoint.

    They are those of the checkpoint, torch's, and torch's for the state dict of a module alone. The first ones win.
    """
    names = list(names)
    named = torch_names(names)
    module_names = {key.removeprefix("model."): name for key, name in named.items() if key.startswith("model.")}
    return module_names | named | {name: name for name in names}
