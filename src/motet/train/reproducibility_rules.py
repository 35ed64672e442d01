"""What `run.reproducible = "layout"` cannot be had with."""

from collections.abc import Iterator
from operator import attrgetter

# Settings, and why; they may have the values that they have when nobody gives any.
_CONFLICTING_SETTINGS = {
    "layout.data": "servers add what workers push as it comes",
    "outer.every": "replicas that train apart are other training for every number of them",
    "communication.compress_gradients": "a codec rounds by what lies on one rank",
    "communication.compress_parameters": "a codec rounds by what lies on one rank",
}


def reproducibility_conflicts(job: object) -> Iterator[str]:
    """A sentence for each setting of a job that makes numbers depend on the layout."""
    for key, reason in _CONFLICTING_SETTINGS.items():
        section, _, name = key.partition(".")
        settings = attrgetter(section)(job)
        value = getattr(settings, name)
        if value != type(settings).model_fields[name].default:
            yield f"run.reproducible = 'layout' cannot be had with {key} = {value!r}: {reason}; leave one of them out"
