"""Seeds each tensor with the same number.

caught by: Materializer · plain model
"""

import torch

from solutions import deferred as right


class Materializer(right.Materializer):
    @torch.no_grad()
    def value_of(self, tensor):
        value = torch.empty_like(tensor, device=self.device)
        with right.seeded(self.seed, self.device):
            self.initialize(self.name_of[tensor], value)
        return value
