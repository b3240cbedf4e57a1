# ---
# jupyter:
#   course:
#     module: memory_wall
#     minutes: 70
# ---

# %% [markdown]
# # Lab 06 · The memory wall
#
# **70 minutes, 13 points.** You count the bytes that a rank holds, build an optimizer with master weights, write
# activation checkpointing, and choose which blocks of a model to checkpoint, so that it fits into less memory.
#
# Each exercise has a check. The checks count bytes, and never judge times.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks
from shared.checks import memory_wall as check
from shared.predictions import predicted

ranks.start(world_size=2)

# %% tags=["export"]
# %%ranks
"""The memory of one rank: model state, mixed precision with master weights, and activation checkpointing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations

import torch
from torch import nn

# %% [markdown]
# ## Exercise 6.1 · Break it: a count (10 min, 2 points)
#
# The lesson counted 4 + 4 + 8 bytes per parameter for fp32 training with Adam. Let's apply this rule to a small GPT
# whose position embedding is frozen:


# %%
# %%ranks
def rule_of_thumb_bytes(module, optimizer):
    elements = sum(tensor.numel() for tensor in module.state_dict().values())
    return {"parameters": 4 * elements, "gradients": 4 * elements, "optimizer": 8 * elements}


# %%
# %%ranks
from shared.data import CharTokens
from shared.models import TinyGPT

text = CharTokens()
inputs, targets = (batch.to(device) for batch in text.windows(range(rank, 400, 100), length=64))
gpt = TinyGPT().to(device)
gpt.position_embedding.requires_grad_(False)
adamw = torch.optim.AdamW(gpt.parameters())
gpt(inputs, targets).backward()
adamw.step()
print(rule_of_thumb_bytes(gpt, adamw))

# %% [markdown]
# **Predict.** All three numbers are wrong, for three reasons: some apply to several of the numbers, and one is worth
# only a few bytes. Which reasons can you think of?

# %%
my_reasons = []  # three strings

# %% [markdown]
# Now count the bytes of the model state:
#
# - `module` is any module, with any mixture of dtypes. Count its parameters, and the gradients that exist.
# - `optimizer` is any torch optimizer except `LBFGS`, before or after its first step. Its state is in
#   `optimizer.state`, which has a dict per parameter. The values of such a dict are tensors or plain numbers. Count
#   only the tensors. Do not add entries to `optimizer.state`: looking up a parameter that has none would create one.
# - Do not count buffers.
# - Target: exactly the bytes that `shared.memory.held` counts, but without calling `shared.memory`.
#
# <details><summary>Hint</summary>Which method of a module yields each parameter only once, even if two layers use it?
# What is the <code>grad</code> of a parameter that is frozen? And every tensor knows its size in bytes:
# <code>nbytes</code>.</details>


# %% tags=["exercise", "export"] grade_id="model-state-bytes"
# %%ranks
def model_state_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Count the bytes of the model state that this rank holds.

    Returns:
        The bytes of "parameters", "gradients" and "optimizer".
    """
    ### BEGIN SOLUTION
    parameters = list(module.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state_values = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(gradient.nbytes for gradient in gradients),
        "optimizer": sum(value.nbytes for value in state_values if torch.is_tensor(value)),
    }
    ### END SOLUTION


# %% tags=["check"] grade_id="check-model-state-bytes" points=2
check.model_state_bytes()

# %%
# %%ranks
estimated, counted = rule_of_thumb_bytes(gpt, adamw), model_state_bytes(gpt, adamw)

# %%
estimated, counted = ranks.pull("estimated")[0], ranks.pull("counted")[0]
for name, counted_bytes in counted.items():
    print(f"{name}: rule of thumb {estimated[name]:,} bytes, counted {counted_bytes:,} bytes")
if my_reasons:
    print("your reasons:", "; ".join(my_reasons))
assert all(counted[name] < estimated[name] for name in counted)

# %% [markdown]
# First, the token embedding and the output layer share one weight, and `state_dict()` lists it twice. Second, the
# frozen embedding has no gradient and no optimizer state. Third, and worth only a few bytes, AdamW keeps a step counter
# for each parameter.

# %% [markdown]
# ## Exercise 6.2 · The master weight of one parameter (15 min, 3 points)
#
# In the lesson, most weights did not change in one small update. Do a thousand such updates add up?

# %%
# %%ranks
weight = torch.ones(1, dtype=torch.bfloat16)
for _ in range(1000):
    weight += 0.001
print(f"1 + 1000 × 0.001 = {weight.item():.3f}")

# %% [markdown]
# All thousand updates are lost, because each is too small to change the rounded sum. With a **master weight** in
# float32, the optimizer updates the master, and the parameter is a rounded copy of it.
#
# The lesson's `WithMasters` held the float32 gradients of all parameters at once, which takes 4 more bytes per
# parameter. Many real optimizers do so, too, to update many parameters in one kernel. We save the 4 bytes here: your
# optimizer holds only *one* float32 gradient at a time. It contains another optimizer, `inner`, and lends it one master
# after another. You write `step_one`, which updates one parameter as follows. Exercise 6.3 calls it for every
# parameter.
# ```python
# state = self.state[parameter]              # a dict: empty before the first update
# master = state["master"]                   # the first update creates it, as a float32 copy of the parameter
# master.grad = parameter.grad.float()
# self.step_inner(master, inner_state, group)
# parameter.copy_(master)                    # in place, because other tensors may be views of the parameter
# free master.grad
# ```
#
# - A plain tensor is enough for a master. It need not be an `nn.Parameter`. A float32 parameter gets a master of its
#   own, too.
# - The given `step_inner` lets `inner` update one master. `inner_state` is a dict of everything that `inner` has stored
#   for this master so far, and nothing else (so without `"master"`). It is empty before the first update. `inner`
#   changes it in place.
# - Afterwards, store the entries of `inner_state` next to the master. With Adam, `self.state[parameter]` becomes
#   `{"master": …, "exp_avg": …, "exp_avg_sq": …, "step": …}`. ZeRO-1 and saved states rely on this layout.
# - Leave `parameter.grad` and `group` as they are: both belong to the caller.
# - Target: 2 + 2 + 12 bytes per parameter with Adam, and never more than one gradient in float32.
#
# <details><summary>Hint 1</summary>Where does a parameter's <code>inner_state</code> come from in its second update?
# And what does Adam do if the state that it finds is not empty, but has no <code>exp_avg</code>?</details>
#
# <details><summary>Hint 2</summary><code>inner</code> keeps a reference to the last master until the next call. Which
# attribute of the master must be freed before that? And for a parameter that is float32 already, does
# <code>.float()</code> return a copy?</details>


# %% tags=["exercise", "export"] grade_id="holds-masters"
# %%ranks
class HoldsMasters(torch.optim.Optimizer):
    """Keeps a float32 master of each parameter in its state, next to the state of optimizer_cls for this master."""

    # Given, keep it as it is.
    def __init__(self, params, optimizer_cls: type[torch.optim.Optimizer], **defaults):
        # A placeholder, because an optimizer needs a parameter. step_one() replaces it with one master at a time.
        self.inner = optimizer_cls([torch.empty(0)], **defaults)
        super().__init__(params, self.inner.defaults)

    # Given, keep it as it is. It reads the group's settings in each step, because a scheduler may change them.
    def step_inner(self, master: torch.Tensor, inner_state: dict, group: dict) -> None:
        """Let inner update this master alone, with the settings of the group. It reads and changes inner_state."""
        self.inner.param_groups = [{**group, "params": [master]}]
        self.inner.state = {master: inner_state}
        self.inner.step()

    def step_one(self, parameter: nn.Parameter, group: dict) -> None:
        """Update the master of one parameter in this group, and copy it to the parameter. Runs under no_grad()."""
        ### BEGIN SOLUTION
        state = self.state[parameter]
        if "master" not in state:
            state["master"] = parameter.detach().to(torch.float32, copy=True)
        master = state["master"]
        inner_state = {name: value for name, value in state.items() if name != "master"}
        master.grad = parameter.grad.float()
        self.step_inner(master, inner_state, group)
        state.update(inner_state)
        parameter.copy_(master)
        master.grad = None  # free it now, because inner keeps the master until the next step_one()
        ### END SOLUTION


# %% [markdown]
# Try it on the weight from above. Its gradient is −1 and the learning rate is 0.001, so each of the 1000 updates adds
# 0.001. Both numbers should be 2.000. (This tests neither Adam's state nor memory.)

# %%
# %%ranks
weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16, device=device))
optimizer = HoldsMasters([weight], torch.optim.SGD, lr=0.001)
with torch.no_grad():
    for _ in range(1000):
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step_one(weight, optimizer.param_groups[0])
master = optimizer.state[weight]["master"]
print(f"parameter {weight.item():.3f}, master weight {master.item():.3f}")

# %% [markdown]
# In the check, look at the line `plain` first, which trains parameters in bfloat16. The other lines try float16 and
# float32, change settings between steps, copy the state into a second optimizer, and count bytes.

# %% tags=["check"] grade_id="check-holds-masters" points=3
check.HoldsMasters()

# %% [markdown]
# ## Exercise 6.3 · Master weights for all parameters (8 min, 2 points)
#
# `MasterWeights` adds the loop to `HoldsMasters`. Write its `step`:
#
# - If there is a closure, it runs first, with gradients enabled. `step` returns its result. (As in torch, a closure is
#   a function that zeroes the gradients, runs backward and returns the loss.)
# - Update the parameters of all groups that `self.param_groups` contains *now*. Groups may be added later with
#   `add_param_group`, for example to unfreeze a layer, and ZeRO-1 (chapter 07) replaces all of them.
# - Skip parameters without a gradient, as torch's optimizers do. They look only at `grad`, not at `requires_grad`.
#
# <details><summary>Hint</summary>The whole method runs under <code>no_grad</code>, so in which context must the closure
# run? And where do you find the group that <code>step_one</code> needs?</details>


# %% tags=["exercise", "export"] grade_id="master-weights"
# %%ranks
class MasterWeights(HoldsMasters):
    """Trains low-precision parameters by updating their float32 masters with optimizer_cls(masters, **defaults).

    Memory: with Adam, 12 bytes per parameter for master, momentum and variance.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", §3.1.
    """

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient. Returns the result of the closure, if there is one."""
        ### BEGIN SOLUTION
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, group)
        return loss
        ### END SOLUTION

    # Given, keep it as it is: torch's load_state_dict rounds the masters to the dtype of their parameters.
    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state that state_dict() returned, with masters in float32."""
        super().load_state_dict(state_dict)
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if torch.is_tensor(value):  # keep the device that torch has chosen
                    device = self.state[parameter][name].device
                    self.state[parameter][name] = value.to(device, copy=True)


# %% [markdown]
# In the check, look at the line `values` first. The other lines try groups, schedulers and closures, save and load the
# state (`checkpoint`), and count bytes.

# %% tags=["check"] grade_id="check-master-weights" points=2
check.MasterWeights()

# %% [markdown]
# ## Exercise 6.4 · Recomputing activations (20 min, 3 points)
#
# A **checkpointed** module keeps only its inputs, and recomputes its activations in backward. For autograd, it is a
# function whose forward records no graph, and whose backward runs the module once more:
# ```python
# forward(ctx, module, num_inputs, *tensors):  # tensors are the module's inputs, then its parameters
#     save all tensors with ctx.save_for_backward, and everything else as attributes of ctx
#     return the module's output
#
# backward(ctx, gradient):  # the gradient of the output
#     tensors = the saved inputs, detached from their graph, then the saved parameters as they are
#     with torch.enable_grad(), restored(the random states of forward):
#         run the module again
#     grads = torch.autograd.grad(…)  # for all tensors that require a gradient, in one call
# ```
#
# Why are the parameters inputs of the function, although the module has them? Autograd asks a function only for the
# gradients of its inputs.
#
# - `module` is any function of at least one tensor. It returns one tensor.
# - A detached tensor does not require a gradient. If the saved input does, call `requires_grad_()` on the detached one.
# - Use `torch.autograd.grad`, because `.backward()` would write into `.grad` itself. Pass `gradient` as the gradient of
#   the output. Also pass `allow_unused=True`, because the module may not use every parameter.
# - The given last lines return one value per argument of forward. They use your variables `tensors` and `grads`.
# - Do not call torch's own `checkpoint`.
# - Dropout must drop the same elements again. In forward, store what `get_rng_states()` returns. This function and
#   `restored` are given.
# - Target: the module runs once in forward and once in backward. A gradient hook (as in `OverlappedDDP`) is called once
#   per parameter, even if other modules use the parameter, too. If you follow the steps above, you need not do anything
#   for this.
#
# <details><summary>Hint 1</summary>Which of the saved tensors need to be detached, and which must not be? What does
# <code>torch.autograd.grad</code> do with a tensor that requires no gradient?</details>
#
# <details><summary>Hint 2</summary>Forward draws random numbers, too. Should it store the random states before or after
# it runs the module?</details>


# %% tags=["export"]
# %%ranks
def get_rng_states() -> list[torch.Tensor]:
    """Return the states of the random generators of the CPU and, if it is in use, of the current GPU."""
    gpu_states = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *gpu_states]


def set_rng_states(states: list[torch.Tensor]) -> None:
    """Restore states that get_rng_states() returned."""
    cpu_state, *gpu_states = states
    torch.set_rng_state(cpu_state)
    for gpu_state in gpu_states:
        torch.cuda.set_rng_state(gpu_state)


@contextmanager
def restored(states: list[torch.Tensor]) -> Iterator[None]:
    """Restore random states for a with-block. After it, the generators continue from their states before it."""
    current_states = get_rng_states()
    set_rng_states(states)
    try:
        yield
    finally:
        set_rng_states(current_states)


# %% [markdown]
# The cell after yours defines `Checkpointed`, a module that uses your function.


# %% tags=["exercise", "export"] grade_id="recompute"
# %%ranks
class Recompute(torch.autograd.Function):
    """Computes module(*inputs), saves only inputs and parameters for backward, and recomputes activations there.

    Call it as Recompute.apply(module, len(inputs), *inputs, *parameters).

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", §4.
    """

    @staticmethod
    def forward(ctx, module: Callable, num_inputs: int, *tensors: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        ctx.module, ctx.num_inputs, ctx.rng_states = module, num_inputs, get_rng_states()
        ctx.save_for_backward(*tensors)
        return module(*tensors[:num_inputs])  # autograd records nothing in a function's forward
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        # Given, keep it: gradients are enabled here only under create_graph=True, to differentiate them again.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a checkpointed module cannot be differentiated twice: use create_graph=False"
            )
        ### BEGIN SOLUTION
        saved_inputs = ctx.saved_tensors[: ctx.num_inputs]
        inputs = [saved.detach().requires_grad_(saved.requires_grad) for saved in saved_inputs]
        tensors = [*inputs, *ctx.saved_tensors[ctx.num_inputs :]]
        with torch.enable_grad(), restored(ctx.rng_states):
            output = ctx.module(*inputs)
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        grads = torch.autograd.grad(output, differentiable, gradient, allow_unused=True)
        ### END SOLUTION
        # Given, keep it: module and num_inputs have no gradient, and neither has a tensor that requires none.
        remaining = iter(grads)
        return None, None, *(next(remaining) if each.requires_grad else None for each in tensors)


# %% tags=["export"]
# %%ranks
class Checkpointed(nn.Module):
    """Wraps a module so that it saves only its inputs for backward, and recomputes its activations there.

    It works inside and outside of autocast. backward(create_graph=True) raises a RuntimeError.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        device_type = inputs[0].device.type
        dtype = torch.get_autocast_dtype(device_type)
        enabled = torch.is_autocast_enabled(device_type)
        # Backward runs with other autocast settings, so wrap the module in those of forward. Do not cache casts: one
        # that was made under no_grad has no graph, so it must not be reused where gradients are needed.
        autocast = torch.autocast(device_type, dtype, enabled, cache_enabled=False)
        function = autocast(self.module)
        return Recompute.apply(function, len(inputs), *inputs, *self.module.parameters())


# %% [markdown]
# Backward usually runs outside of the `with torch.autocast(…)` block, so `Checkpointed` wraps the module in the
# autocast settings of forward. Try it on a small module:

# %%
# %%ranks
torch.manual_seed(0)
small = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1)).to(device)
x = torch.randn(2, 4, device=device, requires_grad=True)
losses = small(x).sum(), Checkpointed(small)(x).sum()
plain, recomputed = (
    torch.autograd.grad(loss, [x, *small.parameters()], allow_unused=True) for loss in losses
)
pairs = zip(plain, recomputed, strict=True)
print("equal:", [b is not None and torch.allclose(a, b) for a, b in pairs])

# %% [markdown]
# The check begins with a similar comparison. Then it tries dropout, autocast, changed inputs and parameters, and hooks.
# It counts matrix products and bytes.

# %% tags=["check"] grade_id="check-recompute" points=3
check.Checkpointed()

# %% [markdown]
# ## Exercise 6.5 · Choosing what to checkpoint (13 min, 3 points)
#
# Blocks run one after another. Block i keeps `saved_bytes[i]` for backward, which includes its input, or only
# `input_bytes[i]` if it is checkpointed. When backward reaches a checkpointed block, the activations of all later
# blocks have been freed. It recomputes the activations of this block, and holds them until the block's backward is
# complete:
# ```python
# kept[i] = input_bytes[i] if i in chosen else saved_bytes[i]
# held[k] = sum(kept[: k + 1]) + (saved_bytes[k] if k in chosen else 0)  # in backward of block k
# peak = max(held)
# ```
#
# Why does `held` add all of `saved_bytes[k]`, although the input is in memory already? In the lesson, the
# recomputation created the other 15 of a block's 16 parts. Your `Recompute` also computes the block's output, which is
# as large as its input. torch's `checkpoint` stops before that.
#
# **Predict.** There are four equal blocks, and you may checkpoint one of them. For which one does this *not* lower the
# peak? Write its index, from 0 to 3.

# %%
my_block = None

# %% [markdown]
# Write `activation_peak_bytes`. `chosen` contains the indices of the checkpointed blocks.
#
# <details><summary>Hint</summary>The pseudocode is the specification. Can you compute it in one loop over the blocks,
# if you remember the sum of <code>kept</code> so far?</details>


# %% tags=["exercise", "export"] grade_id="activation-peak"
# %%ranks
def activation_peak_bytes(
    saved_bytes: list[int], input_bytes: list[int], chosen: tuple[int, ...]
) -> int:
    """Predict the peak of all activations during backward if the chosen blocks are checkpointed.

    Args:
        saved_bytes: For each block, the bytes that it keeps for backward (with its input) if it is
            not checkpointed.
        input_bytes: For each block, the bytes of its input, which it keeps if it is checkpointed.
        chosen: The indices of the blocks to checkpoint.
    """
    ### BEGIN SOLUTION
    kept_bytes = peak_bytes = 0
    for block, block_bytes in enumerate(saved_bytes):
        is_checkpointed = block in chosen
        kept_bytes += input_bytes[block] if is_checkpointed else block_bytes
        recomputed_bytes = block_bytes if is_checkpointed else 0
        peak_bytes = max(peak_bytes, kept_bytes + recomputed_bytes)
    return peak_bytes
    ### END SOLUTION


# %% tags=["check"] grade_id="check-activation-peak" points=1
check.activation_peak_bytes()

# %%
# %%ranks
without = activation_peak_bytes([160] * 4, [10] * 4, ())
with_one = [activation_peak_bytes([160] * 4, [10] * 4, (block,)) for block in range(4)]

# %%
without, with_one = ranks.pull("without")[0], ranks.pull("with_one")[0]
print(f"peak without checkpoints: {without}; with one, in block 0, 1, 2 or 3: {with_one}")
no_gain = [block for block, peak in enumerate(with_one) if peak >= without]
print(f"{predicted(my_block, 'block {}')}computed {no_gain}")
assert no_gain == [3]

# %% [markdown]
# Checkpointing the last block saves nothing, and it costs the bytes of its input. Backward starts with the last block,
# so it recomputes the activations of this block while those of all other blocks are still in memory.
#
# Now choose the blocks:
#
# - `place_checkpoints` returns the indices of the blocks to checkpoint. It chooses as few blocks as possible such that
#   the peak is at most `target_bytes`.
# - If no choice reaches the target, the given last lines raise a `ValueError`. They use your variable `lowest_bytes`:
#   the lowest peak of all choices.
# - There are at most 12 blocks, so you can try all choices. Leave the two lists as they are.
#
# <details><summary>Hint</summary><code>itertools.combinations(blocks, count)</code> yields all choices of
# <code>count</code> blocks. In which order of <code>count</code> is the first choice that reaches the target also one
# with the fewest blocks?</details>


# %% tags=["exercise", "export"] grade_id="place-checkpoints"
# %%ranks
def place_checkpoints(
    saved_bytes: list[int], input_bytes: list[int], target_bytes: int
) -> tuple[int, ...]:
    """Choose as few blocks to checkpoint as possible so that the peak is at most target_bytes.

    Raises:
        ValueError: If no choice of blocks reaches the target.
    """
    ### BEGIN SOLUTION
    blocks = range(len(saved_bytes))
    choices = [chosen for count in range(len(blocks) + 1) for chosen in combinations(blocks, count)]
    peaks_bytes = {
        chosen: activation_peak_bytes(saved_bytes, input_bytes, chosen) for chosen in choices
    }
    # A dict keeps the order of choices, so those with the fewest blocks come first.
    for chosen, peak_bytes in peaks_bytes.items():
        if peak_bytes <= target_bytes:
            return chosen
    lowest_bytes = min(peaks_bytes.values())
    ### END SOLUTION
    # Given, keep it as it is.
    raise ValueError(
        f"no choice of checkpoints brings the peak down to {target_bytes:,} bytes: "
        f"the lowest possible peak is {lowest_bytes:,} bytes"
    )


# %% tags=["check"] grade_id="check-place-checkpoints" points=2
check.place_checkpoints()

# %% [markdown]
# ## Your figure (4 min)
#
# Now apply your functions to a GPT with six blocks. The next cell measures what each block keeps for backward:


# %%
# %%ranks
from shared import memory
from shared.models import GPTConfig

config = GPTConfig(vocab_size=text.vocab_size, layers=6)


def measure_block(block, x):
    """Return the bytes of activations that block(x) keeps for backward, and the bytes of its input."""
    with memory.peak(block) as peak:
        # The output has the size of the input, and must be alive while the bytes are counted.
        output = block(x)
    return peak.samples[-1].held.activations_bytes, output.nbytes


gpt = TinyGPT(config).to(device)
x = torch.randn(len(inputs), inputs.shape[1], config.width, device=device, requires_grad=True)
measured = [measure_block(block, x) for block in gpt.blocks]
saved_bytes, input_bytes = map(list, zip(*measured, strict=True))
print(f"Each block keeps {saved_bytes[0]:,} bytes; its input has {input_bytes[0]:,} bytes.")

# %% [markdown]
# **Predict.** Suppose that the activations of the blocks must shrink to 60%. How many of the six blocks must you
# checkpoint?

# %%
my_count = None


# %%
# %%ranks
def training_peak(model):
    model.zero_grad()
    with memory.peak(model) as peak:
        model(inputs, targets).backward()
    return peak


target_bytes = int(0.6 * sum(saved_bytes))
chosen = place_checkpoints(saved_bytes, input_bytes, target_bytes)
predicted = activation_peak_bytes(saved_bytes, input_bytes, chosen) / sum(saved_bytes)
peaks = {"no checkpoint": training_peak(gpt)}
for block in chosen:
    gpt.blocks[block] = Checkpointed(gpt.blocks[block])
peaks[f"{len(chosen)} checkpoints"] = training_peak(gpt)

# %% [markdown]
# The figure shows everything that forward and backward hold at the peak (there is no optimizer here). Compare the
# activations of the two bars. They include those of the output layer and the loss, which no checkpoint makes smaller.

# %%
chosen, share, peaks = (ranks.pull(name)[0] for name in ("chosen", "predicted", "peaks"))
components = {name: peak.held.by_component() for name, peak in peaks.items()}
before_bytes, after_bytes = (component["activations"] for component in components.values())
print(f"{predicted(my_count)}computed {len(chosen)}: blocks {chosen}")
print(f"The activations of the blocks should shrink to {share:.0%}.")
print(f"All activations, with output layer and loss, shrank to {after_bytes / before_bytes:.0%}.")
assert after_bytes < 0.75 * before_bytes
plots.memory_by_component(components)

# %% [markdown]
# The step needs less memory, but it computes the forward of the chosen blocks twice. Every rank does this extra work,
# and every rank still holds the same parameters, gradients and optimizer state. In chapter 07, the ranks begin to shard
# them.

# %%
ranks.stop()
