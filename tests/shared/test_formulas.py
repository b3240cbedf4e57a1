"""The formulas give the published values, and reject invalid arguments. test_properties_formulas.py has the others."""

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


def test_bytes_per_parameter():
    kinds = (f.MIXED_ADAM, f.MIXED_ADAM_FP32_GRADIENTS, f.FP32_ADAM)
    assert [each.total for each in kinds] == [16, 20, 16]


def test_zero3_peaks_above_its_shards():
    units = [10.0, 40.0, 20.0]
    assert f.zero3_parameter_peak_bytes(units, 2, bytes_each=1) == 35 + 40
    assert f.zero3_parameter_peak_bytes(units, 2, bytes_each=1, prefetch=1) == 35 + 60


def test_times_agree_if_algorithms_coincide():
    """On two ranks a ring and halving-doubling are the same; α alone favors the tree, and β alone the ring."""
    assert f.ring_all_reduce_s(1e6, 2, 1e-3, 1e-9) == pytest.approx(f.halving_doubling_all_reduce_s(1e6, 2, 1e-3, 1e-9))
    assert f.tree_all_reduce_s(0, 64, 1, 0) == 12 < f.ring_all_reduce_s(0, 64, 1, 0) == 126
    assert f.ring_all_reduce_s(1, 64, 0, 1) == 2 * 63 / 64 < f.tree_all_reduce_s(1, 64, 0, 1)
    assert f.ring_all_reduce_s(1e6, 1, 1e-3, 1e-9) == 0


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
