"""Settings and values that earlier versions called something else.

A job with an old name is refused with the new one; the stored job of a run folder is translated, so it can be resumed.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from motet.core.errors import InputError


class RenamedSetting(NamedTuple):
    """A setting whose name or values changed; `old` and `new` are both in `section`."""

    section: str
    old: str
    new: str
    values: tuple[tuple[str, str], ...] = ()  # Old -> new; what ends in `:` is a prefix

    def translate(self, value: Any) -> Any:
        for old, new in self.values if isinstance(value, str) else ():
            if value == old or (old.endswith(":") and value.startswith(old)):
                return new + value.removeprefix(old)
        return value


_TRANSPORTS = (("messages", "point-to-point"), ("programs", "collectives"))
RENAMED_SETTINGS = (
    RenamedSetting("layout", "regather", "reshard_after_forward"),
    RenamedSetting("layout", "whole_below", "min_shard_numel"),
    RenamedSetting("layout.server", "place", "placement", (("own", "dedicated"), ("workers", "colocated"))),
    RenamedSetting("layout.server", "transport", "transport", _TRANSPORTS),
    RenamedSetting("layout.server", "reduce", "reduce_algorithm"),
    RenamedSetting("layout.server", "broadcast", "broadcast_algorithm"),
    RenamedSetting("layout.server", "first", "first_k"),
    RenamedSetting("layout.server", "order", "send_order", (("need", "priority"), ("arrival", "fifo"))),
    RenamedSetting("layout.server", "compress", "compress_pushes"),
    RenamedSetting("layout.server", "rate", "learning_rate_scaling", (("plain", "none"),)),
    RenamedSetting("layout.server", "shares", "work_items_per_step"),
    RenamedSetting("layout.server", "patience_s", "eviction_timeout_s"),
    RenamedSetting("layout.server", "spares", "max_process_restarts"),
    RenamedSetting("layout.server", "piece_mib", "slice_mib"),
    RenamedSetting("monitor", "watch_every", "replica_check_every"),
    RenamedSetting("monitor", "watch", "replica_check_action"),
    RenamedSetting("outer", "mix", "mixing_factor"),
    RenamedSetting("data", "source", "source", (("made:", "synthetic:"),)),
    RenamedSetting("data.mixture", "source", "source", (("made:", "synthetic:"),)),
)


def check_no_renamed_settings(tree: dict[str, Any], source: str) -> None:
    """Refuse a job, as plain nested values, that uses an old name or an old value."""
    for setting, section in _uses(tree):
        names = [f"{setting.section}.{name}" for name in (setting.old, setting.new)]
        values = section[setting.old], setting.translate(section[setting.old])
        texts = names if values[0] == values[1] else map("{} = {!r}".format, names, values)
        raise InputError(f"{source}: {' is now '.join(texts)}")


def translate_renamed_settings(tree: dict[str, Any]) -> None:
    """Give the settings of a stored job the names and values of today, in place."""
    for setting, section in _uses(tree):
        section[setting.new] = setting.translate(section.pop(setting.old))


def _uses(tree: dict[str, Any]) -> Iterator[tuple[RenamedSetting, dict[str, Any]]]:
    for setting in RENAMED_SETTINGS:
        for section in _sections(tree, setting.section.split(".")):
            value = section.get(setting.old)
            if setting.old in section and (setting.old != setting.new or setting.translate(value) != value):
                yield setting, section


def _sections(value: Any, path: list[str]) -> list[dict[str, Any]]:
    """The sections at `path`: several where a list of them stands on the way."""
    if isinstance(value, list):
        return [section for item in value for section in _sections(item, path)]
    if isinstance(value, dict):
        return _sections(value.get(path[0]), path[1:]) if path else [value]
    return []
