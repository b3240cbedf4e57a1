"""The guard of one wrapper or optimizer: it connects the checks of the other modules, and knows what may not change."""

import contextlib
import operator
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from shared.guards import calls
from shared.guards.alarms import Alarm, naming_the_wait
from shared.guards.tensors import descriptions_of, name_of, numbered, reject_meta, reject_split, remember_names
from shared.guards.unused import restore_none

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


OF_OTHERS = "the other ranks' gradients"
EQUALLY_OFTEN = (
    "let all ranks call backward(), finish_gradient_sync(), step() and clip_grad_norm_() equally often, also for a "
    "batch that one of them skips, and look for an error of another rank"
)


class Guard:
    """Watches the parameters of a wrapper.

    Args:
        clip_with: what to call instead of torch's gradient clipping, if no rank has whole gradients.
        has_hooks: whether the wrapper averages gradients by hooks, which call call_hook().
    """

    exchange_of: Any  # the class of exchanges, which Overlapped.attach() sets

    def __init__(self, group: dist.ProcessGroup | None = None, *, clip_with: str = "", has_hooks: bool = False):
        self.alarm, self.snapshot = Alarm(group), Snapshot()
        self.clip_with, self.has_hooks = clip_with, has_hooks
        self.awaits_finish = False  # whether `pending` is reset when gradients are averaged
        self.syncs_at_step = False  # whether there is no finish_gradient_sync(), because step() does the same
        self.notes_versions = False  # whether gradients that backward() has put into flat tensors must stay unchanged
        self.awaits_zero_grad = False  # whether step() has dropped gradients that one process would keep
        self.adds_to_used = False  # whether backward() would add to these in one process
        self.pending = False  # whether a parameter has a gradient that is not the mean yet
        self.is_joint = False  # whether gradients are added up over the ranks, not averaged
        self.summed: set[int] = set()  # the ids of parameters whose gradients have been added up
        self._register()

    def _register(self) -> None:
        self.ids = set(map(id, self.snapshot.parameters.values()))  # of what no later guard has taken over
        self.versions: dict[int, int] = {}  # of flat tensors, by the id of their bucket
        self.rivals: list[weakref.ref[Guard]] = []  # guards of other wrappers with hooks on the same parameters
        calls.guard_torch()
        calls.guards.add(self)

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)  # of a copy, which has other parameters
        self._register()
        self.await_finish(self.awaits_finish)

    # Parameters

    def watch(self, module: nn.Module) -> None:
        """Watch all parameters of a module, after checking that all ranks have the same ones.

        Raises:
            ValueError: if the ranks' parameters or buffers differ, or one of them is unusual.
        """
        remember_names(dict(module.named_parameters()))
        self._watch(dict(module.named_parameters()), module)

    def watch_list(self, parameters: list[nn.Parameter]) -> None:
        """Watch more parameters, whose module is not known, after checking that all ranks have the same ones."""
        self._watch(numbered(parameters, self.snapshot.parameters))

    def _watch(self, parameters: dict[str, nn.Parameter], module: nn.Module | None = None) -> None:
        buffers = dict(module.named_buffers() if module else ())
        tensors = parameters | buffers
        if self.alarm.store is not None:  # A dry run needs no values.
            reject_meta(tensors)
        descriptions, error = descriptions_of(tensors)
        for name, buffer in buffers.items():
            if buffer.requires_grad and error is None:
                error = ValueError(f"the buffer {name!r} has a gradient, which is not averaged: make it a parameter")
        device = next((tensor.device for tensor in tensors.values()), self.alarm.device)
        self.alarm.compare(descriptions, device)
        reject_split(parameters, self.alarm.group)
        if error is not None:  # and on every rank, because they have the same tensors
            raise error
        self.snapshot.add(parameters, module)
        self.ids |= set(map(id, parameters.values()))
        self._take_over()

    def watch_again(self, module: nn.Module) -> None:
        """Watch the parameters that a module has now, whose wrapper has sharded some of them."""
        self.snapshot, parameters = Snapshot(), dict(module.named_parameters())
        remember_names(parameters)
        self.snapshot.add(parameters, module)
        self.ids = set(map(id, parameters.values()))

    def _take_over(self) -> None:
        """Take parameters from the guards that have watched them so far, and remember those that average them, too."""
        for other in [guard for guard in calls.guards if guard is not self and self.ids & guard.ids]:
            if other.is_joint:  # its gradients must be added up first
                continue
            other.ids -= self.ids
            if self.has_hooks and other.has_hooks:
                self.rivals.append(weakref.ref(other))
                other.rivals.append(weakref.ref(self))

    def reject_rivals(self, parameter: nn.Parameter) -> None:
        """Raise a RuntimeError if another wrapper's hooks would average this parameter's gradient as well."""
        if any(rival() is not None for rival in self.rivals):
            raise RuntimeError(
                f"{name_of(parameter)} is in two wrappers, which would both divide its gradient: "
                "wrap what they share only once, or delete the other wrapper"
            )

    def reject_used_gradients(self) -> None:
        """Raise a RuntimeError in step() if the gradients would be other ones in one process, without zero_grad()."""
        if self.awaits_zero_grad:
            would = "backward() would add to them" if self.adds_to_used else "this step() would use them again"
            raise RuntimeError(
                f"step() has used the gradients and dropped them, but in one process, {would}: "
                "call the wrapper's zero_grad() between step() and backward()"
            )

    def own(self, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
        """Yield those of the parameters that this guard watches."""
        return (parameter for parameter in parameters if id(parameter) in self.ids)

    def first_pending(self, parameters: Iterable[nn.Parameter]) -> nn.Parameter | None:
        """Return the first of the parameters that has a gradient which is not the mean yet."""
        is_pending = (p for p in self.own(parameters) if self.clip_with or p.grad is not None)
        return next(is_pending, None) if self.pending else None

    # Steps

    def await_finish(self, awaits: bool) -> None:
        """Keep `pending` up to date, if the wrapper's finish_gradient_sync() is guarded.

        Without hooks of the wrapper, the guard registers some. They hold it by a weak reference.
        """
        self.awaits_finish = awaits
        if not awaits or self.has_hooks:
            return
        reference = weakref.ref(self)

        def mark(_parameter: nn.Parameter) -> None:
            if (guard := reference()) is not None:
                guard.mark()

        trained = [parameter for parameter in self.snapshot.parameters.values() if parameter.requires_grad]
        handles = [parameter.register_post_accumulate_grad_hook(mark) for parameter in trained]
        weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def mark(self) -> None:
        """Remember that backward() has computed a gradient."""
        self.pending = self.awaits_finish

    def note_versions(self, buckets: Iterable) -> None:
        """Remember how often the flat tensors of buckets had been changed when backward() used them last."""
        for bucket in buckets:
            if bucket.flat is not None:
                self.versions[id(bucket)] = bucket.flat._version

    def reject_changed(self, buckets: Iterable) -> None:
        """Raise a RuntimeError if gradients in buckets have been changed since backward() used them last."""
        for bucket in buckets:
            version = self.versions.pop(id(bucket), None)
            if version not in (None, bucket.flat._version):
                raise RuntimeError(
                    f"the gradient of {name_of(bucket.parameters[0])} or another one in its bucket was changed after "
                    "backward() had put it there: if an exception ends backward(), call finish_gradient_sync() before "
                    "you change gradients, also before zero_grad(set_to_none=False), or set them to None"
                )

    def check_unchanged(self) -> None:
        """Raise a RuntimeError if the module or its parameters have changed since they were wrapped."""
        if (change := self.snapshot.change()) is not None:
            raise RuntimeError(change)

    @contextlib.contextmanager
    def synchronizing(self, exchange):
        """Check gradients before the with-block exchanges them, and afterwards whether another rank has a problem."""
        problem = None
        try:
            self.check_unchanged()
            exchange.check()
        except RuntimeError as error:
            problem = error
        if exchange.asks_first:
            self.alarm.agree(problem)
        elif problem is not None:
            self.alarm.ring(problem, exchange.send_nan)
        parameters = () if exchange.is_sharded else self.snapshot.parameters.values()
        without = [parameter for parameter in parameters if parameter.grad is None and parameter.requires_grad]
        with naming_the_wait(self.alarm.group, lambda: OF_OTHERS, EQUALLY_OFTEN):
            yield
        if exchange.adds_up:
            self.summed = set(self.ids)
        self.alarm.listen(exchange.mean())
        self.pending = False
        restore_none(without)
