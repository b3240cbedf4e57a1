"""Keeps what each backward has left, to look at later: a second copy that is neither .grad nor sent.

caught by: OverlappedDDP · memory
"""

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def _on_gradient(self, parameter):
        self.__dict__.setdefault("own", {})[parameter] = parameter.grad.clone()
        super()._on_gradient(parameter)
