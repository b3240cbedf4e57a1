# ---
# jupyter:
#   course:
#     module: zero3
#     minutes: 30
# ---

# %% [markdown]
# # 08 · ZeRO-3
#
# **30 minutes.**

# %% tags=["nbval-ignore-output"]
from shared import ranks

ranks.start(world_size=4, detect_mismatch=False)

# %%
ranks.stop()
