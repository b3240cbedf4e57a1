# ---
# jupyter:
#   course:
#     module: parallel_3d
#     minutes: 15
#     draft: true
# ---

# %% [markdown]
# # Lab 18 · 3D parallelism
#
# **15 minutes, 3 points.** **Author:** Say what students build here, and what it can do at the end of the lab.
# CONTRIBUTING.md lists what a chapter must have before you delete `draft: true` in the head of this file.
#
# A cell after each exercise checks what you have written. It draws new models every time.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import parallel_3d as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""3D parallelism: the norm of the gradients of a model that is split over ranks."""

import torch
import torch.distributed as dist
from torch import nn

# %% [markdown]
# ## Exercise 18.1 · The norm over all ranks (15 min, 3 points)
#
# **Author:** Say what to write, why, and what exactly is checked.
#
# Each rank of `group` holds a different piece of a model. `gradient_norm(module, group)` returns the norm of all their
# gradients together, so that every rank can clip the gradients of its piece by the same factor.
#
# - Return a tensor without dimensions, in float64. It is the same on every rank of the group.
# - A parameter without a gradient counts as zeros.
# - Communicate once: one all-reduce of one element.
#
# The first check runs a plain model on two ranks. The second tries groups, ranks without any gradient, and frozen
# parameters.
#
# <details><summary>Hint</summary>
#
# Two ranks have gradients [3] and [4]. Which two values do you have to add up to get the norm 5?
#
# </details>


# %% tags=["exercise", "export"] grade_id="gradient-norm"
# %%ranks
def gradient_norm(module: nn.Module, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the norm of the gradients of all the group's modules together.

    Communication: one all-reduce of one element.
    """
    ### BEGIN SOLUTION
    total = torch.zeros((), dtype=torch.float64, device=next(module.parameters()).device)
    for parameter in module.parameters():
        if parameter.grad is not None:
            total += parameter.grad.double().square().sum()
    dist.all_reduce(total, group=group)
    return total.sqrt()
    ### END SOLUTION


# %% tags=["check"] grade_id="check-gradient-norm" points=3
check.gradient_norm()

# %%
ranks.stop()
