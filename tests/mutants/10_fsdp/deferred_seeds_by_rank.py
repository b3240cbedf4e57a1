"""Seeds each rank differently.

caught by: Materializer · values
"""

import torch
import torch.distributed as dist

from solutions import deferred as right


class Materializer(right.Materializer):
    @torch.no_grad()
    def value_of(self, tensor):
        name, value = self.name_of[tensor], torch.empty_like(tensor, device=self.device)
        with right.seeded(right.seed_of(self.seed, name) + dist.get_rank(), self.device):
            self.initialize(name, value)
        return value
