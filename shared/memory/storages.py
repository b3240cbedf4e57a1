"""Tracks storages: what each one is used for, and how long it exists.

Memory belongs to a storage, not to a tensor; views and tied tensors share one. torch keeps the Python object of a
storage alive as long as the storage itself, no matter who owns it, including autograd in C++. So a weak reference to it
is notified when the storage is freed.
"""

import contextlib
import time
import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

COMPONENTS = ("parameters", "gradients", "optimizer", "buffers", "buckets", "activations", "other")


@dataclass
class Use:
    """The size of a storage, what it is used for, and at which moments of a block it exists."""

    nbytes: int
    component: str = "other"
    viewed_bytes: int = 0  # bytes covered by tensors of that component
    made: bool = False  # created in the block, by an operator or by resizing
    born: int = 0  # its first moment
    died: int | None = None  # the moment after its last

    def claim(self, component: str, viewed_bytes: int = 0) -> None:
        """Add a component that uses this storage. It counts for the first one in the order of COMPONENTS."""
        if component == self.component:
            self.viewed_bytes = max(self.viewed_bytes, viewed_bytes)
        elif COMPONENTS.index(component) < COMPONENTS.index(self.component):
            self.component, self.viewed_bytes = component, viewed_bytes

    def split(self) -> Counter:
        """Return the bytes by component. A gradient's storage outside the gradient, such as padding, is a bucket."""
        if self.component != "gradients":
            return Counter({self.component: self.nbytes})
        viewed_bytes = min(self.nbytes, self.viewed_bytes)
        return Counter(gradients=viewed_bytes, buckets=self.nbytes - viewed_bytes)


def uses(roles: dict[str, list[torch.Tensor]]) -> dict[torch.UntypedStorage, Use]:
    """Assign each storage to the first component that has a tensor in it.

    Args:
        roles: The tensors of each component, in the order of COMPONENTS.
    """
    found: dict[torch.UntypedStorage, Use] = {}
    for component, tensors in roles.items():
        for part in (part for tensor in tensors for part in _parts(tensor)):
            storage = part.untyped_storage()
            use = found.setdefault(storage, Use(storage.nbytes(), component))
            if use.component == component:
                use.viewed_bytes += part.nbytes
    return found


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold the memory of a DTensor or a sparse tensor on this rank."""
    if is_traceable_wrapper_subclass(tensor):
        attributes = [
            getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]
        ]  # a DTensor lists its mesh as well
        return [part for value in attributes if isinstance(value, torch.Tensor) for part in _parts(value)]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    real = not tensor.is_meta or _counts_meta
    return [tensor] if tensor.layout is torch.strided and real and not is_lazy(tensor) else []


_counts_meta = False


@contextlib.contextmanager
def counting_meta():
    """Count tensors on the meta device as if they had memory, for the dry run."""
    global _counts_meta
    before, _counts_meta = _counts_meta, True
    try:
        yield
    finally:
        _counts_meta = before


class Watch(TorchDispatchMode):
    """Sees the tensors of every operator in forward, backward, collectives and step, and thereby every storage.

    Each operator is one moment.

    Args:
        roles: A function that returns the current tensors of each component.
    """

    def __init__(self, roles):
        super().__init__()
        self._roles = roles
        self._uses: list[Use] = []  # on the module's device, including freed ones
        self._living: dict[int, tuple[Use, weakref.ref]] = {}  # by the id of the storage
        self._moments: list[tuple[float, str]] = []
        self._phase = "start"
        self._parameters = dict.fromkeys(roles()["parameters"])  # without duplicates
        self.device = next((parameter.device for parameter in self._parameters), torch.device("cpu"))
        self._label()
        self._pass_moment()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor then runs the operators of its local tensor, and those are seen
        if _in_backward():
            self._enter("backward")
        given = self._see((args, kwargs), made=False)
        result = func(*args, **kwargs)
        self._pass_moment()
        made = self._see(result, made=True)
        if func.namespace in ("c10d", "_c10d_functional"):
            for use in given + made:
                use.claim("buckets")
                use.born = use.born if use.made else 0  # DDP's buckets live in C++ and are as old as DDP
        return result

    @contextlib.contextmanager
    def hooks(self):
        """Observe what no operator shows: phases, gradients as they are computed, parameters in use, resizing."""
        resize = torch.UntypedStorage.resize_

        def resize_and_see(storage: torch.UntypedStorage, size: int):
            resize(storage, size)
            self._see_storage(storage)

        handles = [
            register_module_forward_pre_hook(lambda *_: None if _in_backward() else self._enter("forward")),
            register_module_forward_hook(lambda module, *_: self._claim("parameters", module._parameters.values())),
            register_optimizer_step_pre_hook(lambda *_: self._enter("step")),
        ]
        for parameter in self._parameters:
            if parameter.requires_grad:  # a wrapper may free the gradient long before the phase ends
                handles.append(parameter.register_hook(lambda gradient: self._claim("gradients", [gradient])))
        torch.UntypedStorage.resize_ = resize_and_see  # pyright: ignore[reportAttributeAccessIssue] (a patch)
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize
            for handle in handles:
                handle.remove()

    def history(self) -> list[tuple[float, str, Counter]]:
        """Return the memory in use at each moment, as (seconds since the start, phase, bytes by component)."""
        self._label()
        self._pass_moment()
        changes = defaultdict(Counter)
        for use in self._uses:
            changes[use.born].update(use.split())
            if use.died is not None:
                changes[use.died].subtract(use.split())
        alive, history = Counter(), []
        for moment, (at_s, phase) in enumerate(self._moments):
            alive.update(changes[moment])
            history.append((at_s - self._moments[0][0], phase, alive.copy()))
        return history

    def _pass_moment(self) -> None:
        self._moments.append((time.perf_counter(), self._phase))

    def _enter(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self._label()

    def _label(self) -> None:
        """Assign components to the current tensors. A storage keeps the highest-ranking component that it ever had."""
        for storage, use in uses(self._roles()).items():
            self._see_storage(storage).claim(use.component, use.viewed_bytes)

    def _claim(self, component: str, tensors) -> None:
        for part in (part for tensor in tensors if tensor is not None for part in _parts(tensor)):
            self._see_storage(part.untyped_storage()).claim(component, part.nbytes)

    def _see(self, values, made: bool) -> list[Use]:
        found = []
        for part in (part for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) for part in _parts(leaf)):
            found.append(use := self._see_storage(part.untyped_storage(), made))
            # An autograd.Function computes its output under no_grad. Only later operators see that it has a graph.
            if use.component == "other" and part.requires_grad and not part.is_leaf:
                use.claim("activations")
        return found

    def _see_storage(self, storage: torch.UntypedStorage, made: bool = False) -> Use:
        """Return the use of a storage, creating a new one if the storage is new or was resized."""
        use, _ = self._living.get(id(storage), (None, None))
        # An operator's result exists at that operator's moment, anything else from the next one on.
        now = len(self._moments) - made
        if use is None:
            recorded = made and torch.is_grad_enabled() and (self._phase == "forward" or _in_backward())
            use = Use(storage.nbytes(), "activations" if recorded else "other", made=made, born=now)
        elif use.nbytes != storage.nbytes():
            use.died = now
            use = replace(use, nbytes=storage.nbytes(), made=True, born=now, died=None)
        else:
            return use
        self._living[id(storage)] = use, weakref.ref(storage, partial(self._end, id(storage)))
        if storage.device == self.device:
            self._uses.append(use)
        return use

    def _end(self, storage_id: int, _) -> None:
        if storage_id in self._living:
            use, _ = self._living.pop(storage_id)
            use.died = len(self._moments)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
