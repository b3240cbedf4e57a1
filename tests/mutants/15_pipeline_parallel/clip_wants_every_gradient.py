"""Expects that every parameter has a gradient.

caught by: Pipeline · clipping
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    @right.torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        total = right.torch.zeros((), dtype=right.torch.float64, device=self.device)
        counted_elsewhere = {parameter for parameter, stages in self.tied if stages[0] != self.stage}
        for parameter in self.own.values():
            if parameter not in counted_elsewhere:
                total += parameter.grad.double().square().sum()
        right.dist.all_reduce(total, group=self.group)
        norm = total.sqrt()
        for parameter in self.own.values():
            if parameter.grad is not None:
                parameter.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
