"""The end of a backward(): autograd calls a method of a GradientSync then, once, whatever happens in between.

[Note: nested backwards]
checkpoint(..., use_reentrant=True) runs a backward inside backward(). What is queued in the inner one is called when
the inner one ends, which is too early. At that moment, autograd still evaluates the node that has run it. So the call
is queued again once this node is done, and therefore in the outer backward.
"""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.autograd import Variable

_queued = weakref.WeakKeyDictionary()  # by object: a weak reference to its _Call, and the function to call


class _Call:
    """What autograd calls. Only the backward in which it is queued keeps it alive, and an exception ends that, too."""

    def __init__(self, method: Callable[[], None]):
        self.method = weakref.WeakMethod(method)

    def __call__(self) -> None:
        if (node := torch._C._current_autograd_node()) is not None:  # [Note: nested backwards]
            handle = node.register_hook(lambda *_: self._queue_again(handle))
        elif (method := self.method()) is not None:
            forget_backward(method.__self__)
            method()

    def _queue_again(self, handle) -> None:
        handle.remove()
        Variable._execution_engine.queue_callback(self)


def at_end_of_backward(method: Callable[[], None]) -> None:
    """Let autograd call a method at the end of the backward() that is running, once, however often it is asked to.

    The method's object is held by a weak reference. To be called in a hook.
    """
    if method.__self__ not in _queued:
        call = _Call(method)
        _queued[method.__self__] = weakref.ref(call), method.__func__
        Variable._execution_engine.queue_callback(call)


def is_interrupted(owner: object) -> bool:
    """Tell whether an exception has ended the backward() at whose end autograd would have called a method of this."""
    call, _ = _queued.get(owner, (None, None))
    return call is not None and call() is None


def complete_interrupted(owner: object, parameters: Iterable[nn.Parameter]) -> None:
    """Call the method now that an exception has ended the backward() at whose end autograd would have called it.

    Other ranks may wait for what that backward has not launched. It gets zeros, and its results are dropped: gradients
    that the parameters have now belong to a later backward.
    """
    _, function = _queued.pop(owner)
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        function(owner)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def forget_backward(owner: object) -> None:
    """Forget that a method of this object is queued."""
    _queued.pop(owner, None)
