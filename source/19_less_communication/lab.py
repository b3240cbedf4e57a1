# ---
# jupyter:
#   course:
#     module: compression
#     minutes: 85
# ---

# %% [markdown]
# # Lab 19 · Less communication
#
# **85 minutes, 15 points.** You build three gradient compressors for chapter 04's `OverlappedDDP`:
#
# - `Int8` sends 8-bit integers, with a scale for every 256 of them (19.1 and 19.3),
# - `TopK` sends only the largest elements (19.4),
# - `PowerSGD` sends two thin matrices instead of a large one (19.5).
#
# All of them use **error feedback**, which you write in 19.2: a rank keeps whatever it has not sent, and adds it to
# the gradients of the next step.
#
# At the end, you find out how far each compressor can go, and break them in five ways.
#
# Each exercise has a check. No check judges how long anything takes.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import compression as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""Gradient compression: OverlappedDDP(module, compressor=Int8()) sends fewer bytes than an all-reduce.

A compressor does not send everything. What it leaves out stays in the bucket, and is added to later gradients.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared import guards
from solutions.async_collectives import launch_all_gather
from solutions.bucketed_ddp import flat_and_slices, reject_graph

BLOCK = 256  # elements that share a scale

# %% [markdown]
# ## Exercise 19.1 · Quantize (10 min, 2 points)
#
# To **quantize** means to round to a few values. Here, each element becomes an integer from −127 to 127 and needs one
# byte instead of four. A *block* of 256 elements shares a **scale**: each element is about `integer · scale`.
#
# `quantize(values)` gets a tensor whose last dimension is a multiple of `BLOCK`. It returns two tensors:
#
# - `integers` has the shape of `values`, and the dtype int8,
# - `scales` has one float32 element per block. If `values` has the shape `[4, 512]`, `scales` has the shape `[4, 2]`.
#
# In pseudocode, for each block:
#
# ```
# scale    = largest absolute value / 127, in float32, but at least TINY
# integers = values / scale, rounded to the nearest integer, in int8
# ```
#
# `TINY` is the smallest normal float32. Without it, a block of zeros would be divided by zero.
#
# `dequantize(integers, scales)` returns `integer · scale` for each element, in float32.
#
# Target: no element changes by more than half of its block's scale.
#
# The checks are called 19.1a and 19.1b. The first one tries random values, and then blocks that contain zeros, very
# small values or an **outlier**, a value that is much larger than the others. It also tries values in float64 and
# bfloat16.
#
# <details><summary>Hint 1: how do I get at the blocks?</summary>
#
# `values.unflatten(-1, (-1, BLOCK))` has one more dimension, of length `BLOCK`. `flatten(-2)` removes it again. Over
# which dimension do you take the maximum, and why is `keepdim=True` useful?
# </details>
# <details><summary>Hint 2: the error is larger than half a scale</summary>
#
# Conversion to int8 cuts off the digits after the decimal point. Which method rounds to the nearest integer first?
# </details>


# %% tags=["exercise", "export"] grade_id="quantize"
# %%ranks
TINY = torch.finfo(torch.float32).tiny


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round each block to multiples of its scale, the block's largest absolute value / 127.

    Returns:
        The multiples, in int8, and the scales, in float32.

    Shape: values [..., n]; the multiples [..., n], the scales [..., n / BLOCK].
    """
    ### BEGIN SOLUTION
    blocks = values.unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).float().clamp(min=TINY)
    integers = (blocks / scales).round().to(torch.int8)
    return integers.flatten(-2), scales.squeeze(-1)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-quantize" points=1
check.quantize()


# %% tags=["exercise", "export"] grade_id="dequantize"
# %%ranks
def dequantize(integers: Tensor, scales: Tensor) -> Tensor:
    """Return the values that quantize() has rounded to, in float32.

    Shape: integers [..., n], scales [..., n / BLOCK]; returns [..., n].
    """
    ### BEGIN SOLUTION
    return (integers.unflatten(-1, (-1, BLOCK)) * scales.unsqueeze(-1)).flatten(-2)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-dequantize" points=1
check.dequantize()

# %% [markdown]
# The next cell quantizes a block of small values, and the same block with an outlier. The error should be much larger
# in the second case. That is why a scale is shared by 256 elements only, and not by a whole bucket.

# %%
# %%ranks 0
torch.manual_seed(0)
block = 0.01 * torch.randn(BLOCK)
with_outlier = block.index_fill(0, torch.tensor([0]), 100.0)
for name, values in {"without": block, "with": with_outlier}.items():
    integers, scales = quantize(values)
    error = (dequantize(integers, scales) - values).abs().mean()
    print(f"{name} an outlier: scale {scales.item():.6f}, mean error {error:.6f}")

# %% [markdown]
# To send integers and scales in *one* message, we put them side by side into one tensor of bytes. The next cell gives
# you the functions for this.


# %% tags=["export"]
# %%ranks
def pack(integers: Tensor, scales: Tensor) -> Tensor:
    """Put integers and scales into one int8 tensor: a scale is 4 of its elements.

    Shape: integers [..., n], scales [..., m]; returns [..., n + 4m].
    """
    return torch.cat([integers, scales.contiguous().view(torch.int8)], dim=-1)


def unpack(message: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers and the scales of a packed message, or of several.

    Shape: message [..., n + 4m]; returns [..., n] and [..., m].
    """
    numel = message.shape[-1] * BLOCK // (BLOCK + 4)
    return message[..., :numel], message[..., numel:].view(torch.float32)


# %% [markdown]
# ## Exercise 19.2 · Error feedback (10 min, 3 points)
#
# `CompressedBucket` is a bucket that does not launch an all-reduce. Instead, a compressor decides what to send. The
# next cell gives you its base class, which does not depend on your `Bucket` from lab 03: `flat` is its flat tensor, and
# its method `pack` has divided each gradient by N. (This is not the function `pack` above.)
#
# `CompressedBucket` has a tensor `unsent`, as long as `flat`, which holds whatever this rank has not sent yet. After a
# step, this is the error of the compression. In the next step, the bucket adds its gradients to it:
#
# ```
# launch():   unsent += flat
#             the compressor sends a part of unsent, and subtracts from unsent what it has sent
# wait():     the compressor has put the sum of what all ranks have sent into flat
# ```
#
# So nothing is lost in float32: the sum of all gradients equals everything applied so far, plus everything still
# unsent. (In bf16, `flat` rounds each sum once more, and that error is lost.)
#
# A compressor may need several collectives, and has to wait for one before it can launch the next. So its method
# `exchange(bucket)` is a *generator*. It launches a collective, and yields its handle. When you continue the
# generator, it expects this collective to be complete.
#
# ```python
# def exchange(self, bucket):
#     ...                                                     # subtracts from bucket.unsent what it sends
#     yield dist.all_reduce(first, async_op=True)             # launch() comes here
#     yield dist.all_reduce(second, async_op=True)            # wait() comes here, when first is complete
#     bucket.flat.copy_(...)                                  # then second is complete, too
# ```
#
# - `launch()` adds `flat` to `unsent`, makes the generator with `self.compressor.exchange(self)`, and stores it in
#   `self.stages`. It runs the generator up to the first handle, which it stores in `self.handle`. It does not wait.
# - `wait()` waits for `self.handle`, and then continues the generator until it ends. It waits for each handle that the
#   generator yields. At the end, it sets `self.handle` to None.
# - `wait()` ends with a call of `forget_overflow`, which the next cell gives you, too. If a gradient is inf or NaN on
#   any rank, that step is lost. But error feedback would add the same inf to every later step, so none of it may remain
#   in `unsent`.
#
# The check uses a compressor that sends one half of the elements in one step, and the other half in the next one.
#
# <details><summary>Hint 1: how do I run a generator?</summary>
#
# `next(stages)` runs it up to the next `yield`, and returns the yielded handle. A `for` loop over the same generator
# continues from there, and stops when the generator ends.
# </details>
# <details><summary>Hint 2: when does the generator go on?</summary>
#
# A `for` loop continues the generator when its body is done. So what belongs in the body?
# </details>


# %% tags=["export"]
# %%ranks
class FlatBucket:
    """Packs gradients, divided by the number of ranks, into the slices of a flat tensor, like lab 03's Bucket."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None):
        self.parameters, self.group, self.handle = parameters, group, None
        self.flat, self.slices = flat_and_slices(parameters)

    def pack(self, index: int) -> None:
        """Fill the slice of parameters[index] with its gradient, or zeros for None, and make it the .grad."""
        parameter, grad_slice = self.parameters[index], self.slices[index]
        reject_graph(parameter.grad)
        if parameter.grad is None:
            grad_slice.fill_(guards.UNUSED)  # [Note: negative zeros]
        else:
            torch.div(parameter.grad, dist.get_world_size(self.group), out=grad_slice)
        parameter.grad = grad_slice


def forget_overflow(bucket: "CompressedBucket") -> None:
    """After inf or NaN on any rank, keep neither for later steps. All ranks do so, because flat is the same."""
    if not bucket.flat.sum().isfinite():
        bucket.unsent.nan_to_num_(0, 0, 0)
        bucket.memory.clear()


# %% tags=["exercise", "export"] grade_id="compressed-bucket"
# %%ranks
class CompressedBucket(FlatBucket):
    """A bucket that sends what its compressor chooses, and keeps the rest in `unsent`, which papers call the *error*.

    `memory` is for the compressor: it can keep there what it needs in the next step.

    Memory: `unsent` is as large as the gradients, in float32 if they are in bf16.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup | None,
        compressor: "Compressor",
    ):
        super().__init__(parameters, group)
        self.compressor, self.stages, self.memory = compressor, None, {}
        # bf16 would round away what is small compared to the rest.
        dtype = torch.promote_types(self.flat.dtype, torch.float32)
        self.unsent = torch.zeros_like(self.flat, dtype=dtype)

    def launch(self) -> None:
        """Add the gradients to what is unsent, launch the compressor's first collective, and return at once."""
        ### BEGIN SOLUTION
        self.unsent += self.flat
        self.stages = self.compressor.exchange(self)
        self.handle = next(self.stages)
        ### END SOLUTION

    def wait(self) -> None:
        """Wait until flat is the sum of what all ranks have sent. Raises RuntimeError if nothing is in flight."""
        if self.handle is None:
            raise RuntimeError("nothing is in flight: call launch() before wait()")
        ### BEGIN SOLUTION
        self.handle.wait()
        for handle in self.stages:
            handle.wait()
        self.handle = self.stages = None
        ### END SOLUTION
        forget_overflow(self)


# %% tags=["check"] grade_id="check-compressed-bucket" points=3
check.CompressedBucket()

# %% [markdown]
# All compressors make their buckets in the same way. `OverlappedDDP` calls `new_bucket` instead of `Bucket` (lab 04).


# %% tags=["export"]
# %%ranks
class Compressor:
    """Decides what the buckets of OverlappedDDP send. Pass it as `compressor=`."""

    def new_bucket(
        self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None
    ) -> CompressedBucket:
        """Make a bucket that uses this compressor."""
        if parameters[0].is_complex():
            raise ValueError("complex gradients cannot be compressed: leave out the compressor")
        return CompressedBucket(parameters, group, self)

    def exchange(self, bucket: CompressedBucket) -> Iterator:
        """Send a part of bucket.unsent, subtract it there, and put the sum over the ranks into bucket.flat.

        A generator: it yields the handle of each collective, and continues when this collective is complete.
        """
        raise NotImplementedError


# %% [markdown]
# ## Exercise 19.3 · INT8 (20 min, 4 points)
#
# Why can't we just all-reduce int8 integers? Their sum does not fit into int8, where 127 + 127 is −2, and each rank has
# scales of its own.
#
# So `Int8.exchange` builds the all-reduce from its two halves, and only sends quantized values:
#
# 1. Copy `unsent` into N rows, one per rank, and quantize them. Row r is the shard that rank r will add up. Each row
#    has `shard_numel(bucket)` elements, which is a multiple of `BLOCK`. The rows are padded with zeros.
# 2. Subtract the *dequantized* values from `unsent`, because these are what you send.
# 3. Launch an all-to-all: rank r gets row r of every rank. Yield its handle.
# 4. Dequantize the N rows that you got, and add them up in float32. Quantize the sum.
# 5. Rounding the sum has caused a second error, on this rank only. Add sum − dequantized sum to *this rank's shard* of
#    `unsent`. It will then be sent in the next step.
# 6. Launch an all-gather of the quantized sums. Yield its handle.
# 7. Dequantize all N sums, and copy them into `flat`, without the padding.
#
# - In steps 3 and 6, `pack(*quantize(…))` puts integers and scales into one message, and `dequantize(*unpack(…))` reads
#   it. (Two messages would also be right, but each costs its own latency.)
# - `all_to_all(rows, group)` and `launch_all_gather(flat, shard, group)` (lab 01) launch the collectives. `flat` has
#   one dimension: if `gathered` has a row per rank, pass `gathered.view(-1)`.
# - Every rank must end up with the same bits, even in the shard that it has added up itself.
# - The bucket has divided its gradients by N already, so the sum is the mean.
#
# Target: a rank sends 2(N−1)/N · (1 + 4/256) bytes per element. That is 3.94 times fewer than with float32.
#
# The first check runs one bucket on two ranks. The others try outliers, gradients that would overflow, and what is
# still unsent after many steps.
#
# <details><summary>Hint 1: which elements are this rank's shard?</summary>
#
# Rank r has the elements from `r * numel` to `(r + 1) * numel`. In the last shards, some or all are padding, which
# `unsent` does not have. How long is `unsent[start:end]` there?
# </details>
# <details><summary>Hint 2: ranks have different bits in one shard</summary>
#
# The other ranks have only the *dequantized* sum of your shard. What do you have?
# </details>


# %% tags=["export"]
# %%ranks
def shard_numel(bucket: CompressedBucket) -> int:
    """Return how many elements a rank adds up, padded to whole blocks."""
    blocks = max(1, -(-bucket.flat.numel() // BLOCK))
    return -(-blocks // dist.get_world_size(bucket.group)) * BLOCK


def all_to_all(rows: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, dist.Work]:
    """Launch an all-to-all: rank r gets row r of every rank.

    Returns:
        The tensor that will hold the rows received, in the order of the ranks, and a handle.

    Shape: rows [N, n]; received [N, n].
    Communication: one all-to-all; each rank sends (N−1)/N of the rows' bytes.
    """
    received = torch.empty_like(rows)
    return received, dist.all_to_all_single(received, rows, group=group, async_op=True)


# %% tags=["exercise", "export"] grade_id="int8"
# %%ranks
class Int8(Compressor):
    """Sends 8-bit integers and a scale per block. Sums are computed in float32, and quantized again.

    Communication: an all-to-all in backward, and an all-gather afterwards. Each rank sends 2(N−1)/N · (1 + 4/BLOCK)
        bytes per element.
    Source: ZeRO++ (Wang et al. 2023) averages int4 gradients by all-to-all; 1-bit Adam (Tang et al. 2021) keeps both
        errors.
    """

    def exchange(self, bucket: CompressedBucket) -> Iterator:
        rank, world_size = dist.get_rank(bucket.group), dist.get_world_size(bucket.group)
        unsent, numel = bucket.unsent, shard_numel(bucket)
        ### BEGIN SOLUTION
        rows = unsent.new_zeros(world_size, numel)
        rows.view(-1)[: unsent.numel()] = unsent
        message = pack(*quantize(rows))
        # What rounding has changed stays unsent on this rank.
        unsent -= dequantize(*unpack(message)).view(-1)[: unsent.numel()]
        received, handle = all_to_all(message, bucket.group)
        yield handle

        total = dequantize(*unpack(received)).sum(0)
        shard = pack(*quantize(total))
        # So does what rounding has changed in the sum, because no other rank knows it.
        own = unsent[rank * numel : (rank + 1) * numel]
        own += (total - dequantize(*unpack(shard)))[: len(own)]
        gathered = torch.empty_like(message)
        yield launch_all_gather(gathered.view(-1), shard, bucket.group)

        bucket.flat.copy_(dequantize(*unpack(gathered)).view(-1)[: unsent.numel()])
        ### END SOLUTION


# %% tags=["check"] grade_id="check-int8" points=4
check.Int8()

# %% [markdown]
# ## Exercise 19.4 · The largest elements (10 min, 3 points)
#
# `TopK(ratio)` sends only the elements of `unsent` with the largest absolute values, for example 1% of them. All
# others stay unsent, so they add up until they are among the largest.
#
# Each rank chooses its own elements, so it has to send their indices, too. And because the indices differ, the values
# cannot be all-reduced. Each rank gathers all values and all indices instead.
#
# - Send `max(1, round(ratio · n))` of the n elements of a bucket.
# - Set them to zero in `unsent`.
# - Launch two all-gathers, of the values (in the dtype of `unsent`) and of the indices (int32 is enough), with
#   `launch_all_gather(flat, shard, group)`. Both may be in flight together. Yield both handles.
# - Add up what you got from the ranks *in the order of the ranks*, so that every rank gets the same bits. Two ranks
#   may have sent the same index.
# - Add up in the dtype of `unsent`. `flat` may be in bf16, which would round after each rank.
#
# Target: (N−1) · 8 bytes for each element that is sent, if the gradients are in float32 or bf16.
#
# The checks compare every element with one process that does the same, first after one step and then after many.
#
# <details><summary>Hint 1: how do I find the indices?</summary>
#
# `tensor.topk(k).indices` has the indices of the k largest elements, in int64. Of which tensor do you want the
# largest?
# </details>
# <details><summary>Hint 2: how do I add values at indices?</summary>
#
# `total[indices] += values` is right if no index occurs twice. Is that true for one rank, or for all ranks together?
# </details>


# %% tags=["exercise", "export"] grade_id="top-k"
# %%ranks
class TopK(Compressor):
    """Sends the elements with the largest absolute values: `ratio` of each bucket, but at least one.

    Communication: two all-gathers in backward. Each rank sends (N−1)(w + 4) bytes per chosen element of w bytes.
    Source: Aji and Heafield 2017, and Stich et al. 2018 for the error feedback.
    """

    def __init__(self, ratio: float):
        self.ratio = ratio

    def exchange(self, bucket: CompressedBucket) -> Iterator:
        ### BEGIN SOLUTION
        unsent, world_size = bucket.unsent, dist.get_world_size(bucket.group)
        count = min(unsent.numel(), max(1, round(self.ratio * unsent.numel())))
        indices = unsent.abs().topk(count).indices
        values = unsent[indices]
        unsent[indices] = 0
        all_values = values.new_empty(world_size, count)
        all_indices = indices.new_empty(world_size, count, dtype=torch.int32)
        first = launch_all_gather(all_values.view(-1), values, bucket.group)
        second = launch_all_gather(all_indices.view(-1), indices.int(), bucket.group)
        yield first
        yield second

        total = torch.zeros_like(unsent)
        for values, indices in zip(all_values, all_indices.long(), strict=True):
            total[indices] += values  # rank by rank, so that all ranks get the same bits
        bucket.flat.copy_(total)
        ### END SOLUTION


# %% tags=["check"] grade_id="check-top-k" points=3
check.TopK()

# %% [markdown]
# ## Exercise 19.5 · PowerSGD (20 min, 3 points)
#
# The gradient of a linear layer is a matrix M of n rows and m columns. `PowerSGD(rank)` approximates it by a product
# P·Qᵀ, where P has only r columns and n rows, and Q has r columns and m rows. (r is the argument `rank`, because P·Qᵀ
# is a matrix of rank r. This has nothing to do with ranks that communicate.) P and Q together have r(n + m) elements
# instead of nm. Unlike indices, they can be all-reduced.
#
# In the formulas, M is a matrix in `unsent`. At first, Q is the summed Q of the previous step. Σ is a sum over the
# ranks:
#
# ```
# P  = Σ M·Q            all-reduce
# P  = orthogonalize(P)
# Q  = Σ Mᵀ·P           all-reduce
# the mean gradient is P·Qᵀ
# this rank has sent P·(Mᵀ·P)ᵀ, with its own Mᵀ·P, so it subtracts that from M
# ```
#
# If P's columns are orthonormal, P·Pᵀ·ΣM is the closest matrix to ΣM whose columns are combinations of those of P.
# Starting with the summed Q of the previous step is called a **warm start**: over the steps, Q turns toward the most
# important directions.
#
# The next cell gives you four functions:
#
# - `split_views(flat, bucket, r)` returns two lists of views of a flat tensor: the matrices that are worth
#   compressing, and all others, such as biases. Use it for `unsent`, and again for `flat`, into which you write the
#   results.
# - `first_qs(matrices, r)` makes the Q of the first step, the same on every rank.
# - `orthogonalize(p)` makes the columns of P orthonormal.
# - `shaped(message, shapes)` splits a one-dimensional tensor into tensors of these shapes.
#
# Follow these rules:
#
# - All-reduce the P of all matrices *and* the views that are not compressed in one message, then all Q in another one.
#   `torch.cat` joins flattened tensors. Without any matrix, there is no second message.
# - Keep the summed Q for the next step in `bucket.memory`.
# - Elements that are not compressed are sent completely, so none of them stays in `unsent`.
#
# Target: together, the all-reduces have r(n + m) elements for each matrix, plus the elements that are not compressed.
#
# In the first step of each check, ΣM is a product of two matrices with r columns, although the M of each rank is not.
# So P·Qᵀ must be equal to ΣM, whatever the first Q was. After that, every step is compared with one process.
#
# <details><summary>Hint 1: what do I subtract from M?</summary>
#
# `unsent` belongs to this rank. Did this rank send the summed Q, or its own part of it?
# </details>
# <details><summary>Hint 2: does orthogonalize come before or after the all-reduce?</summary>
#
# All ranks must have the same P. Is the sum of matrices with orthonormal columns orthonormal, too?
# </details>


# %% tags=["export"]
# %%ranks
def split_views(
    flat: Tensor, bucket: CompressedBucket, r: int
) -> tuple[list[Tensor], list[Tensor]]:
    """View the slices of a flat tensor: as matrices where P and Q have fewer elements, and all others as they are."""
    matrices, others = [], []
    slices = flat.split([parameter.numel() for parameter in bucket.parameters])
    for each, parameter in zip(slices, bucket.parameters, strict=True):
        rows = len(parameter) if parameter.dim() > 1 else 1
        columns = parameter.numel() // max(1, rows)
        if r * (rows + columns) < rows * columns:
            matrices.append(each.view(rows, columns))
        else:
            others.append(each)
    return matrices, others


def first_qs(matrices: Sequence[Tensor], r: int) -> list[Tensor]:
    """Draw a random Q for each matrix, the same on every rank, without using torch's global random numbers."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(m.shape[1], r, generator=generator).to(m) for m in matrices]


def orthogonalize(p: Tensor) -> Tensor:
    """Return a matrix with orthonormal columns that span those of p, even if p is zero."""
    return torch.linalg.qr(p).Q


def shaped(message: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Split a one-dimensional tensor into tensors of these shapes."""
    sizes = [torch.Size(shape) for shape in shapes]
    parts = message.split([size.numel() for size in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


# %% tags=["exercise", "export"] grade_id="power-sgd"
# %%ranks
class PowerSGD(Compressor):
    """Approximates each matrix by P·Qᵀ with `rank` columns, and sends P and Q.

    Communication: an all-reduce in backward, of all P and of what is not compressed, and one of all Q afterwards.
    Memory: the Q of each matrix stay until the next step.
    Source: Vogels et al., NeurIPS 2019 (arXiv 1905.13727), algorithms 1 and 2.
    """

    def __init__(self, rank: int):
        self.r = rank

    def exchange(self, bucket: CompressedBucket) -> Iterator:
        ### BEGIN SOLUTION
        matrices, others = split_views(bucket.unsent, bucket, self.r)
        qs = bucket.memory.get("qs") or first_qs(matrices, self.r)
        ps = [m @ q for m, q in zip(matrices, qs, strict=True)]
        message = torch.cat([each.flatten() for each in (*ps, *others)])
        yield dist.all_reduce(message, group=bucket.group, async_op=True)

        sums = shaped(message, [each.shape for each in (*ps, *others)])
        ps = [orthogonalize(p) for p in sums[: len(ps)]]
        own_qs = [m.T @ p for m, p in zip(matrices, ps, strict=True)]
        if matrices:
            message = torch.cat([q.flatten() for q in own_qs])
            yield dist.all_reduce(message, group=bucket.group, async_op=True)
            qs = bucket.memory["qs"] = shaped(message, [q.shape for q in own_qs])

        for m, p, q in zip(matrices, ps, own_qs, strict=True):
            m -= p @ q.T
        for each in others:
            each.zero_()
        results = split_views(bucket.flat, bucket, self.r)
        totals = [p @ q.T for p, q in zip(ps, qs, strict=True)] + sums[len(ps) :]
        for result, total in zip(results[0] + results[1], totals, strict=True):
            result.copy_(total)
        ### END SOLUTION


# %% tags=["check"] grade_id="check-power-sgd" points=3
check.PowerSGD()

# %% [markdown]
# ## Your figure: what a byte buys (5 min)
#
# How far can you turn each knob? The next cells train a small network on digits, on four ranks, with several ratios of
# `TopK` and several ranks of `PowerSGD`.


# %%
# %%ranks
from shared import wire
from shared.data import digits
from shared.models import MLP
from solutions.overlapped_ddp import OverlappedDDP

images, labels = (each.to(device) for each in digits())


def losses_of(model, steps=200, overflow_at=None):
    """Train with SGD, and skip steps whose gradients are not finite. Returns each step's mean loss over the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    draws, losses = torch.Generator().manual_seed(rank), torch.zeros(steps, device=device)
    for step in range(steps):
        picked = torch.randint(len(images), (24,), generator=draws)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[picked]), labels[picked])
        (loss * (float("inf") if step == overflow_at else 1)).backward()
        if all(parameter.grad.isfinite().all() for parameter in model.parameters()):
            optimizer.step()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    return (losses / world_size).tolist()


def trained(compressor):
    """Return the bytes that this rank sends per step, and the mean loss of the last ten steps."""
    model = OverlappedDDP(MLP().to(device), compressor=compressor)
    with wire.ledger() as log:
        losses = losses_of(model)
    return log.sent_bytes / len(losses), sum(losses[-10:]) / 10


# %% [markdown]
# **Predict.** Float32 ends with a loss of about 0.1. What is the largest factor by which you can reduce the bytes, and
# still end below 0.2? With which compressor? Add your setting to the list below if it is missing.

# %%
my_prediction = {"compressor": None, "factor": None}

# %%
# %%ranks --timeout 300
compressors = {
    "float32": {"": None},
    "Int8": {"": Int8()},
    "TopK": {str(ratio): TopK(ratio) for ratio in (0.1, 0.03, 0.01, 0.003)},
    "PowerSGD": {str(r): PowerSGD(r) for r in (8, 4, 2, 1)},
}
runs = {
    method: {name: trained(compressor) for name, compressor in settings.items()}
    for method, settings in compressors.items()
}

# %% [markdown]
# In the figure, right is cheap, and down is good. Which line stays down longest? And which points would move to the
# left with 64 ranks?
#
# <details><summary>Answer</summary>
#
# In our run, PowerSGD with one column sent 31 times fewer bytes, and ended at 0.12. With fewer bytes than that, nothing
# stayed below 0.2. All points of TopK would move: what it sends grows with N − 1. With 64 ranks, 3% of the elements
# already cost more bytes than float32.
#
# </details>

# %% tags=["nbval-ignore-output"]
from shared.plots import compression as compression_plots
from shared.predictions import predicted

runs = ranks.pull("runs")[0]
of_float32 = runs["float32"][""][0]
points = {
    method: {name: (of_float32 / nbytes, loss) for name, (nbytes, loss) in settings.items()}
    for method, settings in runs.items()
}
factor, best = max(
    (factor, f"{method}({name})")
    for method, settings in points.items()
    for name, (factor, loss) in settings.items()
    if loss < 0.2
)
print(f"{predicted((*my_prediction.values(),), '{}, {} ×')}measured {best}, {factor:.0f} ×")
compression_plots.loss_against_saving(points)

# %% [markdown]
# ## Break it: five mistakes, and which of them you would notice (10 min)
#
# Each class below changes one of your compressors a little, and none of the mistakes raises an error. The next cells
# train with them as before:
#
# - `ForgetsTheRest` drops what `TopK` has not sent.
# - `DropsSecondError` keeps only the first of the two errors of `Int8`.
# - `SubtractsTheSum` subtracts from each rank's `unsent` what *all* ranks have sent with `PowerSGD`.
# - `OwnRowFirst` adds up what `TopK` has gathered in another order on each rank: its own row first.
# - `KeepsInf` makes `forget_overflow` do nothing. In step 20, gradients overflow, and the optimizer skips that step.


# %%
# %%ranks
class ForgetsTheRest(TopK):
    def exchange(self, bucket):
        yield from super().exchange(bucket)
        bucket.unsent.zero_()


class DropsSecondError(Int8):
    def exchange(self, bucket):
        padding = -bucket.unsent.numel() % BLOCK
        rounded = dequantize(*quantize(nn.functional.pad(bucket.unsent, (0, padding))))
        first_error = bucket.unsent - rounded[: bucket.unsent.numel()]
        yield from super().exchange(bucket)
        bucket.unsent.copy_(first_error)


class SubtractsTheSum(PowerSGD):
    def exchange(self, bucket):
        before = bucket.unsent.clone()
        yield from super().exchange(bucket)
        bucket.unsent.copy_(before - bucket.flat)


# %%
# %%ranks
right_gather, right_forget = launch_all_gather, forget_overflow


class Rotated:
    """A handle that moves this rank's row to the front when it has waited."""

    def __init__(self, flat, handle):
        self.rows, self.handle = flat.view(world_size, -1), handle

    def wait(self):
        self.handle.wait()
        self.rows.copy_(self.rows.roll(-rank, 0))


def gather_own_row_first(flat, shard, group=None):
    return Rotated(flat, right_gather(flat, shard, group))


def history(compressor, gather=right_gather, forget=right_forget):
    """Train. Returns the mean loss of the last ten steps, and whether this rank's parameters equal rank 0's."""
    global launch_all_gather, forget_overflow
    launch_all_gather, forget_overflow = gather, forget
    model = OverlappedDDP(MLP().to(device), compressor=compressor)
    losses = losses_of(model, overflow_at=20)
    launch_all_gather, forget_overflow = right_gather, right_forget
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    of_rank_0 = mine.clone()
    dist.broadcast(of_rank_0, src=0)
    return sum(losses[-10:]) / 10, torch.equal(mine, of_rank_0)


# %% [markdown]
# **Predict.** With which mistakes does the loss end clearly higher than without them, by more than 0.05? And with which
# ones do the ranks end with different parameters? Set those to True, and the others to False.

# %%
MISTAKES = (
    "ForgetsTheRest",
    "DropsSecondError",
    "SubtractsTheSum",
    "OwnRowFirst",
    "KeepsInf",
)
my_higher_loss = dict.fromkeys(MISTAKES)
my_drift = dict.fromkeys(MISTAKES)

# %%
# %%ranks --timeout 300
right = {
    name: history(it)
    for name, it in (("Int8", Int8()), ("TopK", TopK(0.003)), ("PowerSGD", PowerSGD(2)))
}
wrong = {
    "ForgetsTheRest": ("TopK", history(ForgetsTheRest(0.003))),
    "DropsSecondError": ("Int8", history(DropsSecondError())),
    "SubtractsTheSum": ("PowerSGD", history(SubtractsTheSum(2))),
    "OwnRowFirst": ("TopK", history(TopK(0.003), gather=gather_own_row_first)),
    "KeepsInf": ("Int8", history(Int8(), forget=lambda bucket: None)),
}

# %% tags=["nbval-ignore-output"]
from shared import tables

right, of_ranks, rows = ranks.pull("right")[0], ranks.pull("wrong"), []
higher, drifts = {}, {}
for name, (base, (loss, _)) in of_ranks[0].items():
    drifts[name] = not all(each[name][1][1] for each in of_ranks)
    higher[name] = not loss < right[base][0] + 0.05
    rows.append(
        [name, f"{base}: {right[base][0]:.2f}", f"{loss:.2f}", "yes" if drifts[name] else "no"]
    )
tables.Table(["mistake", "without it", "last loss", "ranks differ"], rows)

# %%
for name in MISTAKES:
    yours = [
        "" if guess is None else f" (you: {guess})"
        for guess in (my_higher_loss[name], my_drift[name])
    ]
    print(f"{name}: higher loss {higher[name]}{yours[0]}, drift {drifts[name]}{yours[1]}")

# %% [markdown]
# Two mistakes hide from the loss. `OwnRowFirst` only changes the order of additions, so the ranks differ in the last
# bits. They drift apart a little more in every step, and you would need to compare their parameters to notice.
# `DropsSecondError` shows in neither column, because this network learns well enough without the rest. What only one
# rank sends may be rounded to zero in the sum, and is then lost for good. Your checks find that.
#
# The other three show in the loss. `SubtractsTheSum` subtracts about N times too much, so `unsent` grows without
# bound. `KeepsInf` adds inf to every later step, so the optimizer skips all of them. In a log, that looks like a
# network that has stopped learning.

# %%
ranks.stop()
