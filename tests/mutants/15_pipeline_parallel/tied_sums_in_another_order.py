"""Adds its own gradient first, so that the copies get different bits.

caught by: Pipeline · same bits
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def sum_tied_gradients(self):
        for parameter, stages in self.tied:
            own, others = parameter.grad, [stage for stage in stages if stage != self.stage]
            received = {stage: right.torch.empty_like(own) for stage in others}
            sends = [(own, stage) for stage in others]
            right.InFlight(sends, [(tensor, stage) for stage, tensor in received.items()], self.group).wait()
            parameter.grad = own + sum(received.values())
