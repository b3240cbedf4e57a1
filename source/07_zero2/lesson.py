# ---
# jupyter:
#   course:
#     module: zero2
#     minutes: 20
# ---

# %% [markdown]
# # 07 · ZeRO-2
