"""The words of a device's name: model, form, memory size and power limit, in whatever order and spelling.

`NVIDIA A100-SXM4-80GB`, `A100 SXM 80GB` and `a100_80gb` name one device. A word that is none of these belongs to the
model, so that `RTX 4090 Laptop GPU` is another device than `RTX 4090`.
"""

import re
from typing import NamedTuple

_FILLERS = re.compile(
    "nvidia|amd|google|intel|habana|cloud|tesla|geforce|instinct|oam|hgx|dgx|gpu|tensor|core|accelerator|gcd|blackwell|"
    "hopper|grace|superchip|generation|server|edition|workstation|hbm[0-9]*e?|nvl[0-9]+"
)
_SPLIT = re.compile(r"(?<=[0-9a-z])(?=sxm|pcie|hbm)")  # A100SXM4 is A100 SXM4


class DeviceName(NamedTuple):
    """The meaning of a name, with an empty text or None where it says nothing."""

    model: str
    form: str = ""  # sxm, pcie or nvl
    gigabytes: float | None = None
    watts: float | None = None


def parse_device_name(name: str) -> DeviceName:
    """Find the words of a name. Of several sizes the last counts."""
    text = re.sub(r"([0-9]+) +(gi?b|w)\b", r"\1\2", re.sub(r"[^0-9a-z.]+", " ", name.lower()))
    model, form, gigabytes, watts = "", "", None, None
    for word in _SPLIT.sub(" ", text).split():
        if size := re.fullmatch(r"([0-9]+)gi?b?", word):
            gigabytes = float(size[1])
        elif limit := re.fullmatch(r"([0-9]+)w", word):
            watts = float(limit[1])
        elif kind := re.fullmatch(r"(sxm[0-9]?|pcie|nvl)", word):
            form = kind[1][:4].rstrip("0123456789")
        elif not _FILLERS.fullmatch(word):
            model += word
    return DeviceName(model, form, gigabytes, watts)


def is_same_model(asked: str, model: str) -> bool:
    """Whether two names are of one model; the first may leave out the product line, as `A6000` and `v5e` do."""
    return asked in (model, model.removeprefix("rtx"), model.removeprefix("tpu"))
