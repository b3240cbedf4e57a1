"""Counts a tied weight half on each stage, although more than two may have it.

caught by: Pipeline · clipping many ties
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    @right.torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        total = right.torch.zeros((), dtype=right.torch.float64, device=self.device)
        tied = {parameter for parameter, _ in self.tied}
        for parameter in self.own.values():
            if parameter.grad is not None:
                total += parameter.grad.double().square().sum() / (2 if parameter in tied else 1)
        right.dist.all_reduce(total, group=self.group)
        norm = total.sqrt()
        for parameter in self.own.values():
            if parameter.grad is not None:
                parameter.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
