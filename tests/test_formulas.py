"""The formulas give the published values, and reject invalid arguments."""

import pytest

from shared import formulas as f

GB = 1e9


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_example_of_the_zero_paper(stage, gigabytes):
    """ZeRO figure 1: 7.5B parameters on 64 ranks."""
    assert f.model_state_bytes(7.5e9, 64, stage) / GB == pytest.approx(gigabytes, abs=0.05)


def test_70b_on_8_ranks():
    by_stage = tuple(f.model_state_bytes(70e9, 8, stage) / GB for stage in f.ZERO_STAGES)
    assert by_stage == pytest.approx((1120, 385, 262.5, 140))


@pytest.mark.parametrize(("ranks", "one", "two"), [(2, 1.60, 1.78), (4, 2.29, 2.91), (8, 2.91, 4.27), (64, 3.82, 7.21)])
def test_real_savings_stay_below_the_limits_of_4_and_8(ranks, one, two):
    assert f.memory_saving(ranks, 1) == pytest.approx(one, abs=0.005)
    assert f.memory_saving(ranks, 2) == pytest.approx(two, abs=0.005)


def test_savings_approach_their_limits():
    assert f.memory_saving(10**9, 1) == pytest.approx(4) and f.memory_saving(10**9, 2) == pytest.approx(8)
    assert f.memory_saving(10**9, 1, f.FP32_ADAM) == pytest.approx(2)
    assert f.memory_saving(10**9, 2, f.FP32_ADAM) == pytest.approx(4)
    assert f.memory_saving(16, 3) == pytest.approx(16)


def test_bytes_per_parameter():
    kinds = (f.MIXED_ADAM, f.MIXED_ADAM_FP32_GRADIENTS, f.FP32_ADAM)
    assert [each.total for each in kinds] == [16, 20, 16]


def test_zero3_peaks_above_its_shards():
    units = [10.0, 40.0, 20.0]
    assert f.zero3_parameter_peak_bytes(units, 2, bytes_each=1) == 35 + 40
    assert f.zero3_parameter_peak_bytes(units, 2, bytes_each=1, prefetch=1) == 35 + 60


def test_only_zero3_sends_more_than_plain_data_parallelism():
    sent = [f.step_sent_bytes(1e9, 8, stage) for stage in f.ZERO_STAGES]
    assert sent[0] == sent[1] == sent[2] == 2 * 7 / 8 * 2e9
    assert sent[3] / sent[0] == 1.5


def test_accumulation_multiplies_the_bytes_of_zero2_and_zero3():
    sent = [f.step_sent_bytes(1, 10**9, stage, bytes_each=1, micro_batches=4) for stage in f.ZERO_STAGES]
    assert sent == pytest.approx([2, 2, 5, 12])


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    assert (
        f.all_reduce_sent_bytes(100, 4) == f.reduce_scatter_sent_bytes(100, 4) + f.all_gather_sent_bytes(100, 4) == 150
    )
    assert f.all_reduce_sent_bytes(100, 1) == 0


def test_times_agree_if_algorithms_coincide():
    """On two ranks a ring and halving-doubling are the same; α alone favors the tree, and β alone the ring."""
    assert f.ring_all_reduce_s(1e6, 2, 1e-3, 1e-9) == pytest.approx(f.halving_doubling_all_reduce_s(1e6, 2, 1e-3, 1e-9))
    assert f.tree_all_reduce_s(0, 64, 1, 0) == 12 < f.ring_all_reduce_s(0, 64, 1, 0) == 126
    assert f.ring_all_reduce_s(1, 64, 0, 1) == 2 * 63 / 64 < f.tree_all_reduce_s(1, 64, 0, 1)
    assert f.ring_all_reduce_s(1e6, 1, 1e-3, 1e-9) == 0


def test_exposed_communication():
    assert f.exposed_s([1, 2, 3], [0.5, 0.5, 0.5], backward_end_s=3) == 0.5
    assert f.exposed_s([1, 2, 3], [2, 2, 2], backward_end_s=3) == 4
    assert f.exposed_s([1], [0.1], backward_end_s=3) == 0
    assert f.exposed_s([], [], backward_end_s=3) == 0


def test_bubbles_over_ideal_time():
    assert f.bubble_over_ideal(4, 8) == 0.375
    assert f.bubble_over_ideal(4, 8, chunks=2) == 0.375 / 2


def test_activations_of_megatrons_table():
    """s = 2048, b = 1, h = 12288, a = 96: 5as/h is 80."""

    def in_sbh(**options):
        return f.activation_bytes(2048, 1, 12288, 96, **options) / (2048 * 12288)

    assert in_sbh() == 34 + 80
    assert in_sbh(tensor_ranks=8) == 10 + 24 / 8 + 80 / 8
    assert in_sbh(tensor_ranks=8, sequence_parallel=True) == (34 + 80) / 8
    assert in_sbh(tensor_ranks=8, checkpointing="selective") == 10 + 24 / 8
    assert in_sbh(tensor_ranks=8, sequence_parallel=True, checkpointing="selective") == 34 / 8
    assert in_sbh(checkpointing="full") == 2
    assert in_sbh(attention="fused") == in_sbh(attention="fused", checkpointing="selective") == 34
    assert in_sbh(attention="fused", tensor_ranks=8) == 10 + 24 / 8
    assert in_sbh(attention="fused", checkpointing="full") == 2


def test_activations_of_another_precision():
    """32 of the 34 bytes are elements of 2 bytes, as are 4 of the 5 bytes of attention. The others are masks."""
    tokens = 64 * 2 * 128  # s·b·h
    assert f.activation_bytes(64, 2, 128, 4, bytes_each=4) == tokens * (66 + 9 * 4 * 64 / 128)
    assert f.activation_bytes(64, 2, 128, 4, bytes_each=4, checkpointing="full") == tokens * 4
    assert f.logits_bytes(64, 2, 1000) == 4 * 64 * 2 * 1000


def test_activations_without_dropout():
    """A layer without dropout has no masks, so every kept byte belongs to one of 16 elements per sbh, or to a score."""

    def in_sbh(**options):
        return f.activation_bytes(64, 2, 128, 4, bytes_each=4, dropout=False, **options) / (64 * 2 * 128)

    assert in_sbh(attention="fused") == 16 * 4 and in_sbh() == 16 * 4 + 4 * 4 * 64 / 128
    assert in_sbh(attention="fused", tensor_ranks=4) == 4 * 4 + 12
    assert in_sbh(attention="fused", tensor_ranks=4, sequence_parallel=True) == 16


def test_tensor_parallelism_sends_four_all_reduces_per_layer():
    assert f.tensor_parallel_sent_bytes(2048, 100, 3, 4) == 3 * 4 * f.all_reduce_sent_bytes(2 * 2048 * 100, 4)
    assert f.tensor_parallel_sent_bytes(2048, 100, 3, 1) == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: f.model_state_bytes(1e9, 0, 1),
        lambda: f.model_state_bytes(-1, 4, 1),
        lambda: f.model_state_bytes(1e9, 4, 4),
        lambda: f.ring_fraction(-2),
        lambda: f.step_sent_bytes(1e9, 4, 1, micro_batches=0),
        lambda: f.zero3_parameter_peak_bytes([], 4),
        lambda: f.halving_doubling_all_reduce_s(1, 3, 1, 1),
        lambda: f.bubble_over_ideal(4, 6, chunks=2),
        lambda: f.activation_bytes(1, 1, 1, 1, checkpointing="some"),
        lambda: f.activation_bytes(1, 1, 1, 1, attention="some"),
        lambda: f.exposed_s([1], [], 0),
        lambda: f.tensor_parallel_sent_bytes(0, 1, 1, 2),
    ],
)
def test_invalid_arguments_are_rejected(call):
    with pytest.raises(ValueError):
        call()
