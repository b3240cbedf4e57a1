"""Seeds with Python's hash of the name, which differs between processes.

caught by: Materializer · plain model
"""

import torch

from solutions import deferred as right


class Materializer(right.Materializer):
    @torch.no_grad()
    def value_of(self, tensor):
        name, value = self.name_of[tensor], torch.empty_like(tensor, device=self.device)
        with right.seeded(hash((self.seed, name)), self.device):
            self.initialize(name, value)
        return value
