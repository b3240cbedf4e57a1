"""Names of parameters, for error messages: an optimizer or a bucket gets parameters without their names."""

from collections.abc import Collection, Iterable
from typing import TypeVar

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

Named = TypeVar("Named", bound=Tensor)
_names = WeakIdKeyDictionary()  # of the parameters that have been in a wrapped module


def remember_names(parameters: dict[str, nn.Parameter]) -> None:
    """Remember the names that parameters have in a module."""
    for name, parameter in parameters.items():
        _names[parameter] = name


def name_of(parameter: nn.Parameter | None) -> str:
    """Describe a parameter by its name, or by its shape if no module with it has been wrapped."""
    if parameter in _names:
        return f"parameter {_names[parameter]!r}"
    return f"a parameter of shape {list(getattr(parameter, 'shape', []))}"


def numbered(parameters: Iterable[Named], taken: Collection[str] = ()) -> dict[str, Named]:
    """Name parameters that an optimizer gets without their module, if necessary by index and shape."""
    named = {}
    for index, parameter in enumerate(parameters, len(taken)):
        name = _names.get(parameter)
        if name is None or name in named or name in taken:
            name = f"#{index} of shape {list(parameter.shape)}"
        named[name] = parameter
    return named
