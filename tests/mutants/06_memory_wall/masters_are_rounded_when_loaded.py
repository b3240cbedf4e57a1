"""Uses torch's load_state_dict(), which rounds the masters to the dtype of their parameters.

caught by: MasterWeights · checkpoint
"""

import torch

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    load_state_dict = torch.optim.Optimizer.load_state_dict
