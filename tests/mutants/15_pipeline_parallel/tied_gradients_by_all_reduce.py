"""Adds up a tied gradient over all stages, those that do not have it, too.

caught by: Pipeline · tied wire
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def step(self, inputs, targets):
        self.whole = sum(p.numel() for p in self.own.values())
        return super().step(inputs, targets)

    def sum_tied_gradients(self):
        super().sum_tied_gradients()
        for parameter, stages in self.tied:
            others = [stage for stage in stages if stage != self.stage]
            again = [(parameter.grad.clone(), stage) for stage in others]
            right.InFlight(again, [(parameter.grad.clone(), stage) for stage in others], self.group).wait()
