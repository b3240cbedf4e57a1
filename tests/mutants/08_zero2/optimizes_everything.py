"""Only gradients are sharded: every rank's optimizer has state for all parameters.

caught by: ZeRO2 · memory
"""

from solutions import zero2 as right


class Optimizer(right.BucketOptimizer):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        whole = [bucket.home.flat.detach().clone().requires_grad_() for bucket in self.buckets]
        self.idle = type(self.inner)(whole, **self.defaults)
        for each in whole:
            each.grad = right.torch.zeros_like(each)
        self.idle.step()
        for each in whole:
            each.grad = None


class ZeRO2(right.ZeRO2):
    def __init__(self, module, optimizer_cls, bucket_cap_mb=25.0, group=None, **defaults):
        super().__init__(module, optimizer_cls, bucket_cap_mb, group, **defaults)
        self.optimizer = Optimizer(self.buckets, module.parameters(), optimizer_cls, group, **defaults)
