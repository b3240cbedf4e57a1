"""Guards of our wrappers: train as one process would, or raise an error on every rank that says what to do.

`@guarded` looks at a module when it is wrapped, and again whenever gradients are synchronized. The other functions help
where a tensor is unusual.
"""

import contextlib
import functools
import inspect
import math
import operator
import os
import sys
import warnings
import weakref
import zlib
from itertools import chain, pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

# What a rank sends for a gradient of None. It is equal to 0.0, but a sum is −0.0 only if all terms are. So a mean of
# −0.0 in every element tells that no rank has used the parameter.
UNUSED = -0.0

NOT_SENT_BY_GLOO = {"int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"}

AGAIN = "change the module before you wrap it, or wrap it again afterwards"

_names = WeakIdKeyDictionary()  # of the parameters that a guard has seen
_clipping = WeakIdKeyDictionary()  # parameter: a weak reference to what holds its mean gradient, and what to call

# Copies of a wrapper communicate over the same group. Without this, deepcopy() raises, because it cannot copy a group.
dist.ProcessGroup.__deepcopy__ = lambda group, memo: group


def name_of(parameter: nn.Parameter | None) -> str:
    """Name a parameter in an error message, by its shape if no guard has seen it in a module."""
    if parameter in _names:
        return f"parameter {_names[parameter]!r}"
    return f"a parameter of shape {list(getattr(parameter, 'shape', []))}"


# Tensors


@contextlib.contextmanager
def contiguous(tensor: torch.Tensor):
    """Yield a tensor's values without gaps in memory, for a collective that fills them, and put the result back.

    A collective sends memory, not values: of a slice or a transposed tensor, gloo would send other elements. What has
    no gaps is yielded itself.
    """
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:  # expanded: the same memory for every index
            tensor = tensor.narrow(dim, 0, 1)
    packed = tensor.contiguous().resolve_conj().resolve_neg()
    is_rare = str(packed.dtype).removeprefix("torch.") in NOT_SENT_BY_GLOO
    yield packed.view(-1).view(torch.uint8) if is_rare else packed
    if packed.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
        tensor.copy_(packed)


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Copy a tensor from the group's first rank to all its ranks, whatever it looks like in memory."""
    with contiguous(tensor) as packed:
        dist.broadcast(packed, group=group, group_src=0)


def reject_unusual(name: str, tensor: torch.Tensor) -> None:
    """Raise a ValueError for a parameter or buffer that no wrapper can broadcast or train."""
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"{name!r} has no shape yet: run one forward of the lazy module before you wrap it")
    if hasattr(tensor, "device_mesh"):
        raise ValueError(f"{name!r} is a DTensor, which is distributed already: wrap a plain module")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(
            f"{name!r} is {tensor.layout} in {tensor.dtype}, which cannot be broadcast: make it dense first"
        )
    expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    if tensor.requires_grad and expanded:
        raise ValueError(f"parameter {name!r} is an expanded tensor, which no optimizer can update: clone() it first")


def reject_shared_memory(tensors: dict[str, torch.Tensor]) -> None:
    """Raise a ValueError if two tensors share memory, which they would no longer do in a flat tensor."""
    spans = []
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            spans.append((begin, begin + (last + 1) * tensor.element_size(), name, tensor.requires_grad))
    for (_, end, name, trained), (begin, _, other, other_trained) in pairwise(sorted(spans)):
        if begin < end and (trained or other_trained):
            raise ValueError(
                f"{name!r} and {other!r} share memory, but a flat parameter would store them separately: "
                "use the same nn.Parameter in both places, or clone() one of them"
            )


def reject_gradient(parameter: nn.Parameter) -> None:
    """Raise a RuntimeError for a gradient that a flat tensor cannot hold."""
    gradient = parameter.grad
    if gradient is None or (gradient.layout is torch.strided and not gradient.requires_grad):
        return
    if gradient.layout is not torch.strided:
        raise RuntimeError(
            f"{name_of(parameter)} has a sparse gradient, but buckets and flat tensors are dense: "
            "build its embedding with sparse=False"
        )
    raise RuntimeError(
        f"{name_of(parameter)} has a gradient that is part of a graph, but collectives do not record one: "
        "backward(create_graph=True) is not supported; call the module itself instead of its wrapper"
    )


def second_gradient(parameter: nn.Parameter) -> str:
    """Say why a parameter got a second gradient before the first one was averaged, and what to do."""
    frame, files = sys._getframe(1), set()
    while frame is not None:
        files.add(frame.f_code.co_filename.replace("\\", "/"))
        frame = frame.f_back
    reentrant = "checkpoint(..., use_reentrant=True) runs a backward of its own in every call of a shared layer"
    if any(file.endswith("torch/utils/checkpoint.py") for file in files):
        return f"got a second gradient for {name_of(parameter)}: {reentrant}, so pass use_reentrant=False"
    return (
        f"got a second gradient for {name_of(parameter)}: call finish_gradient_sync() after each backward(), also "
        "before zero_grad() if you skip a batch, or let gradients accumulate inside no_sync(). If there was only one "
        f"backward(), {reentrant}: pass use_reentrant=False"
    )


# Modules that change after wrapping


def _state(parameter: nn.Parameter) -> tuple:
    return parameter.requires_grad, parameter.dtype, parameter.device


class Guard:
    """Watches parameters, and lets every rank raise if they change on any rank.

    A rank that finds a problem cannot just raise, because the others would wait for it in a collective. So it first
    writes the problem to the store of the process group. Then it takes part in the collectives of this step, but sends
    NaN. Whoever finds NaN in a mean reads the store, and raises the same problem. Without NaN, nobody has to ask.
    (Looking for NaN would make the CPU wait for a GPU. There, each rank raises only what it finds itself.)

    `flat_parameters` lists what holds the parameters' memory, if anything does.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        if dist.get_rank(group) < 0:
            raise ValueError("this rank is not in the group: wrap the module only on the ranks of its group")
        self.group, self.key = group, ""
        self.modules: list[nn.Module] = []
        self.contents: list = []
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self.states: list[tuple] = []
        self.flat_parameters: list = []

    @property
    def store(self) -> dist.Store | None:
        """The ranks' store, or None if there is only one process that pretends to be many."""
        return None if dist.get_backend(self.group) == "fake" else dist.distributed_c10d._get_default_store()

    def watch(self, parameters: dict[str, nn.Parameter], module: nn.Module | None = None) -> None:
        """Watch more parameters, or all that a module has, after checking that all ranks have the same.

        Raises:
            ValueError: if the ranks' parameters differ, or one of them is unusual.
        """
        buffers = dict(module.named_buffers()) if module else {}
        for name, tensor in chain(parameters.items(), buffers.items()):
            reject_unusual(name, tensor)
        self.parameters += parameters.values()
        self._compare_ranks(parameters | buffers)
        self.names += parameters
        self.states += map(_state, parameters.values())
        for name, parameter in parameters.items():
            if module is not None or parameter not in _names:
                _names[parameter] = name
        if module is not None:
            self.modules = list(module.modules())
            self.contents = self._contents()

    def _contents(self) -> list:
        return [held for m in self.modules for held in (*m._parameters.values(), *m._modules.values())]

    def _compare_ranks(self, tensors: dict[str, torch.Tensor]) -> None:
        if (store := self.store) is None:
            return
        described = [
            f"{name}: {list(t.shape)} in {t.dtype}, {'trained' if t.requires_grad else 'frozen'}"
            for name, t in tensors.items()
        ] or ["no parameters"]
        text, rank = "\n".join(described), dist.get_rank(self.group)
        pairs = self._gather([zlib.crc32(text.encode()), int.from_bytes(os.urandom(6))])
        self.key = self.key or f"guards/{pairs[0][1]}"
        if all(pair[0] == pairs[0][0] for pair in pairs):
            return
        key = f"guards/{pairs[0][1]}/models"
        store.set(f"{key}/{rank}", text)
        for other in range(len(pairs)):
            others = store.get(f"{key}/{other}").decode().split("\n")
            if others != described:
                mine, theirs = (set(a) - set(b) for a, b in ((described, others), (others, described)))
                raise ValueError(
                    f"the ranks' models differ: rank {rank} has {sorted(mine)[:3]}, "
                    f"rank {other} has {sorted(theirs)[:3]}. Build and freeze the same layers on all ranks"
                )

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        """Return every rank's integers. The ledger does not see this call of the backend."""
        device = next((parameter.device for parameter in self.parameters), torch.device("cpu"))
        mine = torch.tensor(numbers, device=device)
        received = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        (self.group or dist.group.WORLD)._get_backend(device).allgather([received], [mine]).wait()
        return [pair.tolist() for pair in received]

    def problem(self) -> str | None:
        """Say what has changed since the module was wrapped, or return None."""
        contents = self._contents()
        if len(contents) != len(self.contents) or not all(map(operator.is_, contents, self.contents)):
            return self._replaced()
        for name, parameter, before in zip(self.names, self.parameters, self.states, strict=True):
            if (now := _state(parameter)) == before:
                continue
            if now[0] != before[0]:
                what = "was unfrozen" if now[0] else "was frozen"
            else:
                what = f"was in {before[1]} on {before[2]}, and is now in {now[1]} on {now[2]},"
            return f"parameter {name!r} {what} after the module was wrapped: {AGAIN}"
        for flat_parameter in self.flat_parameters:
            flat = flat_parameter.flat_param
            address, size = flat.data_ptr(), flat.element_size()
            for parameter in () if flat.is_meta else flat_parameter.layout.parameters:
                numel = parameter.numel()
                if numel and (parameter.data_ptr() != address or not parameter.is_contiguous()):
                    return (
                        f"{name_of(parameter)} got other memory after it was wrapped, so no step can change it: "
                        "write into it with copy_() or clamp_() under no_grad() instead of assigning .data, and call "
                        "to() before you wrap the module"
                    )
                address += numel * size
        return None

    def _replaced(self) -> str:
        known = {id(parameter) for parameter in self.parameters}
        now = {name: p for name, p in self.modules[0].named_parameters() if id(p) not in known}
        for name in now:
            what = "was replaced, perhaps by load_state_dict(assign=True)," if name in self.names else "was added"
            return f"parameter {name!r} {what} after the module was wrapped: {AGAIN}"
        gone = set(self.names) - {name for name, _ in self.modules[0].named_parameters()}
        return f"the module has other submodules or parameters than when it was wrapped{_without(gone)}: {AGAIN}"

    def check_flat_gradients(self, all_gradients) -> None:
        """Raise on every rank, before gradients are reduced, if they could not be applied on this one.

        Args:
            all_gradients: the FlatGradients that reduce_scatter_() is about to reduce.
        """
        problem = self.problem()
        try:
            for parameter in self.parameters:
                reject_gradient(parameter)
        except RuntimeError as error:
            problem = problem or str(error)
        if problem:
            self.fail(problem, lambda: [gradients.send_nan() for gradients in all_gradients])

    def fail(self, problem: str | Exception, join) -> None:
        """Raise a problem on every rank.

        Args:
            join: takes part in the collectives that the other ranks wait in, and sends NaN.
        """
        store = self.store if all(parameter.is_cpu for parameter in self.parameters[:1]) else None
        if store is not None:
            store.set(self.key, f"rank {dist.get_rank(self.group)}: {problem}")
            store.get(self.key)  # set() returns before the value is there
            with contextlib.suppress(RuntimeError):
                join()
        raise problem if isinstance(problem, Exception) else RuntimeError(problem)

    def look(self, mean: torch.Tensor | None) -> None:
        """Raise another rank's problem if this mean begins with NaN because of it."""
        if mean is None or not mean.is_cpu or not mean.numel():
            return
        first = mean[(0,) * mean.dim()].item()
        if not math.isnan(first.real) or (store := self.store) is None:
            return
        if store.check([self.key]):
            raise RuntimeError(store.get(self.key).decode())


def _without(names: set[str]) -> str:
    return f" (without {', '.join(map(repr, sorted(names)[:3]))})" if names else ""


def guarded(wrapper_class: type) -> type:
    """Guard a wrapper: check the module when it is wrapped, and all parameters in each finish_gradient_sync().

    A parameter that no rank has used keeps a gradient of None, if the wrapper sends UNUSED for None.
    """
    build, finish = wrapper_class.__init__, wrapper_class.__dict__.get("finish_gradient_sync")

    @functools.wraps(build)
    def build_guarded(self, module: nn.Module, *args, **kwargs):
        given = inspect.signature(build).bind(self, module, *args, **kwargs).arguments
        guard = Guard(given.get("group"))
        guard.watch(dict(module.named_parameters()), module)
        if "optimizer_cls" in given:  # then parameters move into flat parameters
            reject_shared_memory(dict(chain(module.named_parameters(), module.named_buffers())))
        for parameter in guard.parameters:
            _clipping.pop(parameter, None)
        build(self, module, *args, **kwargs)
        self.guard = guard
        buckets = getattr(self, "buckets", [])
        guard.flat_parameters = [b.flat_parameter for b in buckets if hasattr(b, "flat_parameter")]
        if sync := getattr(self, "sync", None):
            sync.guard = guard
        if guard.flat_parameters:
            clip_with(guard.parameters, self, "the wrapper's clip_grad_norm_(max_norm)")
        elif sync:
            clip_with(guard.parameters, self, "finish_gradient_sync() before it", only_pending=True)

    @functools.wraps(finish)
    def finish_gradient_sync(self):
        if getattr(self, "guard", None) is None:  # while another class builds it
            return finish(self)
        join = functools.partial(_send_nan, self)
        guard, sync = self.guard, getattr(self, "sync", None)
        if problem := guard.problem():
            guard.fail(problem, join)
        none = [p for p in guard.parameters if p.grad is None and p.requires_grad]
        try:
            if sync is None:
                if hasattr(self, "buckets"):
                    for parameter in guard.parameters:
                        reject_gradient(parameter)
            elif none and not guard.flat_parameters:
                _reject_dropped(sync, none)
        except RuntimeError as error:
            guard.fail(error, join)
        finish(self)
        guard.look(_a_mean(self))
        if not guard.flat_parameters:
            _keep_none(none)

    wrapper_class.__init__ = build_guarded
    if finish is not None:
        wrapper_class.finish_gradient_sync = finish_gradient_sync
    return wrapper_class


def call_hook(on_gradient, parameter: nn.Parameter, *indices: int) -> None:
    """Call a hook for a gradient that backward() has completed. If it raises on this rank, all ranks raise."""
    sync = on_gradient.__self__
    guard = getattr(sync, "guard", None)
    if guard is None:
        return on_gradient(*indices)
    try:
        if not sync.pending and (problem := _another_wrapper(sync, parameter) or guard.problem()):
            raise RuntimeError(problem)
        reject_gradient(parameter)
        on_gradient(*indices)
    except RuntimeError as error:
        guard.fail(error, functools.partial(_send_nan_from, sync))


def _another_wrapper(sync, parameter: nn.Parameter) -> str | None:
    owner, *_ = _clipping.get(parameter, (lambda: None,))
    other = getattr(owner(), "sync", sync)
    if other is not sync and any(parameter is p for bucket in other.queue.buckets for p in bucket.parameters):
        return (
            f"{name_of(parameter)} is in two wrappers, which would both divide its gradient: "
            "wrap what they share only once, or delete the other wrapper"
        )
    return None


def _a_mean(wrapper: nn.Module) -> torch.Tensor | None:
    """Return a mean of the last synchronization, of which every rank has some elements."""
    for bucket in reversed(getattr(wrapper, "buckets", [])):
        mean = bucket.flat_parameter.shard.grad if hasattr(bucket, "flat_parameter") else bucket.flat
        if mean is None or mean.numel():
            return mean
    means = (p.grad for p in wrapper.guard.parameters if p.requires_grad and p.numel())
    return None if hasattr(wrapper, "buckets") else next(means, None)


@torch.no_grad()
def _send_nan(wrapper: nn.Module) -> None:
    if hasattr(wrapper, "sync"):
        _send_nan_from(wrapper.sync)
    elif hasattr(wrapper, "buckets"):
        _launch_nan(wrapper.buckets, wrapper.buckets)
    else:
        guard = wrapper.guard
        for parameter, (requires_grad, dtype, device) in zip(guard.parameters, guard.states, strict=True):
            if requires_grad:
                dist.all_reduce(torch.full(parameter.shape, math.nan, dtype=dtype, device=device), group=guard.group)


@torch.no_grad()
def _send_nan_from(sync) -> None:
    queue = sync.queue
    launched = queue.launched
    sync.queue, sync.pending = type(queue)(queue.buckets), False  # for whoever trains on
    _launch_nan(queue.buckets[launched:], queue.buckets)


def _launch_nan(buckets, all_buckets) -> None:
    for bucket in buckets:
        if bucket.flat is None:
            bucket.flat = torch.empty_like(bucket.flat_parameter.flat_param)  # whatever the parameters are now
        bucket.flat.fill_(math.nan)
        bucket.launch()
    for bucket in all_buckets:
        with contextlib.suppress(RuntimeError):
            bucket.wait()


def _reject_dropped(sync, none: list[nn.Parameter]) -> None:
    """Raise if a gradient that is in a bucket already has been set to None since."""
    dropped = set(map(id, none))
    for bucket, missing in zip(sync.queue.buckets, sync.queue.missing, strict=True):
        for index, parameter in enumerate(bucket.parameters if len(missing) < len(bucket.parameters) else ()):
            if index not in missing and id(parameter) in dropped:
                raise RuntimeError(
                    f"the gradient of {name_of(parameter)} was dropped after backward() had put it into a bucket: "
                    "call finish_gradient_sync() before zero_grad(), also if you skip the batch"
                )


def _keep_none(parameters: list[nn.Parameter]) -> None:
    """Set the gradients to None again that no rank has computed."""
    for parameter in parameters:
        if parameter.grad is not None and is_unused(parameter.grad):
            parameter.grad = None


def is_unused(mean: torch.Tensor) -> bool:
    """Tell whether a mean of gradients has only elements that every rank has sent as UNUSED."""
    real = torch.view_as_real(mean)[..., 0] if mean.is_complex() else mean
    return mean.numel() > 0 and bool((torch.signbit(real) & (real == 0)).all())


# Optimizers


def clip_with(parameters, owner, advice: str, only_pending: bool = False) -> None:
    """Let torch's gradient clipping raise for parameters whose gradients are not the mean.

    Args:
        owner: what holds the mean gradients. Without it, the parameters can be clipped again.
        advice: what to call instead.
        only_pending: whether gradients are the mean once owner.sync is not pending.
    """
    for parameter in parameters:
        _clipping[parameter] = weakref.ref(owner), advice, only_pending


def _reject_clipping(parameters) -> None:
    for parameter in parameters:
        owner, advice, only_pending = _clipping.get(parameter, (lambda: None, "", False))
        if (owner := owner()) is not None and (not only_pending or owner.sync.pending):
            raise RuntimeError(
                f"torch's gradient clipping would use only the gradients that this rank holds, of {name_of(parameter)} "
                f"and others: call {advice}"
            )


def _guard_clipping() -> None:
    """Check parameters in torch's functions for clipping. They see only a parameter's .grad, not what it means."""

    def checked(clip):
        @functools.wraps(clip)
        def clip_checked(parameters, *args, **kwargs):
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            _reject_clipping(parameters)
            return clip(parameters, *args, **kwargs)

        return clip_checked

    clip_grad._clip_grads_with_norm_ = checked(clip_grad._clip_grads_with_norm_)  # clip_grad_norm_() calls this one
    clip_grad.clip_grad_value_ = nn.utils.clip_grad_value_ = checked(clip_grad.clip_grad_value_)


_guard_clipping()


def numbered(parameters: list[nn.Parameter], first: int = 0) -> dict[str, nn.Parameter]:
    """Name parameters that are given to an optimizer without their module, by index and shape."""
    named = {}
    for index, parameter in enumerate(parameters, first):
        name = _names.get(parameter)
        named[f"#{index} of shape {list(parameter.shape)}" if name is None or name in named else name] = parameter
    return named


def unshared(params) -> list:
    """List an optimizer's parameters or param groups. Raises ValueError if some of them share memory."""
    params = [{**group, "params": list(group["params"])} if isinstance(group, dict) else group for group in params]
    flat = chain.from_iterable(group["params"] if isinstance(group, dict) else [group] for group in params)
    tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in flat]
    reject_shared_memory(numbered(list({id(tensor): tensor for tensor in tensors}.values())))
    return params


def reject_grad_scaler(optimizer) -> bool:
    """Raise if torch's GradScaler asks a sharded optimizer for `_step_supports_amp_scaling`, as its step() does."""
    raise RuntimeError(
        "torch's GradScaler looks for overflow only in the gradients of its own rank, so with "
        f"{type(optimizer).__name__} some ranks would skip a step, and the others wait for them: train in bfloat16, "
        "which needs no GradScaler"
    )


def reject_whole_tensor_updates(optimizer_cls, defaults: dict) -> None:
    """Raise a ValueError if an optimizer updates a shard in another way than the same elements of a whole parameter."""
    values = torch.linspace(-1, 1, 12)

    def updated(pieces: list[torch.Tensor]) -> torch.Tensor:
        pieces = [nn.Parameter(piece.clone()) for piece in pieces]
        optimizer = optimizer_cls(pieces, **defaults)
        for scale in (1.0, 3.0):
            for piece in pieces:
                piece.grad = scale * (piece.detach().square() + 0.1)
            optimizer.step()
        return torch.cat([piece.detach().flatten() for piece in pieces])

    with torch.random.fork_rng(devices=[]):
        try:
            same = torch.allclose(updated([values.view(3, 4)]), updated([values[:5], values[5:]]), rtol=1e-4, atol=1e-6)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{_named(optimizer_cls)} cannot update shards of parameters: {error}") from error
    if not same:
        raise ValueError(
            f"{_named(optimizer_cls)} does not update each element by itself, so it would do something else to a "
            "shard: use an optimizer such as SGD or AdamW, or data parallelism without shards"
        )


def _named(optimizer_cls) -> str:
    return getattr(optimizer_cls, "__name__", str(optimizer_cls))


def warn_of_unused(flat_parameters) -> None:
    """Warn once of parameters that no rank has used, because a sharded optimizer updates them all the same."""
    unused = []
    for flat_parameter in flat_parameters:
        layout, mean = flat_parameter.layout, flat_parameter.shard.grad
        if mean is None or mean.is_meta:
            continue
        begin = -dist.get_rank(layout.group) * mean.numel()  # of a parameter, counted from the shard's first element
        for parameter in layout.parameters:
            own = mean[max(begin, 0) : max(begin + parameter.numel(), 0)]
            if own.numel() and is_unused(own):
                unused.append(name_of(parameter))
            begin += parameter.numel()
    if unused:
        warnings.warn(
            f"no rank has a gradient for {', '.join(unused[:3])}{' and others' if unused[3:] else ''}. A sharded "
            "optimizer counts that as zeros, so weight decay and momentum still change it, unlike in one process: "
            "freeze what you do not train",
            stacklevel=4,
        )
