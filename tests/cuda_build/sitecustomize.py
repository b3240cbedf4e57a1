"""Make torch report CUDA as its accelerator, as it does where it finds a GPU, or on any machine in a CUDA build.

Python imports this module when it starts, if this folder is on PYTHONPATH: in a kernel, and in every rank.
"""

import torch

torch._C._get_accelerator = lambda *_: torch.device("cuda")
torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")
