# ---
# jupyter:
#   course:
#     module: expert_parallel
# ---

# %% [markdown]
# # 16 · Expert parallelism
#
# **Author:** This lesson is a small one that runs. Replace its idea with yours, keep its parts and their order, and
# delete these notes. The measurements and figures of all lessons are in `shared/`. Write down the minutes that
# `instructor/minutes.py` computes, and three to five things that the reader will be able to do.
#
# **10 minutes.** After this lesson, you will be able to:
#
# - say what a rank has to know in order to clip the gradients of a model that is split over ranks,
# - compute how many bytes that takes.
#
# You need all-reduce and all-gather (chapter 01).

# %% [markdown]
# ## Where we are
#
# **Author:** Say in two or three sentences what earlier chapters have built, and what the reader can do with it.
#
# Each rank now holds a different piece of the model. In the next cell, the piece is one layer, and backward computes
# its gradients.

# %% tags=["nbval-ignore-output"]
from shared import ranks

ranks.start(world_size=2)

# %%
# %%ranks
from torch import nn

torch.manual_seed(rank)
piece = nn.Linear(256, 64).to(device)
piece(torch.ones(4, 256, device=device)).square().mean().backward()
gradients = torch.cat([parameter.grad.flatten() for parameter in piece.parameters()])
print(f"{gradients.numel():,} gradients on each rank")

# %% [markdown]
# ## What is wasted
#
# **Author:** Measure the waste, show it in a figure, and name it.
#
# Clipping needs the **global norm**, the norm of the gradients of all ranks together. A rank can all-gather the other
# rank's gradients and compute it:

# %%
# %%ranks
from shared import wire

all_gradients = [torch.empty_like(gradients) for _ in range(world_size)]
with wire.ledger() as log:
    dist.all_gather(all_gradients, gradients)
expected = torch.cat(all_gradients).norm()
print(f"each rank sends {log.sent_bytes:,.0f} bytes")

# %% [markdown]
# Each rank sends all of its gradients, and the result is a single element.

# %% [markdown]
# ## Adding up squares
#
# **Author:** One idea, with its reason and a diagram of what moves where.
#
# The norm is the square root of a sum of squares, and a sum can be computed piece by piece. So each rank squares and
# adds up its own gradients, one all-reduce adds up the ranks' sums, and each rank takes the root.
#
# **Predict.** How many bytes does each of the two ranks send now, if the sum is in float32? An all-reduce sends
# 2(N−1)/N times its bytes per rank.

# %%
my_prediction = 0.0  # bytes

# %%
# %%ranks
with wire.ledger() as log:
    squares = gradients.square().sum()
    dist.all_reduce(squares)
norm = squares.sqrt()
assert torch.allclose(norm, expected)
print(f"each rank sends {log.sent_bytes:,.0f} bytes")

# %%
sent_bytes = ranks.pull("log")[0].sent_bytes
assert sent_bytes == 4
print(f"predicted {my_prediction:g} bytes, measured {sent_bytes:g}")

# %% [markdown]
# **Author:** Compare the result with the prediction, and explain the difference that readers will see.

# %% [markdown]
# ## The short version
#
# **Author:** Train a plain model in 20 to 60 lines. The lab then makes them robust.


# %%
# %%ranks
def clip_gradients(module, max_norm):
    squares = sum(parameter.grad.square().sum() for parameter in module.parameters())
    dist.all_reduce(squares)
    factor = (max_norm / squares.sqrt()).clamp(max=1)
    for parameter in module.parameters():
        parameter.grad *= factor


clip_gradients(piece, max_norm=0.01)

# %% [markdown]
# ## What torch calls it
#
# **Author:** Name the class or function of PyTorch that does the same, and say where it differs from ours.
#
# With parameters that are DTensors, `torch.nn.utils.clip_grad_norm_` does the same.

# %% [markdown]
# ## On a cluster
#
# **Author:** Answer the questions of this lesson for NCCL, real links and many hosts, in a table.
#
# | question | here | with NCCL and many hosts |
# |---|---|---|
# | How long does the all-reduce take? | its latency | its latency, which grows with the number of hosts |
# | What does each rank wait for? | the slower rank | the slowest of all ranks: the more ranks, the longer |

# %% [markdown]
# ## Recap
#
# **Author:** Complete the table. Define each term that this lesson introduced in one bullet, which can be understood
# without the lesson. In the lesson, a term is bold where it is defined.
#
# | | memory per rank | sent per rank | overlap |
# |---|---|---|---|
# | all-gather the gradients | all gradients | (N−1)/N of all gradients | none |
# | add up squares | one element | 2(N−1)/N elements | none |
#
# **Terms**
#
# - **global norm**: the norm of the gradients of all ranks together, as if they were one vector.

# %% [markdown]
# ## Further reading
#
# **Author:** Give two to five sources, such as a paper with year and section, or the file in PyTorch's source where a
# reader should begin, and say what to look for in each.

# %% [markdown]
# ## What is still wasted
#
# **Author:** Say what a rank still holds, sends or waits for unnecessarily, and which chapter improves it.

# %%
ranks.stop()
