"""Adds up the gradients of the first and of the last stage that have a parameter, and forgets the ones in between.

caught by: Pipeline · many ties
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def sum_tied_gradients(self):
        for parameter, stages in self.tied:
            own, others = parameter.grad, [stage for stage in stages if stage != self.stage]
            by_stage = {stage: right.torch.empty_like(own) for stage in others} | {self.stage: own}
            sends, receives = [(own, stage) for stage in others], [(by_stage[stage], stage) for stage in others]
            right.InFlight(sends, receives, self.group).wait()
            parameter.grad = by_stage[stages[0]] + by_stage[stages[-1]]
