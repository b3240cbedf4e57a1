# ---
# jupyter:
#   course:
#     module: zero1
#     minutes: 25
# ---

# %% [markdown]
# # 06 · ZeRO-1
#
# **25 minutes.** You will be able to
#
# - let each rank keep one N-th of the optimizer's state, with the numbers that one process would get,
# - say what is sent, and why it is no more than data parallelism sends.

# %% tags=["nbval-ignore-output"]
from shared import ranks

ranks.start(world_size=4, detect_mismatch=False)

# %%
ranks.stop()
