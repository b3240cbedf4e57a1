"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from solutions import manual_ddp


def averages_in_hooks():
    """Averages in a hook during each backward: the values are right, but every micro-batch is communicated.

    caught by: ManualDDP · wire
    """

    class ManualDDP(manual_ddp.ManualDDP):
        def __init__(self, module, group=None):
            super().__init__(module, group)
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._average)

        def _average(self, parameter):
            manual_ddp.mean_over_ranks_(parameter.grad, self.group)

        def finish_gradient_sync(self):
            pass


def first_step_only():
    """Synchronizes gradients in the first step only.

    caught by: ManualDDP · values
    """

    class ManualDDP(manual_ddp.ManualDDP):
        done = False

        def finish_gradient_sync(self):
            if not self.done:
                super().finish_gradient_sync()
            self.done = True


def forgets_earlier_micro_batches():
    """Counts a parameter as used only if the last micro-batch used it.

    caught by: ManualDDP · accumulation
    """

    class ManualDDP(manual_ddp.ManualDDP):
        def __init__(self, module, group=None):
            super().__init__(module, group)
            self.used = set()
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda used: self.used.add(id(used)))

        def forward(self, *inputs, **kwargs):
            self.used.clear()
            return super().forward(*inputs, **kwargs)

        def finish_gradient_sync(self):
            for parameter in self.module.parameters():
                if parameter.requires_grad:
                    if id(parameter) not in self.used:
                        parameter.grad = torch.zeros_like(parameter)
                    manual_ddp.mean_over_ranks_(parameter.grad, self.group)


def one_positional_input():
    """Accepts only a single positional argument in forward.

    caught by: ManualDDP · wrapping
    """

    class ManualDDP(manual_ddp.ManualDDP):
        def forward(self, x):
            return self.module(x)

        def __call__(self, x):
            return self.forward(x)


def runs_forward_twice():
    """Runs forward a second time without gradients: BatchNorm updates its running statistics twice per step.

    caught by: ManualDDP · values
    """

    class ManualDDP(manual_ddp.ManualDDP):
        def forward(self, *inputs, **kwargs):
            with torch.no_grad():
                super().forward(*inputs, **kwargs)
            return super().forward(*inputs, **kwargs)


def torch_hidden_inside():
    """Cheats by hiding torch's DistributedDataParallel in a list, where `modules()` does not find it.

    caught by: ManualDDP · wire
    """

    class ManualDDP(nn.Module):
        def __init__(self, module, group=None):
            super().__init__()
            self.module = module
            self.hidden = [DistributedDataParallel(module, process_group=group)]

        def forward(self, *inputs, **kwargs):
            return self.hidden[0](*inputs, **kwargs)

        def finish_gradient_sync(self):
            pass


def torch_inside():
    """Cheats by deriving from torch's DistributedDataParallel.

    caught by: ManualDDP · values
    """

    class ManualDDP(DistributedDataParallel):
        def __init__(self, module, group=None):
            super().__init__(module, process_group=group)

        def finish_gradient_sync(self):
            pass


def takes_blocks():
    """Shuffles in the right order, but then gives each rank a contiguous block of it.

    caught by: ShardedSampler · every sample
    """

    class ShardedSampler(manual_ddp.ShardedSampler):
        def __iter__(self):
            if not self.shuffle:
                return super().__iter__()
            whole = manual_ddp.ShardedSampler(self.length, 0, 1, True, self.seed)
            whole.set_epoch(self.epoch)
            order, share = list(whole), len(self)
            return iter([order[index % self.length] for index in range(self.rank * share, (self.rank + 1) * share)])


def torchs_sampler():
    """Cheats by deriving from torch's DistributedSampler.

    caught by: ShardedSampler · every sample
    """

    class ShardedSampler(DistributedSampler):
        def __init__(self, length, rank, world_size, shuffle=True, seed=0):
            super().__init__(range(length), world_size, rank, shuffle, seed)


def leaves_early_without_samples():
    """Returns early on a rank without samples, so the other ranks wait forever.

    caught by: average_gradients_weighted · values
    """

    def average_gradients_weighted(module, samples, group=None):
        if samples > 0:
            manual_ddp.average_gradients_weighted(module, samples, group)


def uneven_shares():
    """Gives ranks different numbers of samples when the length is not a multiple of the number of ranks.

    caught by: ShardedSampler · every sample
    """

    from solutions.manual_ddp import ManualDDP  # noqa: F401

    class ShardedSampler(manual_ddp.ShardedSampler):
        def __iter__(self):
            whole = manual_ddp.ShardedSampler(self.length, 0, 1, self.shuffle, self.seed)
            whole.set_epoch(self.epoch)
            return iter(list(whole)[self.rank :: self.world_size])
