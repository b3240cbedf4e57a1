"""Packs only the gradients that exist, so the buckets differ between ranks in size and layout.

caught by: BucketedDDP · unused on one rank
"""

import torch
import torch.distributed as dist

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        for bucket in self.buckets:
            gradients = [p.grad for p in bucket.parameters if p.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients] or [bucket.flat[:0]])
            dist.all_reduce(flat, group=bucket.group)
            flat /= dist.get_world_size(bucket.group)
            for gradient, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(piece.view_as(gradient))
