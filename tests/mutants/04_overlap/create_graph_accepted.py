"""Detaches a gradient that has a graph: what comes back is right, and a derivative of it wrong.

caught by: OverlappedDDP · refusals
"""

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def _on_gradient(self, parameter):
        parameter.grad = parameter.grad.detach()
        super()._on_gradient(parameter)
