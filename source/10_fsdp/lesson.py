# ---
# jupyter:
#   course:
#     module: zero3
# ---

# %% [markdown]
# # 10 · FSDP
#
# **55–85 minutes.** After this lesson, you will be able to:
#
# - explain how FSDP knows when backward is done with a unit,
# - say what micro-batches, frozen layers and checkpointed layers cost in a sharded model,
# - halve the bytes that a step sends with bf16, while the optimizer updates fp32 shards,
# - create a model that is never whole on any rank, with the same initial values on any number of ranks,
# - explain why a GPU needs more than 16Ψ/N bytes.
#
# You need units, the root, `unshard` and `reshard` (chapter 09), reduce-scattered buckets (chapter 08), and activation
# checkpointing (chapter 06). Ψ is the number of parameters, and N that of ranks.

# %% [markdown]
# ## Where we are
#
# In chapter 09, you trained a sharded GPT: each rank keeps only its shard, and unshards a unit while that unit
# computes. PyTorch calls this **fully sharded data parallelism**, or **FSDP**. Your version trains, but it cannot be
# used for every model yet:
#
# - It counts gradients. Once there are as many as the unit has parameters, it assumes that backward is done with the
#   unit.
# - It shards a model that already exists, so every rank must once have had room for the whole model.
#
# This lesson removes both limits. How many gradients does a unit really get? The next cells count them for block 1 of
# three GPTs. In the last one, each rank uses only one of two `up` layers, as in a mixture of experts.

# %% tags=["nbval-ignore-output"]
from shared import formulas, plots, ranks, tables
from shared.plots import diagrams
from shared.predictions import predicted

ranks.start(world_size=4, detect_mismatch=False)

# %%
# %%ranks
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from shared import memory, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT

text = CharTokens()
config = GPTConfig(vocab_size=800, layers=6, width=128)


class Experts(nn.Module):
    """Two layers. Even ranks use the first one, and odd ranks the second."""

    def __init__(self, first, second, index=rank):
        super().__init__()
        self.layers, self.index = nn.ModuleList([first, second]), index

    def forward(self, x):
        return self.layers[self.index % 2](x)


def new_model():
    return TinyGPT(config).to(device)


# %%
# %%ranks
def frozen(model):
    for block in model.blocks:
        block.up.requires_grad_(False)
    return model


def unused(model):
    others = TinyGPT(model.config, seed=1).to(device, model.norm.weight.dtype).blocks
    for block, other in zip(model.blocks, others, strict=True):
        block.up = Experts(block.up, other.up)
    return model


def own_batch(of_rank=rank):
    windows = text.windows(range(of_rank, 400, 100), length=32)
    return [tokens.to(device) for tokens in windows]


def count(model):
    """Count the parameters of block 1, and the gradients that come for them."""
    model(*own_batch()).backward()
    parameters = list(model.blocks[1].parameters())
    return len(parameters), sum(p.grad is not None for p in parameters)


counts = {
    "plain": count(new_model()),
    "frozen layers": count(frozen(new_model())),
    "two experts": count(unused(new_model())),
}

# %%
counts = ranks.pull("counts")[0]
for name, (parameters, gradients) in counts.items():
    print(f"{name:13} │ {parameters} parameters, {gradients} gradients")
    assert (parameters == gradients) == (name == "plain")

# %% [markdown]
# In the second and third versions, the count is never complete, so the block's gradients would never be reduced. For
# frozen parameters, it helps to count only the trainable ones. But with two experts, different ranks miss *different*
# gradients, and no rank knows in advance which ones will come.

# %% [markdown]
# ## When is backward done with a unit?
#
# Autograd knows. Backward goes through a unit from its outputs to its inputs, so it computes the gradients of the
# *inputs* last, when nothing is left to do inside the unit. We therefore pass the inputs through a function that
# changes nothing, but whose backward calls our own code. FSDP2 does the same.


# %%
# %%ranks
class AfterBackward(torch.autograd.Function):
    """The identity on a unit's inputs. Its backward runs when backward is done with the unit."""

    @staticmethod
    def forward(ctx, post_backward, *inputs):
        ctx.post_backward = post_backward
        return inputs

    @staticmethod
    def backward(ctx, *gradients):
        ctx.post_backward()
        return None, *gradients


# %% [markdown]
# **Predict.** A unit computes `output = x * weight`, and its input `x` passes through `AfterBackward`. In which order
# does the next cell print its three lines? Write their letters in that order, for example "abc".

# %%
my_prediction = None

# %%
# %%ranks
printed = []
x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
(inside,) = AfterBackward.apply(lambda: printed.append("a: backward is done with the unit"), x)
weight.register_hook(lambda _: printed.append("b: the gradient of the weight is complete"))
output = inside * weight
output.register_hook(lambda _: printed.append("c: the gradient of the output is complete"))
output.sum().backward()
print("\n".join(printed))

# %%
order = "".join(line[0] for line in ranks.pull("printed")[0])
print(f"{predicted(my_prediction)}the order is {order}")
assert order == "cba"

# %% [markdown]
# The gradient of the output comes first, then that of the weight, and then autograd leaves the unit. The first event
# tells us to unshard the unit for its backward. The last one tells us to reduce its gradients and reshard it. Neither
# event depends on which gradients come in between.

# %% [markdown]
# ## The short version
#
# With `Unit` (lab 09) and `ShardedBucket` (lab 08), four hooks are enough for all of these models. They have the same
# names as in FSDP2. In `post_backward`, look at the inner loop: it packs every gradient of the unit, and a missing one
# counts as zeros. So all ranks launch the same reduce-scatters, whichever gradients they have. `post_backward` waits
# for each at once; in the lab, you wait one unit later.


# %%
# %%ranks
from solutions.units import UnitState, shard_into_units
from solutions.zero2 import ShardedBucket


def pre_forward(unit, _submodule, inputs):
    # In state BACKWARD, checkpointing is repeating this forward, so the unit stays as it is.
    if unit.state is not UnitState.BACKWARD:
        unit.wait_for_unshard()
        if torch.is_grad_enabled() and inputs[0].requires_grad:
            return AfterBackward.apply(partial(post_backward, unit), *inputs)


def post_forward(unit, _submodule, _inputs, output):
    if unit.state is not UnitState.BACKWARD:
        if output.requires_grad:
            output.register_hook(lambda _gradient: pre_backward(unit))
        if unit.reshard_after_forward:  # false for the root
            unit.reshard()


def pre_backward(unit):
    unit.wait_for_unshard()
    unit.state = UnitState.BACKWARD


def post_backward(unit):
    for flat_parameter in unit.flat_parameters:
        if flat_parameter.shard.requires_grad:
            bucket = ShardedBucket(flat_parameter)
            for index in range(len(bucket.parameters)):
                bucket.pack(index)
            bucket.launch()
            bucket.wait()
    unit.reshard()


# %% [markdown]
# If no input of a unit needs a gradient, `AfterBackward` is never called. The root is such a unit, because its inputs
# are tokens. So `finish_gradient_sync()` calls `post_backward` for it.


# %%
# %%ranks
class ShortFSDP(nn.Module):
    def __init__(self, module, units=None):
        super().__init__()
        self.module, self.units = module, units or shard_into_units(module)
        for submodule, unit in self.units.items():
            submodule.register_forward_pre_hook(partial(pre_forward, unit))
            submodule.register_forward_hook(partial(post_forward, unit))

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_sync(self):
        for unit in self.units.values():
            if unit.state is UnitState.BACKWARD:
                post_backward(unit)
            unit.reshard()

    def parameters(self, recurse=True):
        flat_parameters = (flat for unit in self.units.values() for flat in unit.flat_parameters)
        return (flat_parameter.shard for flat_parameter in flat_parameters)


# %% [markdown]
# ## Models that chapter 09 could not train
#
# We train four models for three steps of AdamW in float64, and compare the losses with those of one process that has
# the samples of all four ranks. We also run torch's FSDP2 (`fully_shard`).


# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

AdamW, settings = torch.optim.AdamW, {"lr": 1e-3}


def in_fsdp2(model, **options):
    mesh = init_device_mesh(device.type, (world_size,))
    for block in dict.fromkeys(model.blocks):  # each once, also one that is called twice
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def checkpointed(model):
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def called_twice(model):
    model.blocks.append(model.blocks[0])
    return model


# %%
# %%ranks
def new_small_model():
    small = GPTConfig(vocab_size=text.vocab_size, layers=3, width=32)
    return TinyGPT(small).to(device, torch.float64)


def losses_of(model, of_ranks):
    """Return the losses of three steps on the samples of some ranks."""
    optimizer, losses = AdamW(model.parameters(), **settings), []
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    for _ in range(3):
        optimizer.zero_grad()
        loss = 0.0
        for of_rank in of_ranks:
            for each in experts:
                each.index = of_rank
            loss += model(*own_batch(of_rank)) / len(of_ranks)
        loss.backward()
        if hasattr(model, "finish_gradient_sync"):
            model.finish_gradient_sync()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


# %%
# %%ranks
def difference(change, wrap):
    """Return by how much the losses differ from those of one process."""
    alone = losses_of(change(new_small_model()), range(world_size))
    losses = losses_of(wrap(change(new_small_model())), [rank])
    dist.all_reduce(losses)
    return (losses / world_size - alone).abs().max().item()


changes = {
    "frozen layers": frozen,
    "blocks checkpointed": checkpointed,
    "block 0 called twice": called_twice,
    "two experts": unused,
}
differ = {name: [difference(change, ShortFSDP)] for name, change in changes.items()}
for name, change in list(changes.items())[:3]:
    differ[name].append(difference(change, in_fsdp2))

# %% tags=["nbval-ignore-output"]
differ = ranks.pull("differ")[0]
for name, found in differ.items():
    pairs = zip(("ours", "FSDP2"), found, strict=False)
    print(f"{name:20} │", ", ".join(f"{wrapper} {each:.0e}" for wrapper, each in pairs))
    assert max(found) < 1e-10

# %% [markdown]
# All four models train as in one process. In the third one, backward passes through block 0 twice, and we reduce after
# each pass. The gradients are complete only after the second, so the first reduce-scatter sends zeros.
#
# The models' token embedding is **tied** to the output layer: both use the same parameter. That works because both lie
# in the root. If they were in two units, neither unit could reshard the parameter alone, so lab 09's `owned_parameters`
# gives such a parameter to the root.
#
# We did not try the last model with FSDP2. By default, FSDP2 reduces only the gradients that a rank has. For such
# models, this course's version of torch has `set_reduce_scatter_unused_params(True)`, which does what our code does.

# %% [markdown]
# ## What each case costs
#
# The next cells count the collectives of a step with FSDP2, and measure the peak memory of the parameters.
#
# The last case is mixed precision. In chapter 06, the optimizer updated fp32 master weights, and the model computed
# with bf16 copies. In a sharded model, the shards *are* the master weights: a rank rounds its shard to bf16 just before
# the all-gather, so the unsharded parameters are bf16.
#
# **Predict.** How many bytes does a step send with bf16, as a fraction of the bytes with fp32? 1 means just as many.

# %%
my_prediction = None


# %%
# %%ranks
def with_adamw(model):
    return model, AdamW(model.parameters(), **settings)


def step_of(model, optimizer, micro_batches=1):
    optimizer.zero_grad()
    for _ in range(micro_batches):
        (model(*own_batch()) / micro_batches).backward()
    optimizer.step()


def watched(model, optimizer, step=step_of):
    """Return, for a second step, the most bytes of parameters, and the ledger."""
    step(model, optimizer)
    with memory.peak(model, optimizer) as peak, wire.ledger() as log:
        step(model, optimizer)
    return max(sample.held.parameters_bytes for sample in peak.samples), log


two_micro_batches = partial(step_of, micro_batches=2)
in_bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
cases = {
    "a step": watched(*with_adamw(in_fsdp2(new_model()))),
    "two micro-batches": watched(*with_adamw(in_fsdp2(new_model())), two_micro_batches),
    "frozen layers": watched(*with_adamw(in_fsdp2(frozen(new_model())))),
    "checkpointed": watched(*with_adamw(in_fsdp2(checkpointed(new_model())))),
    "block called twice": watched(*with_adamw(in_fsdp2(called_twice(new_model())))),
    "bf16": watched(*with_adamw(in_fsdp2(new_model(), mp_policy=in_bf16))),
}
psi = sum(p.numel() for p in new_model().parameters())

# %%
cases, psi, rows = ranks.pull("cases")[0], ranks.pull("psi")[0], []
for name, (peak_bytes, log) in cases.items():
    counts = [log.ops.get(op, 0) for op in ("all_gather", "reduce_scatter")]
    sent_mb, peak_mb = log.sent_bytes / 1e6, peak_bytes / 1e6
    rows.append([name, *map(str, counts), f"{sent_mb:.2f}", f"{peak_mb:.2f}"])
sent_bytes = {name: log.sent_bytes for name, (_, log) in cases.items()}
print(f"{predicted(my_prediction)}measured {sent_bytes['bf16'] / sent_bytes['a step']:g}")
assert sent_bytes["bf16"] == sent_bytes["a step"] / 2
assert sent_bytes["two micro-batches"] > 1.9 * sent_bytes["a step"]
assert sent_bytes["frozen layers"] < 0.95 * sent_bytes["a step"]
assert sent_bytes["checkpointed"] == sent_bytes["a step"] < sent_bytes["block called twice"]
tables.Table(["", "all-gathers", "reduce-scatters", "sent, MB", "parameters' peak, MB"], rows)

# %% [markdown]
# - **A step** all-gathers each of the six blocks twice, and the root once. The peak leaves out the block that FSDP2
#   prefetches in backward, which lies in a buffer.
# - **Two micro-batches** cost twice as much. Between them, a rank keeps only its shards of the gradients.
# - **Frozen layers** are all-gathered, but have no gradients to reduce.
# - **Activation checkpointing** adds no collectives. A block's forward runs again while backward has it unsharded.
# - **A block that is called twice** is all-gathered for each call by FSDP2. It is reduced once, after both calls.
# - **bf16** halves the bytes that are sent and the memory of unsharded parameters. The shards stay fp32. The ranks'
#   gradients are also added up in bf16, unless you ask for `MixedPrecisionPolicy(reduce_dtype=torch.float32)`.

# %% [markdown]
# ## Creating a model that is never whole
#
# So far, every rank once had the whole model. A model that needs 100 GPUs cannot be created like that. PyTorch's answer
# is the **meta device**, whose tensors have a shape and a dtype, but no memory and no values. With **deferred
# initialization**, we build and shard the model there. Afterwards, we **materialize** the shards: we give them memory
# and values. In the diagram, look at what each rank holds after each step:

# %%
diagrams.deferred_init()

# %% [markdown]
# Which values should the parameters get? They should be the same on any number of ranks, or you could not repeat an
# experiment on a larger cluster. It is tempting to let each rank fill its own shard with random values. But if all
# ranks use the same seed, the N shards are copies of each other. If each rank uses its own seed, the initial values
# depend on N.
#
# So each parameter gets a seed that depends on its *name* alone, and every rank draws random values for the whole
# parameter:


# %%
# %%ranks
import zlib


def initialize(name, parameter):
    """Fill a parameter with values that depend on its name, and on nothing else."""
    if parameter.dim() > 1:
        seed = zlib.crc32(name.encode())
        generator = torch.Generator(parameter.device).manual_seed(seed)
        nn.init.normal_(parameter, std=0.02, generator=generator)
    else:  # of a LayerNorm
        nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)


# %% [markdown]
# In lab 09, the constructor of `ShardedFlatParameter` copies existing values into `flat_param` and broadcasts them. The
# version below draws the values instead, so it sends nothing. It follows the diagram: it gives `flat_param` memory,
# fills it, keeps this rank's shard, and frees the memory again.
#
# A parameter on the meta device cannot get a slice of `flat_param` as its data, so `swap_tensors` first makes it an
# empty one on the rank's device.


# %%
# %%ranks
from solutions.flat import FlatLayout
from solutions.units import ShardedFlatParameter, Unit, default_units, owned_parameters


class DeferredFlatParameter(ShardedFlatParameter):
    def __init__(self, parameters, name_of):
        self.layout = layout = FlatLayout(parameters)
        padded_numel = world_size * layout.shard_shape.numel()
        self.flat_param = torch.zeros(padded_numel, dtype=parameters[0].dtype, device=device)
        for parameter, view in zip(parameters, layout.views(self.flat_param), strict=True):
            initialize(name_of[parameter], view)
            torch.utils.swap_tensors(parameter, nn.Parameter(view.new_empty(0)))
            parameter.data = view
        self.shard = nn.Parameter(layout.shard_of(self.flat_param).clone())
        self.reshard()


def shard_deferred(module):
    name_of = {parameter: name for name, parameter in module.named_parameters()}
    units = {}
    for owner, parameters in owned_parameters(module, default_units(module)).items():
        flat_parameter = DeferredFlatParameter(parameters, name_of)
        units[owner] = Unit([flat_parameter], reshard_after_forward=owner is not module)
    return units


def deferred(of_config=config, dtype=torch.float32):
    with torch.device("meta"):
        model = TinyGPT(of_config).to(dtype)
    return ShortFSDP(model, shard_deferred(model))


# %% [markdown]
# **Predict.** What is the most memory that a rank needs to create the model, as a multiple of Ψ elements? 1 means as
# much as the whole model. There are four ranks, and each of the six blocks has 15% of Ψ.

# %%
my_prediction = None


# %%
# %%ranks
def peak_bytes_of(create):
    """Return the most bytes that this rank holds while it creates a model."""
    # The empty tensor tells memory.peak which device to watch.
    with memory.peak(extra={"parameters": [torch.empty(0, device=device)]}) as peak:
        create()
    return peak.peak_bytes


in_full = peak_bytes_of(lambda: ShortFSDP(new_model()))
peaks_bytes = {"in full": in_full, "deferred": peak_bytes_of(deferred)}

# %%
multiples = {name: size / (4 * psi) for name, size in ranks.pull("peaks_bytes")[0].items()}
print(f"{predicted(my_prediction)}measured {multiples['deferred']:.2f}")
assert multiples["deferred"] < 0.5 < 1 < multiples["in full"]
plots.bars(multiples, "most memory while the model is created, as a multiple of Ψ elements")

# %% [markdown]
# The peak is one full block and the shards of all six, because `.clone()` copies a shard before its `flat_param` is
# freed.
#
# But each rank draws all parameters, and keeps only 1/N of them. In the lab, a rank draws only those in its shard.
#
# ## Training it
#
# Are the values right? We train the model and, for comparison, one that was initialized as a whole. Both train on text
# for 50 steps of AdamW in float64. Gradients are clipped, so we need the norm of the *whole* gradient, but each rank
# holds only a shard of it. Squared norms can be added up, so one all-reduce of a single element is enough. Lab 07's
# `clip_shards_` does this.


# %%
# %%ranks
from solutions.clipping import clip_shards_

small = GPTConfig(vocab_size=text.vocab_size, layers=3, width=64)


def clip(model):
    if isinstance(model, ShortFSDP):
        model.finish_gradient_sync()
        clip_shards_([shard.grad for shard in model.parameters()], max_norm=1.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)


def whole(of_config):
    model = TinyGPT(of_config).to(device, torch.float64)
    for name, parameter in model.named_parameters():
        initialize(name, parameter)
    return model


def train(model, share, steps=50):
    """Return the losses. A batch has 8 samples, and this rank takes its share of them."""
    optimizer, losses = AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps):
        starts = range(1000 * step, 1000 * step + 800, 100)[share]
        x, y = (tokens.to(device) for tokens in text.windows(starts, length=32))
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        clip(model)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


alone = train(whole(small), slice(None))
together = train(deferred(small, torch.float64), slice(rank, None, world_size))
dist.all_reduce(together)
together /= world_size

# %% tags=["nbval-ignore-output"]
alone, together = (ranks.pull(name)[0].tolist() for name in ("alone", "together"))
difference = max(abs(one - other) for one, other in zip(alone, together, strict=True))
print(f"largest difference of the losses: {difference:.0e}")
assert difference < 1e-10 and together[-1] < 0.85 * together[0]
plots.loss_curves({"one process, whole": alone, "4 ranks, never whole": together})

# %% [markdown]
# The two curves coincide: the initial values, the clipped gradients and the updates are the same, although no rank ever
# held the whole model.
#
# How do you save such a model? A **full state dict** holds every parameter in full, so any program can load it, but the
# rank that builds it needs room for the whole model. In a **sharded state dict**, each rank saves only its own shards,
# and any number of ranks can read what they need. You build both in the lab.

# %% [markdown]
# ## 16Ψ/N is not the peak
#
# If ZeRO-3 needed 16Ψ/N bytes per rank, any model would fit on enough ranks. We test this with Llama-2 70B in mixed
# precision, one sequence of 2,048 tokens per rank, and activation checkpointing in all layers. A dry run on the meta
# device takes one rank through a step of `ZeRO3`, with a process group that sends nothing, and counts the bytes.

# %%
from shared.dryrun import MODELS, peaks


def held_at_peak(model, ranks):
    """Return a row for each (N, rank): what this rank of N holds at its peak, in GB."""
    shape, rows = MODELS[model], []
    for (n, rank), parts in zip(ranks, peaks.peaks_of(model, "zero3", ranks), strict=True):
        formula_bytes = formulas.model_state_bytes(shape.parameters, n, stage=3)
        sizes = [f"{size / 1e9:.2f}" for size in (formula_bytes, *parts.values())]
        rows.append([shape.name, f"{n:,}", f"{rank:,}", *sizes])
    return rows


header = ["", "N", "rank", "16Ψ/N", *peaks.PARTS]

# %% [markdown]
# **Predict.** How many GB does rank 0 hold at its peak on 1,024 GPUs, where 16Ψ/N is 1.1 GB? Each of the 80 layers has
# 1.7 GB of bf16 parameters.

# %%
my_prediction_gb = None

# %%
rows = held_at_peak("llama-70b", [(8, 0), (64, 0), (1024, 0)])
print(f"{predicted(my_prediction_gb, '{} GB')}counted {rows[-1][-1]} GB")
assert float(rows[0][-1]) > 80 > float(rows[1][-1]) and float(rows[2][-1]) > 10 * float(rows[2][3])
note = "GB. Shards: without gradients. The peak also has temporary tensors."
tables.Table(header, rows, note)

# %% [markdown]
# On 8 GPUs, the shards alone need more than 80 GB. On 64, everything fits. On 1,024, the shards are small, and what
# remains does *not* shrink with N: the root and two unsharded layers, gradients in buckets, and activations.
#
# The activations are larger on 1,024 GPUs, because the peak is no longer at the end of backward, when a rank has the
# shards of all gradients, but at its start, when all checkpoints are in memory.
#
# What remains with Llama 3 405B on 16,384 ranks? Padding makes all shards of a unit equally long, so the first and the
# last rank hold the same:

# %%
tables.Table(header, held_at_peak("llama-3-405b", [(16_384, 0), (16_384, 16_383)]), note)

# %% [markdown]
# Most of the 54.5 GB are two layers of 6.4 GB with as much again for their gradients, 9.9 GB of activations, and 17 GB
# for the parameters and gradients of the embedding and the output layer, which our root keeps unsharded for the whole
# step. torchtitan makes units of these two. Meta also split the layers, by tensor and pipeline parallelism (Llama 3
# paper, Table 4).

# %% [markdown]
# ## What torch calls it
#
# | here and in lab 10 | FSDP2 | how FSDP2 differs |
# |---|---|---|
# | `ZeRO3(model, units)` | `fully_shard` for each unit, then for the model | it changes modules in place |
# | `Unit` | `FSDPParamGroup` | |
# | `ShardedFlatParameter` | `FSDPParam` | each parameter is sharded by rows, as a `DTensor` |
# | `AfterBackward` | `RegisterPostBackwardFunction` | |
# | `clip_shards_` | `torch.nn.utils.clip_grad_norm_` | the norm is a `DTensor` |
# | `DeferredFlatParameter` | `model.to_empty(device=…)`, then your initialization | |
#
# A **`DTensor`** is a tensor of which each rank holds a shard, together with a description of the whole. This lets
# FSDP2 shard a model on the meta device. Then `to_empty()` allocates only the shards. On GPUs, random operators on a
# `DTensor` draw values that depend on N (PyTorch issue 168058). So the next cell draws each parameter in full, as we
# did, and keeps the rank's rows:


# %%
# %%ranks
@torch.no_grad()
def fsdp2_deferred():
    with torch.device("meta"):
        model = in_fsdp2(TinyGPT(config))
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        value = torch.empty(parameter.shape, device=device)
        initialize(name, value)
        parameter.to_local().copy_(value.chunk(world_size)[rank])


fsdp2_peak_bytes = peak_bytes_of(fsdp2_deferred)

# %%
multiples["FSDP2, deferred"] = ranks.pull("fsdp2_peak_bytes")[0] / (4 * psi)
assert multiples["FSDP2, deferred"] < 0.5
plots.bars(multiples, "most memory while the model is created, as a multiple of Ψ elements")

# %% [markdown]
# For FSDP2, we drew one *parameter* at a time in full, so the peak is lower. FSDP1, torch's older wrapper, materializes
# one unit at a time, with your function (`param_init_fn`). DeepSpeed's `zero.Init` shards each module as soon as its
# constructor returns.

# %% [markdown]
# ## On a cluster
#
# | question | here | with NCCL and many hosts |
# |---|---|---|
# | Do the initial values depend on N? | no, each name has a seed | yes, with `DTensor`'s random operators |
# | Where do pretrained weights come from? | – | each rank reads its shards from a checkpoint (chapter 12) |
# | May a rank skip a parameter? | yes, it counts as zeros ¹ | yes, with `set_reduce_scatter_unused_params` ¹ |
#
# ¹ But not a whole unit: the other ranks would wait in its all-gather.

# %% [markdown]
# ## Recap
#
# | | memory | sent |
# |---|---|---|
# | frozen parameters | no gradient, no optimizer state | all-gathered, not reduced |
# | unused parameters | as for used ones | reduced as zeros |
# | checkpointed units | inputs of all units, activations of one | no more |
# | g micro-batches | no more | g times as much |
# | bf16 parameters, fp32 shards | unsharded units halved | halved |
# | deferred initialization | the shards and one unit, not Ψ | nothing |
#
# **Terms**
#
# - **FSDP**: fully sharded data parallelism, PyTorch's name for ZeRO stage 3.
# - **tied parameter**: a parameter that several modules of a model use.
# - **meta device**: a device on which tensors have shapes and dtypes, but no memory and no values.
# - **deferred initialization**: building and sharding a model on the meta device, and materializing only the shards.
# - **materialize**: to give a tensor on the meta device memory and values.
# - **full state dict**: a state dict that holds every parameter in full.
# - **sharded state dict**: a state dict in which each rank has only its shards, with their positions in the whole.
# - **DTensor**: torch's tensor of which each rank holds a shard, together with a description of the whole.

# %% [markdown]
# ## Further reading
#
# - Zhao et al., [PyTorch FSDP](https://arxiv.org/abs/2304.11277), VLDB 2023, section 3.1: deferred initialization, one
#   unit at a time.
# - [Getting Started with FSDP2](https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html): its migration
#   guide also covers the meta device.
# - `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py` in PyTorch's source: its methods `pre_forward` to
#   `post_backward` do what ours do.
# - [ZeRO-3 in DeepSpeed's documentation](https://deepspeed.readthedocs.io/en/latest/zero3.html): the section on
#   constructing massive models with `deepspeed.zero.Init`.

# %% [markdown]
# ## What is still wasted
#
# FSDP cannot do three things:
#
# - **Make one layer smaller.** While a rank computes, it holds a full unit and the activations of a sequence. Tensor
#   parallelism splits the layer itself (chapter 13).
# - **Keep the batch small.** With 2,048 tokens on each of 1,024 ranks, a step processes 2.1 million tokens.
# - **Send less than the model in each step.** Each micro-batch sends the parameters twice and the gradients once.
#   Chapter 11 chooses between wrappers by such numbers.
#
# Now do lab 10, in which you build `ZeRO3`. The next cell stops the ranks.

# %%
ranks.stop()
