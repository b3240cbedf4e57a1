"""Pickles that can be loaded by a process without a GPU, or by one that should not use the GPUs."""

import pickle

import torch


class CpuPickler(pickle.Pickler):
    """Pickles a GPU's tensors as tensors on the CPU.

    Otherwise the notebook would load what the ranks send onto the same GPUs, and create a CUDA context of about 500 MB
    on each of them.
    """

    def reducer_override(self, thing):
        if not isinstance(thing, torch.Tensor) or not is_on_gpu(thing):
            return NotImplemented
        on_cpu = thing.detach().to("cpu", copy=True).requires_grad_(thing.requires_grad)
        return on_cpu.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda
