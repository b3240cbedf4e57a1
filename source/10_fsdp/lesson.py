# ---
# jupyter:
#   course:
#     module: zero3
#     minutes: 30
# ---

# %% [markdown]
# # 10 · FSDP
