"""Without targets, gathers the weight of the output layer and lets every rank compute all logits.

caught by: parallelize · models
"""

from solutions import tensor_parallel as right


class Output(right.ColumnParallelLinear):
    whole = False

    def forward(self, x):
        own = super().forward(x)
        if self.whole:
            right.concatenate_shards(self.weight.T, self.group)
        return own


class ParallelGPT(right.ParallelGPT):
    def forward(self, tokens, targets=None, has_copies=False):
        self.output.whole = targets is None
        return super().forward(tokens, targets, has_copies)


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.output.__class__ = Output
    model.__class__ = ParallelGPT
    return model
