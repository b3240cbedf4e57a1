# ---
# jupyter:
#   course:
#     module: collectives
# ---

# %% [markdown]
# # 01 · Collectives by hand
#
# **50–80 minutes.** After this lesson, you will be able to:
#
# - build an all-reduce from a reduce-scatter and an all-gather, on a ring of ranks,
# - compute how many bytes each rank sends for any number of ranks, and check the result in the ledger,
# - measure the latency α and the bandwidth 1/β of a link, and predict times that you have not measured,
# - estimate from a table of real links how long an all-reduce takes on a cluster, and when a tree beats a ring,
# - launch a collective, compute while it is in flight, and wait for the result.
#
# You need `all_reduce`, `send`, `recv`, the wire ledger and the doctor (chapter 00).

# %% tags=["nbval-ignore-output"]
from shared import formulas, measure, plots, ranks, tables, widgets
from shared.plots import costs as cost_plots
from shared.plots import diagrams
from shared.predictions import predicted

ranks.start(world_size=4, backend="gloo:cpu", detect_mismatch=False)

# %% [markdown] slideshow={"slide_type": "slide"}
# In this lesson, the ranks run on the CPU even if you have GPUs, because you will emulate a link between them. Mismatch
# detection is off, because it sends messages of its own.
#
# ## What is wasted
#
# How few bytes must each rank send to sum a tensor? In chapter 00's all-reduce, rank 0 does all the work: on 64 ranks,
# it sends 63 tensors. This is a **star**: all messages go through one rank, the **root**. Its first half is a
# **reduce**: the sum of all tensors ends up on the root. Look at what rank 0 holds before and after:

# %% slideshow={"slide_type": "-"}
diagrams.collective("reduce")

# %% [markdown]
# The second half is a broadcast of the sum. `broadcast_by_hand` is lab 00's stretch exercise; here we import our
# solution.

# %%
# %%ranks
from shared import wire
from solutions.first_collectives import broadcast_by_hand


def reduce_to(tensor, root):
    """Sum a tensor over the ranks, in place, on the root."""
    if rank != root:
        dist.send(tensor, dst=root)
        return
    received = torch.empty_like(tensor)
    for other in range(world_size):
        if other != root:
            dist.recv(received, src=other)
            tensor += received


def star_all_reduce(tensor):
    reduce_to(tensor, root=0)
    broadcast_by_hand(tensor, src=0)


def tensors_sent(all_reduce):
    """Sum a tensor of 4.8 MB over the ranks. Returns the bytes that this rank sent, in multiples of 4.8 MB."""
    tensor = torch.full((1_200_000,), rank + 1.0, device=device)
    with wire.ledger() as log:
        all_reduce(tensor)
    assert (tensor == sum(range(world_size + 1))).all()
    return log.sent_bytes / tensor.nbytes


sent = tensors_sent(star_all_reduce)

# %% [markdown]
# How much does each rank send? Compare the bars:

# %% slideshow={"slide_type": "slide"}
star_sent = ranks.pull("sent")
plots.bars({f"rank {rank}": count for rank, count in enumerate(star_sent)}, "tensors sent")

# %% [markdown] slideshow={"slide_type": "-"}
# Rank 0 sends three tensors, and the other ranks one each, so their links are mostly idle. In 2017, TensorFlow averaged
# gradients through such roots, called parameter servers. At Uber, that wasted about half of 128 GPUs. A ring,
# which you will now build, lowered that to 12% (Horovod paper, 2018).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Reduce-scatter, then all-gather
#
# To share the work, we cut the tensor into one **chunk** per rank, and let every rank be the root of one chunk. The
# first half is then a **reduce-scatter**: each rank ends up with a different chunk of the sum, which is called its
# **shard**. In the diagrams, a chunk is one element.

# %% slideshow={"slide_type": "-"}
diagrams.collective("reduce_scatter")

# %% [markdown] slideshow={"slide_type": "slide"}
# The second half is an **all-gather**: every rank ends up with the shards of all ranks.

# %% slideshow={"slide_type": "-"}
diagrams.collective("all_gather")

# %% [markdown]
# A reduce-scatter followed by an all-gather is an all-reduce. The next cell does both, one chunk after the other. Chunk
# A belongs to rank 0, chunk B to rank 1, and so on.
#
# **Predict.** In the star, the ranks sent six tensors in total. If all four share this work equally, how many tensors
# does each of them send? 1 would mean as many bytes as its own tensor has.

# %%
my_prediction = None


# %%
# %%ranks
def chunks_by_name(tensor):
    """Cut a tensor into world_size equal chunks. They are views, so changing a chunk changes the tensor."""
    return dict(zip("ABCD", tensor.chunk(world_size), strict=False))


def reduce_scatter_in_turn(chunks):
    for root, name in enumerate(chunks):
        reduce_to(chunks[name], root)


def all_gather_in_turn(chunks):
    for src, name in enumerate(chunks):
        broadcast_by_hand(chunks[name], src)


def all_reduce_in_turn(tensor):
    chunks = chunks_by_name(tensor)
    reduce_scatter_in_turn(chunks)
    all_gather_in_turn(chunks)


sent = tensors_sent(all_reduce_in_turn)

# %%
in_turn_sent = ranks.pull("sent")
assert in_turn_sent == [1.5] * 4 and sum(in_turn_sent) == sum(star_sent)
print(f"{predicted(my_prediction, '{} tensors')}measured {in_turn_sent}")

# %% [markdown]
# In total, the ranks send as many bytes as before, but now each of them sends an equal share. They still take turns,
# though: while rank 0 sums chunk A, nothing happens to the other chunks.
#
# ## A ring
#
# A sum does not have to be computed in one place: the ranks can compute it on the way. Arrange them in a **ring**,
# where each rank sends only to its right neighbor, and the last one sends to rank 0. Follow chunk A in the picture. It
# starts on rank 1, every rank adds its own chunk A, and after three steps, the sum is complete on the rank that chunk A
# belongs to:

# %% slideshow={"slide_type": "slide"}
diagrams.ring()

# %% [markdown]
# At the same time, chunk B starts on rank 2, chunk C on rank 3 and chunk D on rank 0, so every rank always has
# something to send.
#
# **Predict.** On a ring of three ranks with the chunks A, B and C, the reduce-scatter takes two steps. Which chunk must
# rank 0 send first, so that the sums of A, B and C end up on ranks 0, 1 and 2? Write its letter.

# %%
my_prediction = None

# %% [markdown]
# The next cell contains the whole ring. It follows two plans, one for each half. A plan has one string per step, and
# letter *r* is the chunk that rank *r* sends. On four ranks, the first plan is `["DABC", "CDAB", "BCDA"]`. Rank 0
# sends D, then C, then B. From string to string, each letter moves one place to the right, because after step 1, every
# rank sends the partial sum that it has just received and added to. In lab 00, you wrote the ring step, `pass_right`.


# %%
# %%ranks
from solutions.first_collectives import pass_right


def rotated(names, steps):
    return names[-steps:] + names[:-steps]


def digits_of(chunks):
    return {name: f"{int(chunk[0]):0{world_size}d}" for name, chunk in chunks.items()}


def run_plan(plan, chunks, add, log):
    """Send and receive one chunk per step. The received chunk is added to this rank's, or replaces it."""
    for sends in plan:
        # The left neighbor of rank 0 is the last rank, at index −1.
        name, received_name = sends[rank], sends[rank - 1]
        received = pass_right(chunks[name])
        chunks[received_name].copy_(received + chunks[received_name] if add else received)
        log.append({"sent": name, "holds": digits_of(chunks)})


def ring_all_reduce(tensor):
    """Sum a tensor over the ranks, in place. Returns what this rank sent and held after each step."""
    chunks, names = chunks_by_name(tensor), "ABCD"[:world_size]
    log = [{"sent": None, "holds": digits_of(chunks)}]
    reduce_scatter_plan = [rotated(names, step + 1) for step in range(world_size - 1)]
    all_gather_plan = [rotated(names, step) for step in range(world_size - 1)]
    run_plan(reduce_scatter_plan, chunks, add=True, log=log)
    run_plan(all_gather_plan, chunks, add=False, log=log)
    return log


# %% [markdown]
# Now run it on three ranks, and follow row A from panel to panel. A square lists the ranks whose chunks it contains: 12
# is the sum of the chunks of ranks 1 and 2. An arrow is a message, dots continue at rank 0, and bold digits mark a
# complete sum. In JupyterLab and on the website, you get a slider.


# %%
# %%ranks
def marked():
    # Rank 0 contributes 100, rank 1 contributes 10, and rank 2 contributes 1, so a sum shows which ranks it contains.
    return torch.full((world_size,), 10 ** (world_size - 1 - rank), device=device)


# %% slideshow={"slide_type": "slide"}
with ranks.world(3):
    logs = ranks.run(lambda: ring_all_reduce(marked()))
assert all(entry == "111" for log in logs for entry in log[-1]["holds"].values())
print(f"{predicted(my_prediction)}rank 0 first sent {logs[0][1]['sent']}")
widgets.ring_stepper(logs)

# %% [markdown] tags=["open"] slideshow={"slide_type": "-"}
# After the two steps of the reduce-scatter, each rank holds one complete sum. In the two steps of the all-gather, the
# complete sums are copied around the ring.
#
# ## How many bytes does a ring send?
#
# Let N be the number of ranks and S the size of the tensor in bytes. Each half has N−1 steps, and in each step a rank
# sends one chunk of S/N bytes. So for the whole all-reduce, each rank sends
#
# $$2\,(N-1)\cdot\frac{S}{N} = \frac{2(N-1)}{N}\,S$$
#
# **Predict.** How many tensors does each rank send in a ring of 1,000 ranks: about 1, 2 or 1,000? The next cell
# compares the formula with the ledger on 2, 3 and 4 ranks.

# %%
my_prediction = None

# %%
rows = []
for size in (2, 3, 4):
    with ranks.world(size):
        star_sent = ranks.run(lambda: tensors_sent(star_all_reduce))
        ring_sent = ranks.run(lambda: tensors_sent(ring_all_reduce))
    formula = formulas.all_reduce_sent_bytes(1, size)
    assert all(abs(sent - formula) < 1e-9 for sent in ring_sent) and max(star_sent) == size - 1
    rows.append([str(size), *(f"{sent:.2f}" for sent in (max(star_sent), max(ring_sent), formula))])
tables.Table(["N", "star: rank 0 sends", "ring: each rank sends", "2(N−1)/N"], rows)

# %%
formula = formulas.all_reduce_sent_bytes(1, 1000)
print(f"{predicted(my_prediction)}the formula gives {formula:.3f} tensors")

# %% [markdown]
# A rank always sends less than two tensors, no matter how large the ring is. You cannot do better: unless the switches
# do the adding, some rank has to send at least 2(N−1)/N · S (Patarasuk and Yuan 2009). Keep the short form in mind: an
# all-reduce costs about **2S divided by the bandwidth**, whatever N is, as long as latency plays no part.
#
# ## Training with the ring
#
# Below, four ranks train a small MLP to read handwritten digits. In each step, every rank computes the gradient of a
# quarter of the batch, and the ring averages the four gradients. Chapter 02 explains why this is right, and when it is
# not.
#
# The last bias has 10 elements, which cannot be cut into four equal chunks. So we append **padding**: at most N−1
# zeros, which make its length a multiple of N.


# %%
# %%ranks
from shared.data import digits
from shared.models import MLP


def average_gradients(model):
    for parameter in model.parameters():
        padding = -parameter.numel() % world_size
        padded = torch.nn.functional.pad(parameter.grad.flatten(), (0, padding))
        ring_all_reduce(padded)
        summed = padded[: parameter.numel()].view_as(parameter)
        parameter.grad.copy_(summed / world_size)


def train(steps=200, batch=128):
    """Train on slices of the batches. Returns the loss of each step, and the accuracy on 297 other digits."""
    images, labels = digits(torch.float64)
    model, losses = MLP().double(), torch.zeros(steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9)
    drawn = torch.Generator().manual_seed(0)
    for step in range(steps):
        samples = torch.randint(1500, (batch,), generator=drawn).chunk(world_size)[rank]
        loss = torch.nn.functional.cross_entropy(model(images[samples]), labels[samples])
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        losses[step] = loss.item() / world_size
    dist.all_reduce(losses)  # the mean over the ranks
    correct = model(images[1500:]).argmax(dim=1) == labels[1500:]
    return losses.tolist(), correct.double().mean().item()


# %% [markdown]
# Is this the same training as on one rank?

# %% tags=["nbval-ignore-output"]
with ranks.world(1):
    alone_losses, alone_accuracy = ranks.run(lambda: train())[0]
losses, accuracy = ranks.run(lambda: train())[0]
largest = max(abs(alone - four) for alone, four in zip(alone_losses, losses, strict=True))
assert largest < 1e-5 and accuracy == alone_accuracy > 0.9
print(f"largest difference of the losses: {largest:.0e}")
print(f"accuracy on 297 other digits: {alone_accuracy:.1%} on one rank, {accuracy:.1%} on four")

# %% [markdown]
# It is, up to rounding: the ring does what `DistributedDataParallel` did in chapter 00.
#
# ## A ring that hangs
#
# `pass_right` launches its send and its receive together. Chapter 00's ring received first, and hung. What if each rank
# first sends to its right neighbor, and then receives from its left one? Would that work for a single element?

# %% tags=["raises-exception"]
# %%ranks
outgoing, incoming = torch.ones(1, device=device), torch.empty(1, device=device)
dist.send(outgoing, dst=(rank + 1) % world_size)
dist.recv(incoming, src=(rank - 1) % world_size)

# %% [markdown]
# Every rank waits in `send` until its right neighbor calls `recv`. But the neighbor only does that after its own
# `send`. Can a `send` return earlier? That depends on the backend:
#
# | backend | does `send` return before the receiver calls `recv`? |
# |---|---|
# | gloo | no, as you have just seen, not even for 4 bytes |
# | NCCL | often yes, because Python only queues it; but the GPU runs `recv` after `send`, so the ring may hang |
# | MPI | often for small messages, not for large ones, so such a ring may pass its tests and hang in training |
#
# Two remedies work everywhere. You can launch the send and the receive in one batch, as `pass_right` does. Or you can
# break the circle of waiting ranks with `send` and `recv` alone, as in the lab.
#
# ## The cost of a message: α and β
#
# How long does an all-reduce take? The **α–β model** assumes that sending S bytes takes α + βS seconds: a fixed latency
# α plus β seconds per byte. So the bandwidth is 1/β. In the star, rank 0 sends or receives 2(N−1) whole tensors, one
# after the other. The ring has 2(N−1) steps, each with a chunk of S/N bytes:
#
# $$T_\text{star} = 2(N-1)\,(\alpha + \beta S) \qquad T_\text{ring} = 2(N-1)\left(\alpha + \beta\,\frac{S}{N}\right)$$
#
# Let's find α and β by timing ring steps. The next cell puts each rank behind a link of 1 Gbit/s with
# a latency of 5 ms, as through 1,000 km of fiber: this machine's own delays would hide the latency of a link within one
# building. It is an **emulated link**: the bytes are copied within the machine, but an operation lasts at least as long
# as a real link needs for its bytes. `measure` times each size in 20 rounds, and reports the median.

# %%
# %%ranks
from shared import measure

message_sizes = (64, 4_096, 16_384, 65_536, 262_144, 1_048_576)
with measure.behind_link("1gbit", latency_ms=5):
    steps = measure.collectives({"a ring step": pass_right}, message_sizes, repeats=5)

# %% [markdown]
# `fit` finds the α and β for which α + βS is closest to the measurements. At 1 Gbit/s, a byte takes 8 ns, so β should
# be close to that. The ranges are 90% bootstrap intervals. In the figure, look for the size at which the curve starts
# to rise.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
steps = ranks.pull("steps")[0]
line = steps.fit("a ring step")
measure.expect(line.alpha_s > 5e-3 and 0.5 < line.gbit_per_s < 2, "α and β are those of the link")
display(line)
cost_plots.predicted_against_measured(
    {"a ring step": line.message_s}, steps.measured_s, "bytes in a message", lines_are="fitted"
)

# %% [markdown] slideshow={"slide_type": "-"}
# The curve rises where βS is no longer small compared with α. The two are equal at S = **α/β**: 5 ms / 8 ns = 625 KB.
# The fitted α, and usually β, exceed the link's, because a step also takes time on the rank: Python launches two
# transfers and waits for both, and their bytes are copied.
#
# **Predict.** How many milliseconds does our ring take for 4 MB on four ranks? Use the formula with the α and β above.

# %%
my_prediction_ms = None

# %% [markdown]
# The next cell times our ring, the star and `dist.all_reduce`, first without the link and then behind it. The figure
# shows the times behind the link: compare the markers with the lines. This time, the lines are predictions, because α
# and β were fitted to ring steps.

# %%
# %%ranks
algorithms = {"ring": ring_all_reduce, "star": star_all_reduce, "torch": dist.all_reduce}
both = measure.loopback_and_link(algorithms, rate="1gbit", latency_ms=5, rounds=10)

# %% tags=["nbval-ignore-output"]
on_loopback, on_link = ranks.pull("both")[0].values()
ring_ms = 1e3 * on_link.measured_s["ring"][4_000_000]
formula_ms = 1e3 * line.ring_all_reduce_s(4_000_000, 4)
link_ratio = on_link.ratio("star", "ring")[4_000_000]
measure.expect(0.6 < ring_ms / formula_ms < 2, "the ring takes about as long as predicted")
measure.expect(link_ratio > 1.3, "the ring is faster behind the link")
print(
    f"{predicted(my_prediction_ms, '{} ms')}measured {ring_ms:.1f} ms; formula {formula_ms:.1f} ms"
)
print(f"the star takes {link_ratio:.1f} times as long")
models = {
    "ring": lambda size: line.ring_all_reduce_s(size, 4),
    "star": lambda size: 6 * line.message_s(size),
}
cost_plots.predicted_against_measured(models, on_link.measured_s, "bytes in the tensor")

# %% [markdown]
# For 4 MB, the star takes longer than the ring, because all bytes have to go through rank 0's link. For small tensors,
# both take 2(N−1) latencies, so the ring is no faster. The ring's markers may lie a few milliseconds above their line:
# the line knows only messages, but the ring also adds and copies chunks, and one late rank delays all others.
#
# Our ring is measured step by step: six separately delayed messages add up to what you see. `dist.all_reduce` is
# different. The emulated link delays it once, as a whole, *by the ring's formula*. That its markers follow the line
# therefore only says that we computed the same thing twice. They lie a little below it, because our α and β also
# contain the ranks' own time.
#
# ## Why loopback misleads
#
# Without a link, the ranks of one machine communicate over **loopback**: the operating system copies the bytes from
# process to process. All copies share the machine's cores and memory, and both algorithms copy the same number of bytes
# in total. But the ring needs 24 messages and the star 6, and all ranks of the ring need a core at the same time.
# Compare ring and star at the right end of each panel:

# %% tags=["nbval-ignore-output"]
loopback_ratio = on_loopback.ratio("star", "ring")[4_000_000]
measure.expect(loopback_ratio < link_ratio, "the ring gains less over loopback")
print(f"star / ring for 4 MB: {loopback_ratio:.1f} over loopback, {link_ratio:.1f} behind links")
places = {"loopback": on_loopback.measured_s, "1 Gbit/s link, emulated": on_link.measured_s}
cost_plots.side_by_side(places, "bytes in the tensor")

# %% [markdown]
# Over loopback, the ring gains less, or even loses. So to compare algorithms on one machine, measure behind links.
#
# ## Real links
#
# How fast is a link? The obvious measure, S/t, falls when ranks are added, because each rank then sends more of the
# tensor. So NVIDIA's benchmark, nccl-tests, reports the **bus bandwidth**: the bytes that each rank must send, divided
# by the time. For an all-reduce, this is 2(N−1)/N · S/t, which you can compare with the link's rate for any N. Here it
# is for `dist.all_reduce` on our emulated link, which carries 125 MB/s:

# %% tags=["nbval-ignore-output"]
torch_s = on_link.measured_s["torch"]
sent_mb = {size: formulas.all_reduce_sent_bytes(size, 4) / 1e6 for size in torch_s}
bus_mb_per_s = {size: sent_mb[size] / torch_s[size] for size in torch_s}
measure.expect(bus_mb_per_s[4_000_000] > 10 * bus_mb_per_s[4_000], "large tensors come closer")
rows = [[f"{size:,}", f"{rate:.3g}"] for size, rate in bus_mb_per_s.items()]
tables.Table(["bytes", "bus bandwidth, MB/s"], rows)

# %% [markdown]
# For small tensors, almost all of the time is latency. Even for 4 MB, six latencies of 5 ms make up more than a third
# of the predicted time.
#
# In the clusters of the next table, NVLink connects the GPUs of one host, and InfiniBand or Ethernet connects hosts.
# Newer racks extend NVLink to 72 GPUs in 18 hosts. α is the latency of one ring step, and "GPUs" is the ring's size:
#
# - Rows 1 and 2: all GPUs are in one host.
# - Row 3: 8 hosts of 8 GPUs, so α is the mean of seven NVLink steps and one InfiniBand step. NCCL runs several rings
#   at once, each through a different adapter. Together, they carry 400 GB/s, about as much as NVLink.
# - Rows 4 to 9: each GPU is in a different host.
#
# How many times as long as in the first row does 1 GB take in the last?

# %%
from shared.planner.links import REAL_LINKS, link_table

link_table()

# %% [markdown]
# The same GB takes 1.5 s instead of 5 ms: 300 times as long. So later chapters keep asking which ranks share a host.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Ring or tree?
#
# A ring of 1,000 ranks takes 1,998 latencies, even for the smallest tensor. A **tree** takes fewer: every rank that
# already has the tensor helps to send it on, so the number of copies doubles in each round.

# %% slideshow={"slide_type": "-"}
diagrams.tree_broadcast()

# %% [markdown]
# A broadcast to N ranks takes ⌈log₂N⌉ rounds. So does a reduce, which is a broadcast in reverse. In each round, whole
# tensors are sent:
#
# $$T_\text{tree} = 2\,\lceil\log_2 N\rceil\,(\alpha + \beta S)$$
#
# A third algorithm, *halving and doubling*, has few rounds *and* few bytes: pairs of ranks exchange halves, then
# quarters, then eighths (Thakur et al. 2005). If N is a power of two, it takes 2 log₂N · α + 2(N−1)/N · βS. The next
# cell evaluates the formulas for hosts with one InfiniBand adapter of 400 Gbit/s each. The dotted line marks the size
# above which the ring is faster than the tree. How does it move from panel to panel?


# %% slideshow={"slide_type": "slide"}
def priced(formula_s, link):
    return lambda size, world_size: formula_s(size, world_size, link.alpha_s, link.beta_s_per_byte)


links = {link.name: link for link in REAL_LINKS}
infiniband = links["InfiniBand, 1 adapter of 400 Gbit/s per host"]
algorithms = {
    "ring": priced(formulas.ring_all_reduce_s, infiniband),
    "tree": priced(formulas.tree_all_reduce_s, infiniband),
    "halving and doubling": priced(formulas.halving_doubling_all_reduce_s, infiniband),
}
cost_plots.all_reduce_costs(algorithms, world_sizes=[4, 64, 1024])

# %% [markdown] slideshow={"slide_type": "-"}
# Small tensors favor the tree, and large ones the ring. The more ranks there are, the larger a tensor has to be for the
# ring to win. By its formula, halving and doubling is never slower than either. In a real network, however, the two
# ranks of a pair are up to half the cluster apart, and all pairs compete for the same links.
#
# ## Launching now, waiting later
#
# In all measurements so far, the rank waited until the all-reduce was complete. With `async_op=True`, as in chapter 00,
# the call returns a handle immediately. How much time does that save if the rank computes in the meantime?
#
# **Predict.** Assume α = 5 ms and β = 8 ns per byte, as for torch's all-reduce on our link. Then a chunk of 1 MB takes
# 13 ms, so the all-reduce of 4 MB below takes 6 · 13 = 78 ms. Computing takes 60 ms. How many milliseconds do the two
# take if they run at the same time?

# %%
my_prediction_ms = None

# %%
# %%ranks
import time

tensor = torch.zeros(1_000_000, device=device)


def compute():
    time.sleep(0.06)  # a stand-in for a GPU, which does not need this machine's cores


def one_after_the_other():
    dist.all_reduce(tensor)
    compute()


def at_the_same_time():
    handle = dist.all_reduce(tensor, async_op=True)  # returns immediately
    compute()
    handle.wait()  # returns when the sum is complete


ways = {"one after the other": one_after_the_other, "at the same time": at_the_same_time}
with measure.behind_link("1gbit", latency_ms=5):
    times = measure.jobs(ways, rounds=5)

# %% tags=["nbval-ignore-output"]
times = ranks.pull("times")[0]
ratio = times.ratio("one after the other", "at the same time")
measure.expect(ratio > 1.3, "both at the same time take less time")
print(f"{predicted(my_prediction_ms, '{} ms')}measured {times['at the same time'].time_ms:.0f} ms")
plots.bars(times.ms(), "ms (median of 5)")

# %% [markdown]
# The shorter of the two is hidden behind the longer one. Three rules apply to handles:
#
# - Until `wait()` returns, do not read or change the tensor: its values are undefined.
# - Keep every handle and wait for it. Otherwise you do not know when the result is complete.
# - All ranks must launch the same collectives in the same order, with and without handles.
#
# On a GPU, `wait()` does not block Python. It only makes the GPU's current stream (its queue of kernels) wait, so
# kernels that you launch afterwards see the result.
#
# ## What torch calls it
#
# The functions with `single` in their names take one tensor instead of a list of chunks. Before torch 2.13,
# `reduce_scatter_single` was `reduce_scatter_tensor`, and `all_gather_single` was `all_gather_into_tensor`.
#
# | collective | function in `torch.distributed` | result |
# |---|---|---|
# | broadcast | `broadcast(tensor, src)` | in place |
# | reduce | `reduce(tensor, dst)` | in place on `dst`; on other ranks, do not use the tensor afterwards |
# | all-reduce | `all_reduce(tensor)` | in place |
# | reduce-scatter | `reduce_scatter_single(shard, tensor)` | in `shard` |
# | all-gather | `all_gather_single(tensor, shard)` | in `tensor` |
# | scatter | `scatter(shard, shards, src)` | in `shard` |
# | gather | `gather(shard, shards, dst)` | in the list `shards` |
# | all-to-all | `all_to_all_single(received, tensor)` | in `received` |
#
# The last three rows are new. In a **scatter**, the root gives each rank a different chunk, and a **gather** does the
# reverse. In an **all-to-all**, every rank scatters its tensor. Chapter 16 is built on it.

# %% [markdown]
# The backend decides which algorithm a collective uses. In the ledger, `must send` is what the formula requires of one
# rank. The network interface counts what all ranks really send. Below, `carried / required` is this count divided by
# four times `must send`. What is the ratio for gloo's reduce-scatter of 16 MB?

# %%
# %%ranks
from shared.c10d import reduce_scatter_single

tensor = torch.zeros(4_000_000, device=device)
shard = torch.zeros(4_000_000 // world_size, device=device)
with wire.ledger() as log:
    dist.barrier()  # so that no rank sends before all ledgers are open
    reduce_scatter_single(shard, tensor)
    dist.barrier()

# %% tags=["nbval-ignore-output"]
log = ranks.pull("log")[0]
if log.carried_bytes is not None:  # not every system counts
    carried_over_required = log.carried_bytes / (4 * log.sent_bytes)
    assert carried_over_required > 1.7
    print(f"carried / required = {carried_over_required:.1f}")
log.table(times=False)

# %% [markdown] slideshow={"slide_type": "slide"}
# gloo sends about twice what is required, because in torch, gloo's reduce-scatter *is* an all-reduce: every rank gets
# the whole sum, and throws away everything but its shard. In the lab, yours will send half as much.
#
# NCCL's all-reduce differs from ours in three ways. It cuts chunks into slices, and sends one slice while it receives
# the next. It runs several rings at once, to use all links of a GPU. And it chooses between rings, trees and other
# algorithms, depending on the size and the network. Its trees pass on slices, too, so they lose less than our formula
# says.
#
# ## Recap
#
# | algorithm | bytes that a rank sends | time |
# |---|---|---|
# | all-reduce, star | rank 0: (N−1)S, others: S | 2(N−1)(α + βS) |
# | all-reduce, tree | at most ⌈log₂N⌉S | 2⌈log₂N⌉(α + βS) |
# | all-reduce, ring | 2(N−1)/N · S | 2(N−1)(α + βS/N) |
# | reduce-scatter or all-gather, ring | (N−1)/N · S | (N−1)(α + βS/N) |
# | broadcast, tree | at most ⌈log₂N⌉S | ⌈log₂N⌉(α + βS) |
#
# **Terms**
#
# - **reduce**: one rank, the root, gets the sum of the tensors of all ranks.
# - **root**: the rank that a broadcast or scatter starts from, or that a reduce or gather ends on.
# - **reduce-scatter**: each rank gets a different chunk of the sum of all ranks' tensors.
# - **shard**: the chunk of a tensor that belongs to a rank.
# - **all-gather**: every rank gets the shards of all ranks, in rank order.
# - **scatter**: the root sends a different chunk of its tensor to each rank.
# - **gather**: the root gets the chunks of all ranks.
# - **all-to-all**: every rank sends a different chunk of its tensor to each rank.
# - **chunk**: one of the pieces, usually one per rank, into which a tensor is cut.
# - **star**: an algorithm in which all messages go through one rank.
# - **ring**: an algorithm in which each rank sends only to its right neighbor, and the last rank to the first.
# - **tree**: an algorithm in which every rank that has the tensor sends it on, so that the number of copies doubles in
#   each round.
# - **padding**: zeros appended to a tensor so that its length is a multiple of the number of ranks.
# - **α–β model**: sending S bytes takes α + βS seconds, where α is the latency and 1/β the bandwidth.
# - **bus bandwidth**: the bytes that each rank must send in a collective, divided by its time.
# - **emulated link**: delays that make each operation last at least as long as a given link needs for its bytes.
# - **loopback**: communication between processes of one machine, without a network.
#
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): which links and which algorithm NCCL uses, and how fast they are.
# - Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations* (2009): the ring, and the
#   proof that no algorithm sends fewer bytes.
# - Thakur, Rabenseifner and Gropp, *Optimization of collective communication operations in MPICH* (2005): the α–β model
#   in use, and how to choose an algorithm by size.
# - [nccl-tests, PERFORMANCE.md](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): where the factor
#   in each collective's bus bandwidth comes from.
# - Hu et al., [*Demystifying NCCL*](https://arxiv.org/abs/2507.04786) (2025): how NCCL's rings and trees work inside.
# - [*Horovod*](https://arxiv.org/abs/1802.05799) (2018): how the ring replaced the star.
#
# ## What is still wasted
#
# *Latency.* To train the MLP, the ring summed six gradients per step, one after the other. The next cell predicts how
# long that takes behind our link, and how long one all-reduce of the same bytes would take:

# %% tags=["nbval-ignore-output"]
# 8 bytes for each element, because the MLP trains in float64; the last gradient is padded from 10 elements to 12
sizes = [8 * elements for elements in (8192, 128, 16384, 128, 1280, 12)]
one_by_one_s = sum(line.ring_all_reduce_s(size, 4) for size in sizes)
together_s = line.ring_all_reduce_s(sum(sizes), 4)
assert one_by_one_s > together_s
print(f"one by one: {1e3 * one_by_one_s:.1f} ms, in one tensor: {1e3 * together_s:.1f} ms")

# %% [markdown]
# The difference is latency: 36 ring steps instead of 6. Chapter 03 packs gradients together.
#
# *Waiting.* In training, no rank computed during an all-reduce. In chapter 04, you launch all-reduces early enough to
# change that.
#
# In [the lab](../labs/01_collectives_lab.ipynb), you build the ring, the tree and an asynchronous reduce-scatter
# yourself.

# %%
ranks.stop()
