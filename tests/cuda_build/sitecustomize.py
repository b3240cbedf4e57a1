"""Make torch report CUDA as its accelerator, like a CUDA build of torch on a machine with a GPU.

Python imports this module when it starts, if this folder is on PYTHONPATH: in a kernel, and in every rank.
"""

import torch

torch._C._get_accelerator = lambda *_: torch.device("cuda")
torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")
