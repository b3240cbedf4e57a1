# ---
# jupyter:
#   course:
#     module: production
#     minutes: 30
# ---

# %% [markdown]
# # 09 · Production
#
# **30 minutes.**

# %% tags=["nbval-ignore-output"]
from shared import ranks

ranks.start(world_size=4, detect_mismatch=False)

# %%
ranks.stop()
