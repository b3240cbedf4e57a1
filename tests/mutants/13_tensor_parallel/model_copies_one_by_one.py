"""Adds up the gradient of each replicated parameter with a message of its own.

caught by: parallelize · wire
"""

from solutions import tensor_parallel as right


class ParallelGPT(right.ParallelGPT):
    def replicated_copies(self):
        sharded = right.sharded_names(self)
        whole = {name: p for name, p in self.named_parameters() if name not in sharded}
        return {name: right.copy_to_ranks(p, self.group) for name, p in whole.items()}


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.__class__ = ParallelGPT
    return model
