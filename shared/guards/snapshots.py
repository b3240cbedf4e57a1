"""What may not change after a module is wrapped: which parameters it has, and what they look like."""

import operator

from torch import nn

from shared.guards.names import name_of

AGAIN = "change the module before you wrap it, or wrap it again afterwards"


def state_of(parameter: nn.Parameter) -> tuple:
    """Return what must stay the same: whether the parameter is trained, its dtype and its device."""
    return parameter.requires_grad, parameter.dtype, parameter.device


def contents_of(layers: list[nn.Module]) -> list:
    """Return the parameters and submodules of layers."""
    return [held for layer in layers for held in (*layer._parameters.values(), *layer._modules.values())]


class Snapshot:
    """Parameters as they were when they were wrapped, and the layers that had them.

    `flat_parameters` lists what holds the parameters' memory, if anything does.
    """

    def __init__(self):
        self.parameters: dict[str, nn.Parameter] = {}
        self.states: list[tuple] = []
        self.layers: list[nn.Module] = []
        self.contents: list = []
        self.flat_parameters: list = []

    def add(self, parameters: dict[str, nn.Parameter], module: nn.Module | None = None) -> None:
        """Add parameters, and the layers of the module that has them, if it is known."""
        self.parameters |= parameters
        self.states += map(state_of, parameters.values())
        if module is not None:
            self.layers = list(module.modules())
            self.contents = contents_of(self.layers)

    def change(self) -> str | None:
        """Say what is not as it was, and what to do about it, or return None."""
        contents = contents_of(self.layers)
        if len(contents) != len(self.contents) or not all(map(operator.is_, contents, self.contents)):
            return self._replaced()
        states = [state_of(parameter) for parameter in self.parameters.values()]
        if states != self.states:
            return self._changed(states)
        return next(filter(None, map(self._moved, self.flat_parameters)), None)

    def _replaced(self) -> str:
        old, now = set(map(id, self.parameters.values())), dict(self.layers[0].named_parameters())
        for name, parameter in now.items():
            if id(parameter) not in old:
                was = "replaced, perhaps by load_state_dict(assign=True)," if name in self.parameters else "added"
                return f"parameter {name!r} was {was} after the module was wrapped: {AGAIN}"
        gone = sorted(self.parameters.keys() - now.keys())
        without = f" (without {', '.join(map(repr, gone[:3]))})" if gone else ""
        return f"the module has other submodules or parameters than when it was wrapped{without}: {AGAIN}"

    def _changed(self, states: list[tuple]) -> str:
        changes = zip(self.parameters, self.states, states, strict=True)
        name, before, now = next(change for change in changes if change[1] != change[2])
        if now[0] != before[0]:
            return f"parameter {name!r} was {'un' if now[0] else ''}frozen after the module was wrapped: {AGAIN}"
        was, is_now = (f"in {dtype} on {device}" for _, dtype, device in (before, now))
        return f"parameter {name!r} was {was}, and is now {is_now}, after the module was wrapped: {AGAIN}"

    def _moved(self, flat_parameter) -> str | None:
        """Say which parameter does not use the memory of its flat parameter any more."""
        flat = flat_parameter.flat_param
        address = flat.data_ptr()
        for parameter in () if flat.is_meta else flat_parameter.layout.parameters:
            numel = parameter.numel()
            if numel and (parameter.data_ptr() != address or not parameter.is_contiguous()):
                return (
                    f"{name_of(parameter)} got other memory after it was wrapped, so no step can change it: "
                    "write into it with copy_() or clamp_() under no_grad() instead of assigning .data, and call "
                    "to() before you wrap the module"
                )
            address += numel * flat.element_size()
        return None
