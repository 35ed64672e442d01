"""A layout against one device. As a function, `motet.parity(model_fn, layouts, batch_fn)`: see library.py."""

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """The room and the function have one name; whichever is imported first, `motet.parity` is both."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from motet.parity.api import verify

        return verify(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
