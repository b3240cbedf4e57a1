"""Just calls the module, so autograd keeps all activations.

caught by: Checkpointed · memory
"""

from solutions import memory_wall as right


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return self.module(*inputs)
