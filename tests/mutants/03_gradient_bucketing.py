"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

import torch
from torch.nn.parallel import DistributedDataParallel

from solutions import bucketed_ddp


def slices_on_the_cpu():
    """Allocates the flat tensor on the CPU, whatever the parameters' device.

    caught by: flat_and_slices · values
    """

    def flat_and_slices(parameters):
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype)
        return flat, [piece.view(p.shape) for piece, p in zip(flat.split(sizes), parameters, strict=True)]

    BucketedDDP = bucketed_ddp.BucketedDDP


def assign_closes_at_another_dtype():
    """Starts a new bucket whenever the dtype changes: parameters with alternating dtypes get one bucket each.

    caught by: assign_buckets · dtypes
    """

    def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
        runs = []
        for parameter in reversed(list(parameters)):
            if runs and (runs[-1][0].dtype, runs[-1][0].device) == (parameter.dtype, parameter.device):
                runs[-1].append(parameter)
            else:
                runs.append([parameter])
        return [b for run in runs for b in bucketed_ddp.assign_buckets(run[::-1], bucket_cap_mb, first_bucket_mb)]


def assign_counts_elements():
    """Compares the number of elements with a cap in bytes.

    caught by: assign_buckets · buckets
    """

    def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
        parameters = list(parameters)
        size = parameters[0].element_size() if parameters else 1
        return bucketed_ddp.assign_buckets(parameters, bucket_cap_mb * size, first_bucket_mb * size)


def assign_decimal_megabytes():
    """Counts an MB as 10⁶ bytes instead of 2²⁰.

    caught by: assign_buckets · units
    """

    def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
        decimal = 10**6 / bucketed_ddp.MB
        return bucketed_ddp.assign_buckets(parameters, bucket_cap_mb * decimal, first_bucket_mb * decimal)


def assign_first_larger_than_the_rest():
    """Lets the first bucket exceed `bucket_cap_mb`.

    caught by: assign_buckets · first bucket
    """

    def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
        parameters = list(parameters)
        if first_bucket_mb <= bucket_cap_mb:
            return bucketed_ddp.assign_buckets(parameters, bucket_cap_mb, first_bucket_mb)
        first, *_ = bucketed_ddp.assign_buckets(parameters, first_bucket_mb, first_bucket_mb)
        rest = [p for p in parameters if all(p is not other for other in first)]
        return [first, *bucketed_ddp.assign_buckets(rest, bucket_cap_mb, first_bucket_mb)]


def assign_one_small_bucket_per_dtype():
    """Makes only the first bucket of each dtype small, across all devices; the exercise asks for one per dtype and
    device.

    caught by: assign_buckets · dtypes
    """

    def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
        buckets, filling, begun = [], {}, set()
        for parameter in reversed([p for p in parameters if p.requires_grad]):
            kind = (parameter.dtype, parameter.device)
            bucket, room_bytes = filling.get(kind, (None, 0))
            if bucket is None or parameter.nbytes > room_bytes:
                cap_mb = bucket_cap_mb if parameter.dtype in begun else min(first_bucket_mb, bucket_cap_mb)
                begun.add(parameter.dtype)
                bucket, room_bytes = [], cap_mb * bucketed_ddp.MB
                buckets.append(bucket)
            bucket.append(parameter)
            filling[kind] = bucket, room_bytes - parameter.nbytes
        return buckets

    BucketedDDP = bucketed_ddp.BucketedDDP


def assign_reverses_buckets_only():
    """Fills the buckets in forward order and reverses them afterwards, so the boundaries are wrong.

    caught by: assign_buckets · buckets
    """

    def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
        buckets = bucketed_ddp.assign_buckets(reversed(list(parameters)), bucket_cap_mb, first_bucket_mb)
        return [bucket[::-1] for bucket in buckets[::-1]]


def bucket_copies_back():
    """Copies the means back into the gradients that backward() allocated, so gradients are held twice.

    caught by: Bucket · one copy
    """

    class Bucket(bucketed_ddp.Bucket):
        def pack(self, index):
            parameter = self.parameters[index]
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            super().pack(index)
            parameter.grad = own

        def wait(self):
            super().wait()
            for parameter, piece in zip(self.parameters, self.slices, strict=True):
                parameter.grad.copy_(piece)


def bucket_keeps_what_was_there():
    """Leaves a slice unchanged when the gradient is None, so the last step's mean is sent again.

    caught by: Bucket · None
    """

    class Bucket(bucketed_ddp.Bucket):
        def pack(self, index):
            if self.parameters[index].grad is None:
                self.parameters[index].grad = self.slices[index]
            else:
                super().pack(index)


def bucket_waits_for_a_future():
    """Waits in launch(), through the future of the handle.

    caught by: Bucket · waits
    """

    class Bucket(bucketed_ddp.Bucket):
        def launch(self):
            super().launch()
            self.handle.get_future().wait()

    BucketedDDP = bucketed_ddp.BucketedDDP


def builds_buckets_in_each_step():
    """Creates new buckets in every step, so gradients that are slices already are copied, and held twice.

    caught by: BucketedDDP · zero_grad
    """

    class BucketedDDP(bucketed_ddp.BucketedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.cap, self.group = bucket_cap_mb, group

        def finish_gradient_sync(self):
            assigned = bucketed_ddp.assign_buckets(self.module.parameters(), self.cap)
            self.buckets = [bucketed_ddp.Bucket(parameters, self.group) for parameters in assigned]
            super().finish_gradient_sync()


def finds_buckets_by_id():
    """Identifies parameters by `id()`: in a deep copy, the ids are different.

    caught by: BucketedDDP · wrapping
    """

    class BucketedDDP(bucketed_ddp.BucketedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.ids = {id(parameter) for parameter in module.parameters()}

        def finish_gradient_sync(self):
            if self.ids == {id(parameter) for parameter in self.module.parameters()}:
                super().finish_gradient_sync()


def launches_in_backward():
    """Launches a bucket whenever backward() has filled it, so every micro-batch is communicated.

    caught by: BucketedDDP · wire
    """

    class BucketedDDP(bucketed_ddp.BucketedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            for bucket in self.buckets:
                bucket.parameters[-1].register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._send(bucket))

        def _send(self, bucket):
            if all(parameter.grad is not None for parameter in bucket.parameters):
                for index in range(len(bucket.parameters)):
                    bucket.pack(index)
                bucket.launch()

        def finish_gradient_sync(self):
            for bucket in self.buckets:
                if bucket.handle is None:
                    for index in range(len(bucket.parameters)):
                        bucket.pack(index)
                    bucket.launch()
                bucket.wait()


def leaves_early_without_gradients():
    """Returns early if there is nothing to send, so the other ranks wait forever.

    caught by: BucketedDDP · no backward
    """

    class BucketedDDP(bucketed_ddp.BucketedDDP):
        def finish_gradient_sync(self):
            if any(p.grad is not None and p.grad.any() for p in self.module.parameters()):
                super().finish_gradient_sync()


def sends_frozen():
    """Includes frozen parameters in the buckets.

    caught by: BucketedDDP · wire
    """

    class BucketedDDP(bucketed_ddp.BucketedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            trainable = [parameter.requires_grad for parameter in module.parameters()]
            module.requires_grad_(True)
            super().__init__(module, bucket_cap_mb, group)
            for parameter, takes_gradient in zip(module.parameters(), trainable, strict=True):
                parameter.requires_grad_(takes_gradient)


def torch_inside():
    """Cheats by deriving from torch's DistributedDataParallel.

    caught by: BucketedDDP · values
    """

    class BucketedDDP(DistributedDataParallel):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, process_group=group, bucket_cap_mb=bucket_cap_mb)

        def finish_gradient_sync(self):
            pass


def detaches_graphs():
    """Silently detaches gradients that are part of a graph.

    caught by: BucketedDDP · graphs
    """

    class BucketedDDP(bucketed_ddp.BucketedDDP):
        def finish_gradient_sync(self):
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.detach()
            super().finish_gradient_sync()
