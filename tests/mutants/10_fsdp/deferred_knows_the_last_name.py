"""Uses the last name of a tied parameter instead of the first.

caught by: Materializer · awkward models
"""

from itertools import chain

from solutions import deferred as right


class Materializer(right.Materializer):
    def __init__(self, module, initialize, device, seed=0):
        super().__init__(module, initialize, device, seed)
        named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers())
        self.name_of = {tensor: name for name, tensor in named}
