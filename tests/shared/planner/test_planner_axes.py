"""The planner's context and expert parallelism agree with what the course's own ranks send, hold and compute.

The functions without `test_` run on the ranks.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shared import dryrun, formulas, memory, ranks, wire
from shared.dryrun.decoder import MLP, Decoder
from shared.planner import layouts
from shared.planner.layouts import Job, TrainingLayout, a100_hosts
from shared.planner.links import RealLink
from shared.planner.search import search
from shared.planner.shapes import MIXTRAL, SHAPES, llama
from solutions.context_parallel import all_to_all_attention, ring_attention, visible_pairs
from solutions.expert_parallel import Expert, ExpertParallelMoE, MoE
from solutions.strategies import STRATEGIES, mixed_precision

LLAMA = SHAPES["Llama-2 70B"]
EXPERTS, TOP_K = 4, 2
SMALL = replace(llama("small", 4, 64, 4, 4, 96, vocabulary=48, context=32), experts=EXPERTS, top_k=TOP_K)


# -- what real ranks send and hold


def attention_sent(attend, dtype: torch.dtype, tokens: int = 8, heads: int = 4, width: int = 3) -> float:
    """Return the bytes that forward and backward of one attention send, for two sequences."""
    torch.manual_seed(dist.get_rank())
    q, k, v = (torch.randn(2, heads, tokens, width, dtype=dtype, requires_grad=True) for _ in range(3))
    with wire.ledger() as log:
        attend(q, k, v).sum().backward()
    return log.sent_bytes


@pytest.mark.slow
@pytest.mark.chapter("context_parallel")
@pytest.mark.parametrize(
    ("world", "dtype"),
    [(1, torch.float32), (2, torch.float32), (4, torch.float32), (2, torch.bfloat16), (2, torch.float64)],
    ids=str,
)
def test_real_rings_and_all_to_alls_send_as_much(four_ranks, world, dtype):
    sizes = {"bytes_each": dtype.itemsize}
    gradient_bytes = max(4, dtype.itemsize)  # the ring adds up gradients in fp32 at least
    with ranks.world(world):
        ring = ranks.run(attention_sent, ring_attention, dtype)
        ulysses = ranks.run(attention_sent, all_to_all_attention, dtype)
    expected = formulas.ring_attention_sent_bytes(16, 12, 1, world, gradient_bytes=gradient_bytes, **sizes)
    assert ring == [pytest.approx(expected)] * world
    expected = formulas.all_to_all_attention_sent_bytes(16, 12, 12, 1, world, **sizes)
    assert ulysses == [pytest.approx(expected)] * world


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_busiest_rank_of_our_ring_computes_this_much_more(size, zigzag):
    """A masked pair of chunks costs half. All chunks are equally long."""
    computed = []
    for rank in range(size):
        pairs = [pair for source in range(size) for pair in visible_pairs(rank, source, size, True, zigzag)]
        computed.append(sum(0.5 if masked else 1.0 for _, _, masked in pairs))
    assert max(computed) / (sum(computed) / size) == pytest.approx(formulas.causal_imbalance(size, zigzag))


def evenly_loaded(dim: int = 8, hidden: int = 20) -> tuple[ExpertParallelMoE, torch.Tensor]:
    """Return a layer, and tokens of which each expert gets as many: token t goes to the experts t and t + 1."""
    torch.manual_seed(0)
    moe = MoE(dim, hidden, EXPERTS, TOP_K)
    with torch.no_grad():
        moe.router.weight.copy_(torch.eye(EXPERTS, dim))
    tokens = torch.zeros(8 * EXPERTS, dim)
    for index in range(len(tokens)):
        tokens[index, index % EXPERTS], tokens[index, (index + 1) % EXPERTS] = 2.0, 1.0
    return ExpertParallelMoE.from_moe(moe), tokens.requires_grad_()


def experts_sent() -> float:
    layer, tokens = evenly_loaded()
    with wire.ledger() as log:
        layer(tokens).sum().backward()
    return log.sent_bytes


@pytest.mark.slow
@pytest.mark.chapter("expert_parallel")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_real_experts_send_as_much(four_ranks, world):
    """Besides the rows, our layer sends the number of rows for each expert, in eight bytes."""
    with ranks.world(world):
        found = ranks.run(experts_sent)
    rows = formulas.expert_parallel_sent_bytes(8 * EXPERTS, 8, TOP_K, 1, world, bytes_each=4)
    assert found == [pytest.approx(rows + formulas.ring_fraction(world) * 8 * EXPERTS)] * world


class GatedExpert(Expert):
    def __init__(self, dim: int, hidden: int):
        super().__init__(dim, hidden)
        self.gate = torch.nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("gated", [False, True])
def test_a_real_layer_of_experts_keeps_as_much(gated):
    """The rest is small: probabilities, weights, and the order of the tokens."""
    dim, hidden, tokens = 256, 640, 512
    moe = MoE(dim, hidden, EXPERTS, TOP_K)
    if gated:
        moe.experts = torch.nn.ModuleList(GatedExpert(dim, hidden) for _ in range(EXPERTS))
    kept_bytes = memory.kept_for_backward(moe, torch.randn(tokens, dim))
    expected = formulas.expert_activation_bytes(tokens, dim, hidden, TOP_K, gated=gated, bytes_each=4)
    assert kept_bytes == pytest.approx(expected, rel=0.03)


def held(strategy: str) -> tuple[int, int]:
    """Return the bytes of a rank's parameters and of its optimizer's state after a step."""
    dtype, options = mixed_precision(STRATEGIES[strategy], torch.optim.AdamW)
    module = Decoder(SMALL, build_mlp=dryrun.experts_of("solutions")).to(dtype)
    assert not any(isinstance(layer.mlp, MLP) for layer in module.layers)
    model, optimizer = STRATEGIES[strategy].build(module, options)
    dryrun.take_step(model, optimizer, torch.zeros(1, 32, dtype=torch.long))
    found = memory.held(model, optimizer)
    return found.parameters_bytes, found.optimizer_bytes


@pytest.mark.slow
@pytest.mark.chapter("expert_parallel")
@pytest.mark.parametrize(("strategy", "layout"), [("ep", {"dp": 4, "ep": 4}), ("cp", {"dp": 1, "cp": 4})])
def test_real_ranks_hold_as_much_of_the_model(four_ranks, strategy, layout):
    plan = layouts.memory(Job(SMALL, 4), TrainingLayout(pp=1, tp=1, checkpointing="none", **layout))
    for parameters_bytes, optimizer_bytes in ranks.run(held, strategy):
        assert parameters_bytes == plan.parameters
        assert optimizer_bytes == pytest.approx(plan.optimizer, rel=0.01)  # and the number of steps


# -- what the planner makes of it


def _ideal(bytes_per_s: float) -> RealLink:
    """Return a link without latency, on which every byte takes 1/bandwidth seconds."""
    return RealLink("ideal", 8, 0.0, bytes_per_s, "", "")


def test_context_parallelism_divides_activations_and_copies_the_model():
    job = Job(LLAMA, 8, sequence=131_072)
    one, four = (layouts.memory(job, TrainingLayout(8, 1, 8, checkpointing="full", cp=cp)) for cp in (1, 4))
    assert four.activations == pytest.approx(one.activations / 4)
    assert four.parameters == one.parameters and four.optimizer == one.optimizer
    sharded, as_dp = (layouts.memory(job, TrainingLayout(dp, 1, 8, 1, cp=cp)) for dp, cp in ((2, 4), (8, 1)))
    assert sharded.optimizer == as_dp.optimizer  # ZeRO shards over dp · cp


def test_gradients_are_averaged_over_dp_times_cp():
    cluster = a100_hosts(4)
    by_dp, by_cp = (
        layouts.step_time(Job(LLAMA, 64, sequence=8192), TrainingLayout(dp, 1, 8, overlaps=False, cp=cp), cluster)
        for dp, cp in ((4, 1), (1, 4))
    )
    assert by_cp.data_s == pytest.approx(by_dp.data_s)
    assert by_cp.computing_s == pytest.approx(by_dp.computing_s)
    assert by_cp.context_s > by_dp.context_s == 0.0


def test_an_exposed_ring_takes_the_time_of_its_bytes():
    shape, sequence = SHAPES["Llama-2 7B"], 32_768
    cluster = replace(a100_hosts(4), gpus_per_host=1, adapters=1, adapter=_ideal(25e9))
    layout = TrainingLayout(1, 1, 1, checkpointing="none", overlaps=False, cp=4)
    time = layouts.step_time(Job(shape, 1, sequence), layout, cluster)
    sent_bytes = formulas.ring_attention_sent_bytes(sequence / 4, shape.kv_width, shape.layers, 4)
    assert time.context_s == pytest.approx(sent_bytes / cluster.adapter.bus_bytes_per_s)


def test_attention_hides_the_ring_of_a_long_sequence():
    cluster, layout = a100_hosts(4), TrainingLayout(1, 1, 8, cp=4)
    short, long = (layouts.step_time(Job(LLAMA, 1, length), layout, cluster) for length in (8192, 1_048_576))
    assert long.context_s / long.total_s < 0.01 < short.context_s / short.total_s


def test_without_zigzag_attention_waits_for_the_last_rank():
    job, cluster = Job(LLAMA, 1, 131_072), a100_hosts(4)
    zigzag, plain = (
        layouts.step_time(job, TrainingLayout(1, 1, 8, cp=4, zigzag=each), cluster).computing_s
        for each in (True, False)
    )
    attention_s = 3 * LLAMA.layers * layouts.attention_flops(job, job.tokens) / 32 / cluster.gpu.flops
    assert plain - zigzag == pytest.approx((7 / 4 - 1) * attention_s)


def test_expert_parallelism_divides_experts_and_nothing_else():
    job = Job(MIXTRAL, 64, sequence=4096)
    experts = MIXTRAL.layers * MIXTRAL.expert_parameters
    for ep in (1, 2, 8):
        plan = layouts.memory(job, TrainingLayout(8, 1, 1, 0, ep=ep))
        assert plan.parameters == 2 * (MIXTRAL.parameters - experts + experts / ep)
        sharded = layouts.memory(job, TrainingLayout(8, 1, 1, 1, ep=ep))  # an expert has only 8 / ep copies
        assert sharded.optimizer == pytest.approx(12 * MIXTRAL.parameters / 8)


def test_all_to_alls_of_experts_take_the_time_of_their_bytes():
    cluster = replace(a100_hosts(1), inside=_ideal(200e9))
    layout = TrainingLayout(8, 1, 1, 3, checkpointing="none", ep=8)
    time = layouts.step_time(Job(MIXTRAL, 16, sequence=4096), layout, cluster)
    sent_bytes = formulas.expert_parallel_sent_bytes(2 * 4096, MIXTRAL.hidden, 2, MIXTRAL.layers, 8)
    assert time.experts_s == pytest.approx(sent_bytes / cluster.inside.bus_bytes_per_s)


def test_experts_that_leave_their_host_are_slower_and_send_smaller_gradients():
    job = Job(MIXTRAL, 64, sequence=4096)
    inside, across = (
        layouts.step_time(job, TrainingLayout(16, 1, tp, 1, ep=8, overlaps=False), a100_hosts(2 * tp, 1))
        for tp in (1, 8)
    )
    assert across.experts_s > 2 * inside.experts_s
    few, many = (
        layouts.step_time(job, TrainingLayout(16, 1, 1, 1, ep=ep, overlaps=False), a100_hosts(2, 1)).data_s
        for ep in (1, 8)
    )
    assert many < 0.6 * few  # each host sends all experts once, and not 2 · 15/16 times


def test_tokens_pay_only_for_their_own_experts():
    """12.9B of the 46.7B parameters, of which the output layer and the embedding have 0.1B each."""
    job = Job(MIXTRAL, 1, sequence=4096)
    per_token = (job.model_flops / job.tokens - 3 * MIXTRAL.layers * layouts.attention_flops(job, 1)) / 6
    assert per_token == pytest.approx(12.9e9 - 0.13e9, rel=0.01)


@pytest.mark.parametrize(
    ("job", "layout", "message"),
    [
        (Job(LLAMA, 64), {"cp": 0}, "cp and ep must be at least 1, got cp=0 and ep=1"),
        (Job(LLAMA, 64), {"cp": 3}, "4096 tokens cannot be divided into two equal chunks for each of 3 ranks"),
        (Job(LLAMA, 64, attention="materialized"), {"cp": 2}, "context parallelism needs fused attention"),
        (Job(LLAMA, 64), {"ep": 2}, "Llama-2 70B has no experts that 2 ranks could divide"),
        (Job(MIXTRAL, 64), {"ep": 3}, "8 experts cannot be divided into groups of 3"),
        (Job(MIXTRAL, 64), {"ep": 8}, "4 replicas cannot be divided into groups of 8"),
    ],
)
def test_degrees_that_divide_nothing_are_explained(job, layout, message):
    with pytest.raises(ValueError, match=message) as rejected:
        layouts.memory(job, TrainingLayout(4, 1, 8, **layout))
    assert "\n" not in str(rejected.value)


def test_the_search_finds_cp_for_a_long_sequence_and_ep_for_experts():
    long = search(Job(LLAMA, 4, sequence=131_072), a100_hosts(8), context_ranks=(1, 2, 4, 8))
    assert long.best.layout.cp > 1 and "CP" in str(long.best.layout) and "CP" in str(long.table())
    mixtral = search(Job(MIXTRAL, 256, sequence=4096), a100_hosts(4), expert_ranks=(1, 2, 4, 8))
    assert mixtral.best.layout.ep > 1 and f"EP {mixtral.best.layout.ep}" in str(mixtral.table())
    assert all(each.layout.ranks == 32 for each in mixtral.candidates)
    assert mixtral.why() and long.why()
