# ---
# jupyter:
#   course:
#     module: memory_wall
#     minutes: 75
# ---

# %% [markdown]
# # Lab 06 · The memory wall
#
# **75 minutes, 13 points.** You count what a rank holds, build mixed-precision training by hand, write activation
# checkpointing, and choose which blocks to checkpoint so that a model fits into less memory.
#
# Each exercise has a check. The checks count bytes exactly, and they never judge times.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks
from shared.checks import memory_wall as check

ranks.start(world_size=2)

# %% tags=["export"]
# %%ranks
"""The memory of one rank: model state, mixed precision with master weights, and activation checkpointing."""

from collections.abc import Callable
from itertools import combinations

import torch
from torch import nn

# %% [markdown]
# ## Exercise 6.1 · Break it: a count (10 min, 2 points)
#
# A common rule for fp32 training with Adam is 4 bytes per parameter for the parameters, 4 for the gradients and 8 for
# the optimizer state. Let's apply this rule to a small GPT whose position embedding is frozen:
# %%
# %%ranks
from shared.data import CharTokens
from shared.models import TinyGPT

text = CharTokens()
inputs, targets = (batch.to(device) for batch in text.windows(range(rank, 400, 100), length=64))


def rule_of_thumb_bytes(module, optimizer):
    elements = sum(tensor.numel() for tensor in module.state_dict().values())
    return {"parameters": 4 * elements, "gradients": 4 * elements, "optimizer": 8 * elements}


# %%
# %%ranks
gpt = TinyGPT().to(device)
gpt.position_embedding.requires_grad_(False)
adamw = torch.optim.AdamW(gpt.parameters())
gpt(inputs, targets).backward()
adamw.step()
print(rule_of_thumb_bytes(gpt, adamw))

# %% [markdown]
# **Predict.** All three numbers are wrong, for three reasons. One of the reasons is worth only a few bytes. What are
# the three reasons?
#
# Now count the bytes. `module` is any module, with any mixture of dtypes. `optimizer` is any torch optimizer, before or
# after its first step. Count the parameters of the module and their gradients. The state of the optimizer is in
# `optimizer.state`, which contains a dict per parameter. Its values are tensors or plain numbers; do not count plain
# numbers.
#
# Target: the same bytes as the memory ledger, exactly. Buffers belong to none of the three components.


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
estimated = rule_of_thumb_bytes(gpt, adamw)
for name, counted in model_state_bytes(gpt, adamw).items():
    print(f"{name}: rule of thumb {estimated[name]:,} bytes, counted {counted:,} bytes")

# %% [markdown]
# First, the token embedding and the output layer share one weight, and `state_dict()` lists it twice. Second, the
# frozen embedding has no gradient and no optimizer state. Third, and worth only a few bytes, AdamW keeps a step counter
# for each parameter.

# %% [markdown]
# ## Exercise 6.2 · Master weights (30 min, 5 points)
#
# A bfloat16 number has 8 significant bits. What does a small update change?

# %%
# %%ranks
weight = torch.ones(1, dtype=torch.bfloat16)
for _ in range(1000):
    weight += 0.001
print(f"1 + 1000 × 0.001 = {weight.item():.3f}")

# %% [markdown]
# All of the thousand updates are lost, because each is too small to change the rounded sum. So mixed precision computes
# in bfloat16 and *updates* in float32. Each parameter gets a **master weight** in float32. The optimizer updates the
# master, and the parameter is a rounded copy of it.
#
# `MasterWeights(params, optimizer_cls, **defaults)` is a torch optimizer that contains another one, `inner`, which
# updates the masters. For each parameter with a gradient, a step does the following:
# ```python
# master.grad = parameter.grad.float()
# inner.step()  # for this master only, with the current settings of its group
# parameter.copy_(master)
# ```
# - `self.state[parameter]` is a dict. Keep the master in it, next to the state that `inner` has for the master in
#   `inner.state[master]`. With Adam: `{"master": …, "exp_avg": …, "exp_avg_sq": …, "step": …}`. Then `state_dict()`
#   contains all of it. ZeRO-1 and the given `load_state_dict` rely on this layout.
# - If there is a closure, it runs first, with gradients enabled. `step` returns its result.
# - Each group has its own settings, and a scheduler changes them between steps: it writes to
#   `self.param_groups[i]["lr"]`, and some schedulers also write `betas` or `momentum`.
# - So the groups must also contain the settings that nobody passed. A torch optimizer has all its settings in
#   `.defaults`, and `torch.optim.Optimizer.__init__(params, defaults)` expects the same dict. Build an optimizer for
#   any tensor and look at it.
# - Groups may be added later with `add_param_group`, for example to unfreeze a layer.
# - Skip parameters without a gradient, as torch's optimizers do.
# - A float32 parameter gets a master of its own, too. Parameters keep their memory, because other tensors may be views
#   of it.
# - Step the groups that `self.param_groups` contains now. Chapter 07 builds a `MasterWeights` for an empty tensor,
#   clears the list, and adds groups.
#
# Target: 2 + 2 + 12 bytes per parameter with Adam, and never more than *one* parameter's gradient in float32, because
# all gradients in float32 would take 4 more bytes per parameter. So give `inner` only one master at a time.
# `HoldsMasters` updates one parameter, and `MasterWeights` steps all of them.


# %% tags=["exercise", "export"] grade_id="holds-masters"
# %%ranks
class HoldsMasters(torch.optim.Optimizer):
    """Keeps a float32 master of each parameter in its state, next to the state of optimizer_cls for this master."""

    def __init__(self, params, optimizer_cls: type[torch.optim.Optimizer], **defaults):
        ### BEGIN SOLUTION
        # A placeholder, because an optimizer needs a parameter. step_one() replaces it with one master at a time.
        self.inner = optimizer_cls([torch.empty(0)], **defaults)
        super().__init__(params, self.inner.defaults)
        ### END SOLUTION

    def step_one(self, parameter: nn.Parameter, group: dict) -> None:
        """Update the master of one parameter in this group, and copy it to the parameter."""
        ### BEGIN SOLUTION
        state = self.state[parameter]
        if "master" not in state:
            state["master"] = parameter.detach().to(torch.float32, copy=True)
        master = nn.Parameter(state["master"])
        master.grad = parameter.grad.float()
        inner_state = {name: value for name, value in state.items() if name != "master"}
        self.inner.param_groups = [{**group, "params": [master]}]
        self.inner.state = {master: inner_state}
        self.inner.step()
        state.update(inner_state)
        master.grad = None  # free it now, because inner keeps the master until the next step_one()
        parameter.copy_(master)
        ### END SOLUTION


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


# %% tags=["check"] grade_id="check-master-weights" points=5
check.MasterWeights()

# %% [markdown]
# ## Exercise 6.3 · Recomputing activations (15 min, 3 points)
#
# Forward saves the activations, because backward needs them. A **checkpointed** module saves only its inputs, and
# recomputes the activations in backward. For autograd, it is a function whose forward records nothing and whose
# backward runs the module once more:
#
# | | gets | saves | returns |
# |---|---|---|---|
# | forward | the module's inputs and its parameters | the inputs | the output, computed under `no_grad` |
# | backward | the gradient of the output | | a gradient per input and parameter, or None if it needs none |
#
# The parameters must be inputs of the function, even though the module has them, because autograd asks a function only
# for the gradients of its inputs. In backward, run the module under `enable_grad` on inputs that are detached from the
# graph (`detach()`), and compute all gradients with one call of `torch.autograd.grad`. (`.backward()` would write into
# `.grad` itself, and hooks would run too early.)
#
# - `module` is any function of the inputs, not necessarily an `nn.Module`. `tensors` holds the inputs, `num_inputs` of
#   them, followed by the parameters. Save tensors with `ctx.save_for_backward`, and everything else as an attribute of
#   `ctx`.
# - Backward returns one value per argument of forward. For `module` and `num_inputs`, it returns None.
# - An input that needs no gradient must get None. An unused parameter is not an error: pass `allow_unused=True`.
# - There is at least one input, all inputs are tensors, and there is one output.
# - `get_rng_states()` and `set_rng_states(states)` are given. Dropout must drop the same elements again. Afterwards,
#   the random generators must continue from the state in which backward found them.
# - `Checkpointed` is given, too. Backward usually runs outside of the `with torch.autocast(…)` block, so `Checkpointed`
#   wraps `module` in the autocast settings of forward.
#
# Target: the module runs once in forward and once in backward. A hook that runs when a gradient is complete
# (`register_post_accumulate_grad_hook`, as in `OverlappedDDP`) is called once, even if the parameter is also used
# outside of the module. (A hook of `register_hook` is called twice, because `torch.autograd.grad` calls it as well.)


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


# %% tags=["exercise", "export"] grade_id="recompute"
# %%ranks
class Recompute(torch.autograd.Function):
    """Computes module(*inputs), saves only the inputs for backward, and recomputes all activations there.

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
        current_states = get_rng_states()
        set_rng_states(ctx.rng_states)
        with torch.enable_grad():
            output = ctx.module(*inputs)
        set_rng_states(current_states)
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        grads = iter(torch.autograd.grad(output, differentiable, gradient, allow_unused=True))
        return None, None, *(next(grads) if tensor.requires_grad else None for tensor in tensors)
        ### END SOLUTION


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


# %% tags=["check"] grade_id="check-recompute" points=3
check.Checkpointed()

# %% [markdown]
# ## Exercise 6.4 · Choosing what to checkpoint (15 min, 3 points)
#
# Blocks run one after another. Block i keeps `saved_bytes[i]` for backward, or only `input_bytes[i]` if it is
# checkpointed. When backward reaches a checkpointed block, it recomputes the block's activations and holds them until
# the backward of this block is complete. By then, the activations of all later blocks are freed.
#
# ```python
# kept[i] = input_bytes[i] if i in chosen else saved_bytes[i]
# held[k] = sum(kept[: k + 1]) + (saved_bytes[k] if k in chosen else 0)
# peak = max(held)  # held[k]: in backward of block k
# ```
#
# (`Recompute` computes the block's output again, too, so all of `saved_bytes[k]` comes back, in addition to the input.
# torch's checkpoint, which the lesson used, stops before the output: it brought back 15 of 16 parts.)
#
# **Predict.** There are four equal blocks, and you may checkpoint one of them. Which one does not lower the peak?


# %% tags=["exercise", "export"] grade_id="activation-peak"
# %%ranks
def activation_peak_bytes(
    saved_bytes: list[int], input_bytes: list[int], chosen: tuple[int, ...]
) -> int:
    """Predict the peak of all activations during backward if the chosen blocks are checkpointed.

    Args:
        saved_bytes: For each block, the bytes that it keeps for backward if it is not checkpointed.
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
print("no checkpoint:", activation_peak_bytes([160] * 4, [10] * 4, ()))
for block in range(4):
    print(f"block {block}:", activation_peak_bytes([160] * 4, [10] * 4, (block,)))

# %% [markdown]
# Checkpointing the last block saves nothing, and it costs the bytes of its input. Backward starts with the last block,
# so it recomputes the activations of this block while those of all other blocks are still in memory.

# %% [markdown]
# `place_checkpoints` returns the indices of the blocks to checkpoint: as few as possible, but so that the peak is at
# most `target_bytes`. If no choice reaches the target, it raises a `ValueError` that says how many bytes the lowest
# possible peak has. There are at most 12 blocks.


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
    for (
        chosen,
        peak_bytes,
    ) in peaks_bytes.items():  # in the order of choices: the fewest blocks first
        if peak_bytes <= target_bytes:
            return chosen
    lowest_bytes = min(peaks_bytes.values())
    raise ValueError(
        f"no choice of checkpoints brings the peak down to {target_bytes:,} bytes: "
        f"the lowest possible peak is {lowest_bytes:,} bytes"
    )
    ### END SOLUTION


# %% tags=["check"] grade_id="check-place-checkpoints" points=2
check.place_checkpoints()

# %% [markdown]
# ## Your figure
#
# Now apply it to a GPT with six blocks. The next cells measure on the ranks what each block keeps for backward:


# %%
# %%ranks
from shared import memory
from shared.models import GPTConfig
from shared.wire import mismatch

mismatch.ignore()
config = GPTConfig(vocab_size=text.vocab_size, layers=6)


def training_peak(model):
    model.zero_grad()
    with memory.peak(model) as peak:
        model(inputs, targets).backward()
    return peak


def measure_block(block, x):
    """Return the bytes of activations that block(x) keeps for backward, and the bytes of its input."""
    with memory.peak(block) as peak:
        # The output has the size of the input, and must be alive while the bytes are counted.
        output = block(x)
    return peak.samples[-1].held.activations_bytes, output.nbytes


# %%
# %%ranks
gpt = TinyGPT(config).to(device)
x = torch.randn(len(inputs), inputs.shape[1], config.width, device=device, requires_grad=True)
measured = [measure_block(block, x) for block in gpt.blocks]
saved_bytes, input_bytes = map(list, zip(*measured, strict=True))
print(f"Each block keeps {saved_bytes[0]:,} bytes; its input has {input_bytes[0]:,} bytes.")

# %% [markdown]
# Suppose that the activations of the blocks must shrink to 60%. How many blocks must you checkpoint?

# %%
# %%ranks
target_bytes = int(0.6 * sum(saved_bytes))
chosen = place_checkpoints(saved_bytes, input_bytes, target_bytes)
predicted = activation_peak_bytes(saved_bytes, input_bytes, chosen) / sum(saved_bytes)
print(f"Checkpointing blocks {chosen} should leave {predicted:.0%} of the activations.")

# %%
# %%ranks
peaks = {"no checkpoint": training_peak(gpt)}
for block in chosen:
    gpt.blocks[block] = Checkpointed(gpt.blocks[block])
peaks[f"{len(chosen)} checkpoints"] = training_peak(gpt)

# %% [markdown]
# This is the measured peak, together with everything else that a step holds:

# %%
peaks = ranks.pull("peaks")[0]
components = {name: peak.held.by_component() for name, peak in peaks.items()}
before_bytes, after_bytes = (component["activations"] for component in components.values())
print(f"The activations at the peak shrank to {after_bytes / before_bytes:.0%}.")
assert after_bytes < 0.75 * before_bytes
plots.memory_by_component(components)

# %% [markdown]
# The step needs less memory, but it computes the forward of the chosen blocks twice. Every rank has this extra work.
# And every rank still holds the same parameters, gradients and optimizer state, which is where chapter 07 begins.

# %%
ranks.stop()
