"""Adds up the norms of the stages.

caught by: Pipeline · plain norm
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def clip_grad_norm_(self, max_norm):
        norm = right.torch.nn.utils.get_total_norm([p.grad for p in self.own.values() if p.grad is not None])
        norm = norm.double().reshape(())
        right.dist.all_reduce(norm, group=self.group)
        for parameter in self.own.values():
            parameter.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
