"""Adds up over all ranks of the world, although other ranks do not take part.

caught by: Pipeline · clipping group
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    @right.torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        total = right.torch.zeros((), dtype=right.torch.float64, device=self.device)
        counted_elsewhere = {parameter for parameter, stages in self.tied if stages[0] != self.stage}
        for parameter in self.own.values():
            if parameter.grad is not None and parameter not in counted_elsewhere:
                total += parameter.grad.double().square().sum()
        right.dist.all_reduce(total)
        norm = total.sqrt()
        for parameter in self.own.values():
            if parameter.grad is not None:
                parameter.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
