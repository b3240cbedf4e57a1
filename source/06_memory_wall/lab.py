# ---
# jupyter:
#   course:
#     module: memory_wall
#     minutes: 75
# ---

# %% [markdown]
# # Lab 06 · The memory wall
#
# **75 minutes, 13 points.** You count what a rank holds, train in mixed precision by hand, write activation
# checkpointing, and place checkpoints so that a model fits where it did not.
#
# Each exercise has a check. Bytes are counted exactly; times are never judged.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks
from shared.checks import memory_wall as check

ranks.start(world_size=2)

# %% tags=["export"]
# %%ranks
"""The memory of one rank: counted, kept in mixed precision, and saved by computing activations again."""

from collections.abc import Callable
from itertools import combinations

import torch
from torch import nn

# %% [markdown]
# ## Exercise 6.1 · Break it: a count (10 min, 2 points)
#
# Parameters times 4, 4 and 8 bytes: so the memory of fp32 training with Adam is counted everywhere. Here is such a
# count of a small GPT whose position embedding is frozen:
# %%
# %%ranks
from shared.data import CharTokens
from shared.models import TinyGPT

text = CharTokens()
inputs, targets = (batch.to(device) for batch in text.windows(range(rank, 400, 100), length=64))


def guessed_bytes(module, optimizer):
    numbers = sum(tensor.numel() for tensor in module.state_dict().values())
    return {"parameters": 4 * numbers, "gradients": 4 * numbers, "optimizer": 8 * numbers}


# %%
# %%ranks
gpt = TinyGPT().to(device)
gpt.position_embedding.requires_grad_(False)
adamw = torch.optim.AdamW(gpt.parameters())
gpt(inputs, targets).backward()
adamw.step()
print(guessed_bytes(gpt, adamw))

# %% [markdown]
# **Predict.** All three are wrong, for three reasons, one of which costs a few bytes only. Which?
#
# Now count. `module` is any module, in any mixture of dtypes; `optimizer` any torch optimizer, before or after its
# first step. Parameters and gradients are those of the module. What an optimizer holds is in `optimizer.state`, a dict
# per parameter; a value in it may be a tensor or a plain number, and a plain number costs nothing here.
#
# Target: equal to the memory ledger, to the byte. Buffers belong to none of the three.


# %% tags=["exercise", "export"] grade_id="model-state-bytes"
# %%ranks
def model_state_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Count what stays on this rank from step to step. → bytes of "parameters", "gradients" and "optimizer" """
    ### BEGIN SOLUTION
    parameters = list(module.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(
            parameter.grad.nbytes for parameter in parameters if parameter.grad is not None
        ),
        "optimizer": sum(value.nbytes for value in states if isinstance(value, torch.Tensor)),
    }
    ### END SOLUTION


# %% tags=["check"] grade_id="check-model-state-bytes" points=2
check.model_state_bytes()

# %%
# %%ranks
guessed = guessed_bytes(gpt, adamw)
for name, counted in model_state_bytes(gpt, adamw).items():
    print(f"{name}: guessed {guessed[name]:,} bytes, counted {counted:,}")

# %% [markdown]
# `state_dict()` lists the output layer's weight, which is the token embedding's, a second time. The frozen embedding
# has no gradient, and nothing is remembered of it. And a few bytes: AdamW counts the steps of each parameter.

# %% [markdown]
# ## Exercise 6.2 · Master weights (30 min, 5 points)
#
# In bfloat16 a number has 8 significant bits. What does a small update do to it?

# %%
# %%ranks
weight = torch.ones(1, dtype=torch.bfloat16)
for _ in range(1000):
    weight += 0.001
print(f"1 + 1000 × 0.001 = {weight.item():.3f}")

# %% [markdown]
# Nothing, a thousand times. So mixed precision computes in bfloat16 and *updates* in float32: each parameter has a
# **master**, which the optimizer steps, and of which the parameter is a rounded copy.
#
# `MasterWeights(params, optimizer_cls, **defaults)` is a torch optimizer around another one, `inner`, which steps
# masters. A step is, for each parameter with a gradient:
# ```python
# master.grad = parameter.grad.float()
# inner.step()  # of this master alone, with its group's settings of now
# parameter.copy_(master)
# ```
# - `self.state[parameter]` is a dict. Keep the master there, and what `inner` remembers of it between steps (which it
#   has in `inner.state[master]`), side by side: `{"master": …, "exp_avg": …, "exp_avg_sq": …, "step": …}` for Adam.
#   Then `state_dict()` finds all of it, and so will ZeRO-1; and `load_state_dict`, which is given, expects it so.
# - A closure, if there is one, runs first, with gradients enabled. `step` gives back what it returns.
# - Groups have settings of their own, and a scheduler changes them between steps: it writes to
#   `self.param_groups[i]["lr"]`, and some write `betas` or `momentum` too.
# - So settings that nobody gave must be there as well. A torch optimizer keeps its own in `.defaults`, which is what
#   `torch.optim.Optimizer.__init__(params, defaults)` wants; build one on any tensor, and look.
# - Groups may come later too, with `add_param_group`, when somebody unfreezes a layer.
# - A parameter without a gradient is left alone, as torch's optimizers do.
# - A float32 parameter gets a master too, one of its own. Parameters stay in their memory: others may view it.
# - Step what `self.param_groups` holds now: chapter 07 builds one on an empty tensor, clears the list and adds groups.
#
# Target: 2 + 2 + 12 bytes per parameter with Adam. Never more than *one* parameter's gradient in float32: the float32
# gradients of all would be 4 bytes more. So let `inner` have one master at a time.
# `HoldsMasters` updates one parameter; `MasterWeights` steps all.


# %% tags=["exercise", "export"] grade_id="holds-masters"
# %%ranks
class HoldsMasters(torch.optim.Optimizer):
    """Keeps a float32 master of each parameter in its state, beside what optimizer_cls remembers of it."""

    def __init__(self, params, optimizer_cls: type[torch.optim.Optimizer], **defaults):
        ### BEGIN SOLUTION
        self.inner = optimizer_cls([torch.empty(0)], **defaults)  # has one master at a time
        super().__init__(params, self.inner.defaults)
        ### END SOLUTION

    def step_one(self, parameter: nn.Parameter, group: dict) -> None:
        """Update a parameter of that group by way of its master."""
        ### BEGIN SOLUTION
        state = self.state[parameter]
        if "master" not in state:
            state["master"] = parameter.detach().to(torch.float32, copy=True)
        master = nn.Parameter(state["master"])
        master.grad = parameter.grad.float()
        remembered = {name: value for name, value in state.items() if name != "master"}
        self.inner.param_groups = [{**group, "params": [master]}]
        self.inner.state = {master: remembered}
        self.inner.step()
        state.update(remembered)
        master.grad = None  # inner still has the master
        parameter.copy_(master)
        ### END SOLUTION


# %% tags=["exercise", "export"] grade_id="master-weights"
# %%ranks
class MasterWeights(HoldsMasters):
    """Step parameters of low precision by way of float32 masters, with optimizer_cls(masters, **defaults).

    Memory: with Adam, 12 bytes per parameter: master, momentum and variance.
    Source: Micikevicius et al. 2018, "Mixed Precision Training", §3.1.
    """

    @torch.no_grad()
    def step(self, closure=None):
        """Update masters, then parameters. → what closure() returns, if there is one"""
        ### BEGIN SOLUTION
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, group)
        return loss
        ### END SOLUTION

    # given, keep: torch's own rounds masters to the dtype of their parameters
    def load_state_dict(self, state_dict: dict) -> None:
        """Take over what state_dict() gave."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if torch.is_tensor(value):  # on the device where torch's own has put it
                    device = self.state[parameter][name].device
                    self.state[parameter][name] = value.to(device, copy=True)


# %% tags=["check"] grade_id="check-master-weights" points=5
check.MasterWeights()

# %% [markdown]
# ## Exercise 6.3 · Compute it again (15 min, 3 points)
#
# Forward keeps what backward will need: the activations. A **checkpointed** module keeps its input only, and computes
# the rest again when backward comes. In autograd's words, it is a function whose forward records nothing and whose
# backward runs the module once more:
#
# | | given | keeps | gives back |
# |---|---|---|---|
# | forward | the module's inputs and its parameters | the inputs | the output, computed under `no_grad` |
# | backward | the output's gradient | | a gradient per input and per parameter, None where none is needed |
#
# The parameters are inputs of the function as well, though the module has them: autograd asks for gradients of a
# function's inputs only. Run the module under `enable_grad`, on inputs that are cut off from the graph
# (`detach()`), and ask `torch.autograd.grad` for all gradients at once. (`.backward()` would write them into `.grad`
# itself, and call hooks too early.)
#
# - `module` comes as a function of its inputs, not as an `nn.Module`: its parameters are among `tensors`, after the
#   `count` inputs. Keep tensors with `ctx.save_for_backward`, and the rest on `ctx`.
# - Backward returns one value per argument of forward: for `module` and `count` too, and theirs is None.
# - An input that needed no gradient must not get one. A parameter that nothing uses is no error: `allow_unused=True`.
# - Inputs are tensors, at least one, and there is one output.
# - `randomness()` and `replay(seen)` are given: what dropout dropped the first time, it must drop again, and after that
#   the generators go on from where backward found them.
# - `Checkpointed` is given too. Backward runs when `with torch.autocast(…)` has been left, so it hands `module` over
#   with the autocast of its forward around it.
#
# Target: the module runs once in forward and once in backward. A hook that waits for the finished gradient
# (`register_post_accumulate_grad_hook`, as in `OverlappedDDP`) is called once, also where somebody outside uses the
# parameter too. (One of `register_hook` is called twice: `torch.autograd.grad` calls those as well.)


# %% tags=["export"]
# %%ranks
def randomness() -> list[torch.Tensor]:
    """Remember where the random generators of the CPU and the GPU are."""
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpu]


def replay(seen: list[torch.Tensor]) -> None:
    """Set the generators back to where they were."""
    torch.set_rng_state(seen[0])
    if len(seen) > 1:
        torch.cuda.set_rng_state(seen[1])


# %% tags=["exercise", "export"] grade_id="recompute"
# %%ranks
class Recompute(torch.autograd.Function):
    """module(*inputs), of which only the inputs are kept: Recompute.apply(module, len(inputs), *inputs, *parameters).

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", §4.
    """

    @staticmethod
    def forward(ctx, module: Callable, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        ctx.module, ctx.count, ctx.random = module, count, randomness()
        ctx.save_for_backward(*tensors)
        return module(*tensors[:count])  # autograd records nothing inside a function's forward
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        # given, keep: create_graph=True enables gradients here, for gradients of these gradients
        if torch.is_grad_enabled():
            raise RuntimeError("a checkpointed module can be differentiated once only")
        ### BEGIN SOLUTION
        inputs = [
            tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor in ctx.saved_tensors[: ctx.count]
        ]
        tensors = [*inputs, *ctx.saved_tensors[ctx.count :]]
        now = randomness()
        replay(ctx.random)
        with torch.enable_grad():
            output = ctx.module(*inputs)
        replay(now)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        return None, None, *(next(found) if tensor.requires_grad else None for tensor in tensors)
        ### END SOLUTION


# %% tags=["export"]
# %%ranks
class Checkpointed(nn.Module):
    """Wrap a module so that it keeps its inputs for backward, and computes its activations again, autocast or not.

    Raises: RuntimeError in backward under create_graph=True.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        kind = inputs[0].device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        # In backward autocast is off, or another. A cast that no_grad made must not be used again where gradients pass.
        as_now = torch.autocast(kind, dtype, enabled, cache_enabled=False)
        return Recompute.apply(as_now(self.module), len(inputs), *inputs, *self.module.parameters())


# %% tags=["check"] grade_id="check-recompute" points=3
check.Checkpointed()

# %% [markdown]
# ## Exercise 6.4 · Where to put them (15 min, 3 points)
#
# Blocks run one after the other. Block i keeps `saved_bytes[i]`, or, checkpointed, `input_bytes[i]`. When backward
# reaches a checkpointed block, its activations come back for as long as its backward lasts; those of the blocks above
# it are gone by then.
#
# ```python
# kept[i] = input_bytes[i] if i in chosen else saved_bytes[i]
# held[k] = sum(kept[: k + 1]) + (saved_bytes[k] if k in chosen else 0)
# peak = max(held)  # held[k]: in backward of block k
# ```
#
# (Ours recomputes the output too, so all of `saved_bytes[k]` comes back beside the input. torch's, in the lesson, stops
# before it: 15 of 16 parts.)
#
# **Predict.** Four equal blocks, and you may checkpoint one. Which one saves nothing at the peak?


# %% tags=["exercise", "export"] grade_id="activation-peak"
# %%ranks
def activation_peak_bytes(
    saved_bytes: list[int], input_bytes: list[int], chosen: tuple[int, ...]
) -> int:
    """Predict the most that blocks keep during backward, if the chosen ones are checkpointed."""
    ### BEGIN SOLUTION
    kept_bytes = peak_bytes = 0
    for block, (saved, given) in enumerate(zip(saved_bytes, input_bytes, strict=True)):
        kept_bytes += given if block in chosen else saved
        again_bytes = saved if block in chosen else 0
        peak_bytes = max(peak_bytes, kept_bytes + again_bytes)
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
# The last one saves nothing, it costs its input: backward begins with it, so all that it gave up is back while
# everything below is still there.

# %% [markdown]
# `place_checkpoints` gives back the numbers of the blocks to checkpoint: as few as possible, so that the peak is at
# most `target_bytes`. If no choice does it, it raises a `ValueError` that says how many bytes the lowest peak has.
# There are at most 12 blocks.


# %% tags=["exercise", "export"] grade_id="place-checkpoints"
# %%ranks
def place_checkpoints(
    saved_bytes: list[int], input_bytes: list[int], target_bytes: int
) -> tuple[int, ...]:
    """Choose the fewest blocks to checkpoint so that the peak is at most target_bytes.

    Raises: ValueError when no choice is enough.
    """
    ### BEGIN SOLUTION
    blocks = range(len(saved_bytes))
    choices = [chosen for count in range(len(blocks) + 1) for chosen in combinations(blocks, count)]
    peaks_bytes = {
        chosen: activation_peak_bytes(saved_bytes, input_bytes, chosen) for chosen in choices
    }
    for chosen, peak_bytes in peaks_bytes.items():  # few before many
        if peak_bytes <= target_bytes:
            return chosen
    lowest_bytes = min(peaks_bytes.values())
    raise ValueError(
        f"{target_bytes:,} bytes are too few: checkpoints bring the peak to {lowest_bytes:,} at best"
    )
    ### END SOLUTION


# %% tags=["check"] grade_id="check-place-checkpoints" points=2
check.place_checkpoints()

# %% [markdown]
# ## Your figure
#
# A GPT of six blocks. What each block keeps is measured, with the ledger, on the rank:


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


def kept_by(block, x):
    """→ bytes of activations that block(x) leaves behind, and of its input"""
    with memory.peak(block) as peak:
        result = block(x)
    return peak.samples[-1].held.activations_bytes, result.nbytes


# %%
# %%ranks
gpt = TinyGPT(config).to(device)
x = torch.randn(len(inputs), inputs.shape[1], config.width, device=device, requires_grad=True)
saved_bytes, input_bytes = map(list, zip(*(kept_by(block, x) for block in gpt.blocks), strict=True))
print(f"{saved_bytes[0]:,} bytes kept by each block, or {input_bytes[0]:,} for its input")

# %% [markdown]
# The blocks' activations are to shrink to 60 %. How many must be computed again?

# %%
# %%ranks
target_bytes = int(0.6 * sum(saved_bytes))
chosen = place_checkpoints(saved_bytes, input_bytes, target_bytes)
predicted = activation_peak_bytes(saved_bytes, input_bytes, chosen) / sum(saved_bytes)
print(f"checkpointed: {chosen}, which should leave {predicted:.0%}")

# %%
# %%ranks
peaks = {"no checkpoint": training_peak(gpt)}
for block in chosen:
    gpt.blocks[block] = Checkpointed(gpt.blocks[block])
peaks[f"{len(chosen)} checkpoints"] = training_peak(gpt)

# %% [markdown]
# Measured, with all else that a step holds:

# %%
peaks = ranks.pull("peaks")[0]
held = {name: peak.held.by_component() for name, peak in peaks.items()}
without, placed = (each["activations"] for each in held.values())
print(f"activations at the peak: {placed / without:.0%} of what they were")
assert placed < 0.75 * without
plots.memory_by_component(held)

# %% [markdown]
# Less memory, and the chosen blocks' forward computed twice. Every rank pays that, and every rank holds the same
# parameters, gradients and optimizer state beside it. That is where chapter 07 begins.

# %%
ranks.stop()
