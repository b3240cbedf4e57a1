"""With sequence parallelism, leaves out the biases of row-parallel layers when gradients are added up.

caught by: parallelize · models
"""

from solutions import tensor_parallel as right


class ParallelGPT(right.ParallelGPT):
    def replicated_copies(self):
        partial = {name: p for name, p in self.named_parameters() if "norm" in name or "position" in name}
        copies = right.copy_all_to_ranks(list(partial.values()), self.group)
        return dict(zip(partial, copies, strict=True))


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.__class__ = ParallelGPT
    return model
