"""Memory is counted to the byte, now and at the peak: manual counts, torch's profiler and CUDA's allocator agree."""

import contextlib
import json
import time
import types
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shared import formulas, memory, models, plots
from shared.deadlines import scaled
from shared.memory import storages
from shared.plots import diagrams

MIB = 2**20
STEP_BYTES = 4  # Adam's step counter, a float32 for each parameter


def nbytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def one_step(module: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    module(x).square().mean().backward()
    optimizer.step()


# -- held


def test_adams_state_is_exact():
    model = models.MLP((64, 100, 10))
    adam = torch.optim.Adam(model.parameters())
    parameters = 64 * 100 + 100 + 100 * 10 + 10
    assert memory.held(model, adam) == memory.Held(parameters_bytes=4 * parameters)
    one_step(model, adam, torch.randn(8, 64))
    expected = memory.Held(4 * parameters, 4 * parameters, 8 * parameters + 4 * STEP_BYTES)
    assert memory.held(model, adam) == expected
    assert expected.total_bytes == 16 * parameters + 4 * STEP_BYTES


def test_a_tied_embedding_counts_once():
    model = models.TinyGPT()
    config = model.config
    vocabulary = 4 * config.vocab_size * config.width
    assert model.output.weight is model.token_embedding.weight
    assert memory.held(model).parameters_bytes == nbytes(model.parameters())
    model.output.weight = nn.Parameter(model.output.weight.detach().clone())
    assert memory.held(model).parameters_bytes == nbytes(model.state_dict().values())
    model.output.weight = nn.Parameter(model.token_embedding.weight.detach())  # another parameter, the same storage
    assert memory.held(model).parameters_bytes == nbytes(model.state_dict().values()) - vocabulary


def test_a_view_keeps_its_whole_storage_alive():
    model = nn.Module()
    model.shard = nn.Parameter(torch.empty(MIB // 4)[:1])
    assert memory.held(model) == memory.Held(parameters_bytes=MIB)
    model.shard = nn.Parameter(model.shard.detach().clone())
    assert memory.held(model) == memory.Held(parameters_bytes=4)


def test_gradients_in_a_flat_bucket_count_once_and_its_padding_counts_as_a_bucket():
    model = nn.Linear(3, 5)  # 15 + 5 elements
    flat = torch.zeros(24)
    model.weight.grad, model.bias.grad = flat[:15].view(5, 3), flat[15:20]
    expected = memory.Held(parameters_bytes=80, gradients_bytes=80, buckets_bytes=16)
    assert memory.held(model) == expected
    model.flat = flat  # another attribute with the same storage adds nothing
    assert memory.held(model) == memory.held(model, extra={"buckets": [flat]}) == expected


def test_buffers_and_other_tensors_in_attributes_are_counted():
    model = nn.BatchNorm1d(10)
    assert memory.held(model) == memory.Held(parameters_bytes=80, buffers_bytes=2 * 40 + 8)
    model.stash = [{"full copy": torch.empty(100)}]
    assert memory.held(model).other_bytes == 400
    assert memory.held(model, extra={"buckets": model.stash}).buckets_bytes == 400
    assert memory.held(model, extra={"buckets": model.stash}).other_bytes == 0


def test_tensors_of_classes_and_libraries_are_not_counted():
    model, library, kind = nn.Identity(), types.ModuleType("library"), type("Kind", (), {"table": torch.empty(100)})
    library.table = torch.empty(100)
    model.library, model.kind = library, kind
    assert memory.held(model).total_bytes == 0


def test_master_weights_and_their_gradients():
    model = nn.Linear(10, 10, bias=False).bfloat16()
    master = nn.Parameter(model.weight.detach().float())
    adam = torch.optim.Adam([master])
    master.grad = torch.zeros(10, 10)
    adam.step()
    assert memory.held(model, adam) == memory.Held(200, 400, 400 + 800 + STEP_BYTES)


class ShardedOptimizer:
    """Not a torch optimizer, but an object that contains one for its half of the parameters."""

    def __init__(self, parameters):
        parameters = list(parameters)
        self.inner = torch.optim.Adam(parameters[: len(parameters) // 2])

    def step(self):
        self.inner.step()


def test_optimizers_inside_other_objects_are_counted():
    model = models.MLP((64, 100, 10))
    sharded = ShardedOptimizer(model.parameters())
    one_step(model, sharded, torch.randn(8, 64))
    expected = 8 * (64 * 100 + 100) + 2 * STEP_BYTES
    assert memory.held(model, sharded).optimizer_bytes == expected
    model.optimizer = sharded
    assert memory.held(model).optimizer_bytes == expected
    assert memory.held(optimizer=sharded).parameters_bytes == nbytes(model.layers[0].parameters())


def test_a_storage_of_size_0_a_meta_tensor_and_a_lazy_module_hold_nothing():
    model = nn.Linear(10, 10, bias=False)
    model.weight.untyped_storage().resize_(0)
    for empty in (model, nn.Linear(10, 10, device="meta"), nn.LazyLinear(10), nn.Identity()):
        assert memory.held(empty).total_bytes == 0
    model.weight.untyped_storage().resize_(400)
    assert memory.held(model).total_bytes == 400


def test_a_sparse_gradient_holds_its_rows_and_their_indices():
    model = nn.Embedding(1000, 16, sparse=True)
    model(torch.tensor([3, 5])).sum().backward()
    assert memory.held(model) == memory.Held(4 * 16000, gradients_bytes=2 * 16 * 4 + 2 * 8)


def test_held_and_peak_display_as_tables():
    held = memory.Held(parameters_bytes=1234567, other_bytes=1)
    assert str(held).splitlines() == [
        "component   bytes",
        "parameters  1,234,567",
        "other       1",
        "total       1,234,568",
    ]
    assert ">1,234,568</td>" in held._repr_html_()
    peak = memory.Peak([memory.Sample(0.0, "start", memory.Held()), memory.Sample(0.1, "forward", held)])
    assert str(peak).splitlines() == [*str(held).splitlines(), "at the peak, in forward: 1,234,568 bytes"]
    assert "at the peak, in forward" in peak._repr_html_()


@pytest.mark.parametrize("measure", [memory.held, lambda *args, **kwargs: memory.peak(*args, **kwargs).__enter__()])
@pytest.mark.parametrize(
    ("args", "extra", "error", "message"),
    [
        ((None, None), None, ValueError, "pass a module, an optimizer or extra tensors"),
        (("model",), None, TypeError, "module must be a torch.nn.Module, got str"),
        ((nn.Identity(), [1]), None, TypeError, "must have .state or contain a torch optimizer, got list"),
        ((nn.Identity(),), [1], TypeError, "extra must be a dict of tensors by component"),
        ((nn.Identity(),), {"bukets": []}, ValueError, "component, 'bukets'. The components are parameters, gradients"),
    ],
)
def test_bad_input_is_rejected_in_one_sentence(measure, args, extra, error, message):
    with pytest.raises(error, match=message):
        measure(*args, extra=extra)


# -- peak


class Chain(nn.Module):
    """x → weight → ReLU → weight, with known sizes."""

    WIDTH, BATCH = 64, 512
    WEIGHT, ACTIVATION = 4 * WIDTH * WIDTH, 4 * WIDTH * BATCH

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(2))

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def chain_peak(step) -> memory.Peak:
    model, x = Chain(), torch.randn(Chain.BATCH, Chain.WIDTH)
    with memory.peak(model, extra={"other": x}) as peak:
        step(model, x)
    return peak


def test_a_peak_agrees_with_a_manual_count():
    """The peak is reached when backward has computed the gradient before the ReLU, and still holds the one after it."""
    weight, activation, scalar = Chain.WEIGHT, Chain.ACTIVATION, 4
    peak = chain_peak(lambda model, x: model(x).sum().backward())
    assert peak.held == memory.Held(
        parameters_bytes=2 * weight,
        gradients_bytes=weight,  # of the second layer
        activations_bytes=activation + 2 * scalar,  # ReLU's output; the loss; the 1 that backward() starts from
        other_bytes=activation + 2 * activation,  # x; gradients on both sides of the ReLU
    )
    assert peak.phase == "backward" and peak.peak_bytes == peak.held.total_bytes
    assert peak.samples[0].held == memory.Held(2 * weight, other_bytes=activation)
    assert peak.samples[-1].held == memory.Held(2 * weight, 2 * weight, other_bytes=activation)


def test_forward_alone():
    """Two outputs of BATCH × WIDTH exist at once. Without autograd, they are not activations."""
    weight, activation = Chain.WEIGHT, Chain.ACTIVATION
    expected = memory.Held(2 * weight, activations_bytes=2 * activation, other_bytes=activation)
    assert chain_peak(lambda model, x: model(x)).held == expected
    expected = memory.Held(2 * weight, other_bytes=3 * activation)
    assert chain_peak(lambda model, x: torch.no_grad()(model)(x)).held == expected


def test_the_second_micro_batch_holds_one_more_gradient():
    def two_micro_batches(model, x):
        model(x).sum().backward()
        model(x).sum().backward()

    peak = chain_peak(two_micro_batches)
    assert max(sample.held.gradients_bytes for sample in peak.samples) == 3 * Chain.WEIGHT
    assert peak.samples[-1].held.gradients_bytes == 2 * Chain.WEIGHT
    phases = [sample.phase for sample in peak.samples]
    changes = [phase for index, phase in enumerate(phases) if index == 0 or phase != phases[index - 1]]
    assert changes == ["start", "forward", "backward", "forward", "backward"]


def test_checkpointing_holds_one_layer_at_a_time():
    """GELU keeps its input, and the next layer keeps GELU's output. Checkpointed layers keep only their input."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU()) for _ in range(4)))
    x, activation = torch.randn(512, 64), 4 * 64 * 512

    def checkpointed(x):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    def most_activations(run) -> int:
        with memory.peak(layers) as peak:
            run(x).sum().backward()
        return max(sample.held.activations_bytes for sample in peak.samples if sample.phase == "backward") // activation

    assert most_activations(layers) == 4 + 3  # inputs of each GELU; inputs of each linear layer, less x
    assert most_activations(checkpointed) == 3 + 1  # inputs of each linear layer, less x; input of one GELU


class Recomputed(torch.autograd.Function):
    """Keeps x and runs the module without recording, as the lab's Recompute does."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.module(x)
        return None, torch.autograd.grad(output, x, gradient)[0]


def test_the_output_of_an_autograd_function_counts_as_an_activation():
    """The input of the second layer is made under no_grad, but the graph keeps it."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU()) for _ in range(2)))
    x, activation = torch.randn(512, 64, requires_grad=True), 4 * 64 * 512

    def run(x):
        return Recomputed.apply(layers[1], Recomputed.apply(layers[0], x))

    with memory.peak(layers, extra={"other": x}) as peak:
        output = run(x)
        output.sum()
    assert peak.samples[-1].held.activations_bytes == 2 * activation
    assert peak.samples[-1].held.other_bytes == activation  # x
    with torch.no_grad(), memory.peak(layers, extra={"other": x}) as peak:
        output = run(x)
        output.sum()
    assert peak.samples[-1].held == memory.Held(2 * 4 * 64 * 64, other_bytes=2 * activation)


def test_autocast_keeps_copies_in_bf16():
    """Backward needs x in bf16 for Linear, and the float32 input of the square. The copy of the weight is freed."""
    model, x = nn.Linear(64, 256, bias=False), torch.randn(512, 64)
    with memory.peak(model) as peak:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        loss = y.float().square().mean()
        del y
        loss.backward()
    starts = next(sample for sample in peak.samples if sample.phase == "backward")
    loss_bytes = 2 * 4  # and those of its gradient
    assert starts.held.activations_bytes == 2 * 512 * 64 + 4 * 512 * 256 + loss_bytes


@contextlib.contextmanager
def peak_growth():
    """Yield a list that will contain the bytes of tracked memory at the peak when the block has ended."""
    peaks_bytes = []
    with memory.peak(nn.Identity()) as peak:
        yield peaks_bytes
    peaks_bytes.append(peak.peak_bytes)


def test_a_freed_tensor_stops_counting_and_views_and_in_place_operators_add_nothing():
    with peak_growth() as both:
        first, second = torch.empty(1000, dtype=torch.int8), torch.empty(1000, dtype=torch.int8)
    assert both == [2000]
    with peak_growth() as one:
        first = torch.empty(1000, dtype=torch.int8)
        del first
        second = torch.empty(1000, dtype=torch.int8)
        second.view(10, 100).t()[3:5].add_(1)
        second.zero_()
        part = second[:1]
        del second
        third = torch.empty(10, dtype=torch.int8)  # `part` still keeps the storage of 1000 bytes
    assert one == [1010]
    del part, third


def test_only_storages_on_the_modules_device_are_counted():
    with memory.peak(nn.Linear(10, 10, device="meta")) as peak:
        torch.zeros(1000)
    assert peak.peak_bytes == 0


def test_resizing_a_storage_is_seen_although_it_is_not_an_operator():
    model = nn.Linear(100, 100, bias=False)
    with memory.peak(model) as peak:
        full = torch.zeros(1000)
        full.untyped_storage().resize_(0)
        model.weight.untyped_storage().resize_(0)
        torch.zeros(1)
        model.weight.untyped_storage().resize_(40000)
        torch.zeros(1)
    assert [sample.held.parameters_bytes for sample in peak.samples] == [40000, 40000, 0, 40000, 40000]
    assert [sample.held.other_bytes for sample in peak.samples] == [0, 4000, 4, 4, 0]
    assert torch.UntypedStorage.resize_ is torch._C.StorageBase.resize_


def test_gradients_that_a_wrapper_frees_in_backward_are_counted_until_then():
    model = Chain()

    def free(parameter):
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(free)
    with memory.peak(model) as peak:
        model(torch.randn(8, Chain.WIDTH)).sum().backward()
    assert max(sample.held.gradients_bytes for sample in peak.samples) == Chain.WEIGHT
    assert peak.samples[-1].held.gradients_bytes == 0


def test_the_first_step_creates_optimizer_state():
    model = Chain()
    adam = torch.optim.Adam(model.parameters())
    with memory.peak(model, adam) as peak:
        one_step(model, adam, torch.randn(8, Chain.WIDTH))
    assert peak.phase == "step"
    assert peak.samples[-1].held == memory.held(model, adam)
    assert peak.samples[-1].held.optimizer_bytes == 2 * (2 * Chain.WEIGHT + STEP_BYTES)


def test_a_block_that_fails_leaves_no_hooks():
    model = Chain()
    with pytest.raises(ZeroDivisionError), memory.peak(model) as peak:
        with pytest.raises(RuntimeError, match="known only after the block has ended"):
            _ = peak.peak_bytes
        one_step(model, torch.optim.SGD(model.parameters()), torch.randn(8, Chain.WIDTH))
        raise ZeroDivisionError
    samples = len(peak.samples)
    assert peak.phase == "backward"
    one_step(model, torch.optim.SGD(model.parameters()), torch.randn(8, Chain.WIDTH))
    assert len(peak.samples) == samples
    assert all(not parameter._backward_hooks for parameter in model.parameters())


# -- compared with other sources


def profiled_growth_bytes(step, directory) -> int:
    """Return the growth of CPU allocations at their peak, according to torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    profiler.export_chrome_trace(str(directory / "trace.json"))
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(accumulate(change for _, change in changes))


def _gpt_step():
    model = models.TinyGPT()
    tokens = torch.randint(96, (4, 64))
    return model, tokens, lambda: model(tokens, tokens)


def _checkpointed_step():
    model, x = models.MLP((64, 256, 256, 10)), torch.randn(512, 64)
    return model, x, lambda: checkpoint(model, x, use_reentrant=False).square().mean()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("make", [_gpt_step, _checkpointed_step])
def test_the_peak_agrees_with_the_profiler(make, micro_batches, tmp_path):
    model, given, loss = make()
    adam = torch.optim.Adam(model.parameters())

    def step():
        for _ in range(micro_batches):
            loss().backward()
        adam.step()
        adam.zero_grad()

    step()  # the first step creates Adam's state
    with memory.peak(model, adam, extra={"other": given}) as peak:
        step()
    grew_bytes = peak.peak_bytes - peak.samples[0].held.total_bytes
    assert grew_bytes == pytest.approx(profiled_growth_bytes(step, tmp_path), rel=0.01)

    def watched_step():
        with memory.peak(model, adam):
            step()

    assert grew_bytes == pytest.approx(profiled_growth_bytes(watched_step, tmp_path), rel=0.01)  # watching adds nothing


class AGpu:
    """Stands in for the device of a tensor on a CPU."""

    type = "cuda"

    def __eq__(self, other) -> bool:
        return True


class WatchOnAGpu(storages.Watch):
    device = property(lambda self: AGpu(), lambda self, device: None)


def test_what_other_models_hold_on_a_gpu_does_not_count(monkeypatch):
    """A lab keeps several models alive. CUDA's allocator counts all of them."""

    def peak_of_a_step() -> memory.Peak:
        return chain_peak(lambda model, x: model(x).sum().backward())

    on_cpu = peak_of_a_step()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10**9)
    monkeypatch.setattr(storages, "Watch", WatchOnAGpu)
    on_gpu = peak_of_a_step()
    assert (on_cpu.allocator_bytes, on_gpu.allocator_bytes) == (None, 10**9)
    assert on_gpu.peak_bytes == on_cpu.peak_bytes == on_gpu.held.total_bytes


def _on_the_gpu():
    model = models.MLP((1024, 2048, 2048, 2048, 10)).cuda()
    return model, torch.optim.Adam(model.parameters()), torch.randn(4096, 1024, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_the_peak_agrees_with_cudas_allocator():
    one_step(*_on_the_gpu())  # cuBLAS allocates its workspaces once and keeps them
    before_bytes = torch.cuda.memory_allocated()
    model, adam, x = _on_the_gpu()
    one_step(model, adam, x)
    allocated_bytes = torch.cuda.memory_allocated() - before_bytes
    assert memory.held(model, adam, extra={"other": x}).total_bytes == pytest.approx(allocated_bytes, rel=0.01)
    with memory.peak(model, adam, extra={"other": x}) as peak:
        one_step(model, adam, x)
    assert peak.allocator_bytes == torch.cuda.max_memory_allocated()
    assert 0.85 < peak.peak_bytes / (peak.allocator_bytes - before_bytes) <= 1.0  # the rest is workspaces and rounding
    of_gelus_bytes = 6 * 4 * 4096 * 2048  # their inputs and outputs
    assert max(sample.held.activations_bytes for sample in peak.samples) > of_gelus_bytes


# -- on ranks

RELEASE_S = scaled(0.2)  # far more than gloo's threads need to release a tensor after a collective
SIZES = (64, 129, 129, 11)
ROW_BYTES = (4 * (64 + 1), 4 * (129 + 1), 4 * (129 + 1))  # per layer: a row of the weight and an element of the bias
ROWS = {0: (65, 65, 6), 1: (64, 64, 5)}  # of 129, 129 and 11, on each rank
PADDED_ROWS = (65, 65, 6)  # every rank's shard has as many as the largest


def rows_bytes(rows) -> int:
    return sum(count * row_bytes for count, row_bytes in zip(rows, ROW_BYTES, strict=True))


def _on_fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = models.MLP(SIZES), init_device_mesh("cpu", (2,))
    for layer in model.layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam = torch.optim.Adam(model.parameters())
    x = torch.randn(32, 64)
    one_step(model, adam, x)
    held = memory.held(model, adam)
    adam.zero_grad()
    with memory.peak(model, adam, extra={"other": x}) as peak:
        one_step(model, adam, x)
    return held, peak


def test_fsdp2_holds_its_shards_and_unshards_one_unit_at_a_time(two_ranks):
    units = [2 * count * row_bytes for count, row_bytes in zip(PADDED_ROWS, ROW_BYTES, strict=True)]
    for rank, (held, peak) in enumerate(two_ranks.run(_on_fsdp2)):
        padding_bytes = rows_bytes(PADDED_ROWS) - rows_bytes(ROWS[rank])
        assert held.parameters_bytes == rows_bytes(PADDED_ROWS)
        assert (held.gradients_bytes, held.buckets_bytes) == (rows_bytes(ROWS[rank]), padding_bytes)
        assert held.optimizer_bytes == 2 * rows_bytes(ROWS[rank]) + 6 * STEP_BYTES
        most_bytes = max(sample.held.parameters_bytes for sample in peak.samples)
        assert most_bytes == formulas.zero3_parameter_peak_bytes(units, ranks=2, bytes_each=1)
        assert peak.samples[-1].held.parameters_bytes == rows_bytes(PADDED_ROWS)
        in_step = max(sample.held.other_bytes for sample in peak.samples if sample.phase == "step")
        # Adam's temporaries for the largest shard: the root of v and the denominator
        assert in_step >= 2 * 4 * ROWS[rank][1] * SIZES[1]


def _on_ddp(gradient_as_bucket_view: bool):
    from torch.nn.parallel import DistributedDataParallel

    model = models.MLP(SIZES)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=gradient_as_bucket_view, bucket_cap_mb=0.05)
    built = memory.held(wrapped)
    for _ in range(2):  # DDP rebuilds its buckets for the second step
        wrapped(torch.randn(32, 64)).sum().backward()
    trained = memory.held(wrapped)
    wrapped.zero_grad()
    with memory.peak(wrapped) as peak:
        wrapped(torch.randn(32, 64)).sum().backward()
    return built, trained, peak


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_ddp_holds_a_second_copy_of_the_gradients_unless_they_are_views_of_its_buckets(
    two_ranks, gradient_as_bucket_view
):
    parameters = rows_bytes((129, 129, 11))
    for built, trained, peak in two_ranks.run(_on_ddp, gradient_as_bucket_view):
        assert built == memory.Held(parameters_bytes=parameters, buckets_bytes=parameters)
        buckets = 0 if gradient_as_bucket_view else parameters
        assert trained == memory.Held(parameters, parameters, buckets_bytes=buckets)
        first, last = peak.samples[0].held, peak.samples[-1].held
        assert (first.gradients_bytes + first.buckets_bytes, first.other_bytes) == (parameters, 0)
        assert (last.gradients_bytes, last.buckets_bytes) == (parameters, buckets)


def _zero_3_by_hand():
    """All-gather a full parameter into a resized storage, free it, and reduce-scatter its gradient."""
    import torch.distributed as dist

    module = nn.ParameterDict({"shard": torch.ones(512), "full": torch.ones(1024)})
    full = module["full"].untyped_storage()
    full.resize_(0)
    with memory.peak(module) as peak:
        dist.broadcast(module["shard"].data, src=0)
        full.resize_(4096)
        dist.all_gather(list(module["full"].data.split(512)), module["shard"].data)
        full.resize_(0)
        summed, gradients = torch.empty(512), list(torch.ones(1024).split(512))
        dist.reduce_scatter(summed, gradients)
        del gradients
        time.sleep(RELEASE_S)
        module["shard"].grad = summed
        del summed
        torch.optim.SGD(module.parameters()).step()
        module.zero_grad()
    return peak


def test_zero_3_by_hand(two_ranks):
    for peak in two_ranks.run(_zero_3_by_hand):
        seen = [sample.held for sample in peak.samples]
        assert seen[0] == seen[-1] == memory.Held(parameters_bytes=2048)
        assert max(held.parameters_bytes for held in seen) == 2048 + 4096
        assert max(held.gradients_bytes for held in seen) == 2048
        assert max(held.buckets_bytes for held in seen) == 4096  # the input of the reduce-scatter


def _add_differently_sharded_dtensors():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    rows, columns = (distribute_tensor(torch.ones(64, 64), mesh, [Shard(dim)]) for dim in (0, 1))
    with memory.peak(nn.Identity()) as peak:
        rows + columns
    return peak


def test_collectives_inside_dtensors_are_seen(two_ranks):
    for peak in two_ranks.run(_add_differently_sharded_dtensors):
        assert peak.held.buckets_bytes >= 4 * 64 * 32


# -- what forward keeps


def test_what_forward_keeps_are_the_activations_that_backward_needs():
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(32, 8, requires_grad=True)
    kept_bytes = memory.kept_for_backward(model, x)
    assert kept_bytes == 4 * 32 * (16 + 16 + 4), "the inputs of GELU and of the last layer, and the output"
    assert x.grad is not None


# -- figures


def test_the_figures_show_every_component_that_holds_memory():
    peak = chain_peak(lambda model, x: model(x).sum().backward())
    names = ["parameters", "gradients", "activations", "other"]
    assert peak.peak_bytes == 3 * Chain.WEIGHT + 4 * Chain.ACTIVATION + 8 == 573448
    over_step = plots.memory_over_step(peak.samples).axes[0]
    assert [text.get_text() for text in over_step.get_legend().get_texts()] == names[::-1]
    assert {text.get_text().strip() for text in over_step.texts} == {"forward", "backward", "peak: 573 KB"}
    bars = plots.memory_by_component({"rank 0": peak.held.by_component(), "rank 1": memory.Held(1000).by_component()})
    assert [text.get_text() for text in bars.axes[0].get_legend().get_texts()] == names
    assert [text.get_text().strip() for text in bars.axes[0].texts] == ["573", "1"]


def test_the_figure_over_a_step_has_the_order_of_the_diagram():
    held_bytes = {f"{component}_bytes": 1000 for component in storages.COMPONENTS}
    samples = [memory.Sample(0.0, phase, memory.Held(**held_bytes)) for phase in ("start", "forward")]
    legend = plots.memory_over_step(samples).axes[0].get_legend()
    upwards = [text.get_text() for text in legend.get_texts()][::-1]
    in_diagram = list(diagrams.memory.moments()[0].held_gb)
    assert [component for component in upwards if component in in_diagram] == in_diagram
    assert sorted(upwards) == sorted(storages.COMPONENTS)


@pytest.mark.parametrize(("draw", "nothing"), [(plots.memory_over_step, []), (plots.memory_by_component, {})])
def test_a_figure_without_data_is_rejected(draw, nothing):
    with pytest.raises(ValueError, match=r"There (is nothing|are no samples) to draw"):
        draw(nothing)
