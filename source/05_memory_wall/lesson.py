# ---
# jupyter:
#   course:
#     module: memory_wall
#     minutes: 25
# ---

# %% [markdown]
# # 05 · The memory wall
#
# *In the making.*

# %%
from shared import ranks

ranks.start(world_size=2)

# %%
ranks.stop()
