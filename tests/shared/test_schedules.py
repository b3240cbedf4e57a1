"""The rules of pipeline schedules, and the closed forms of two. test_properties_pipeline.py has bubbles and memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import schedules, widgets
from shared.data import published_schedules
from shared.plots import pipeline as pipeline_plots
from shared.schedules import Action
from solutions.pipeline_schedules import gpipe, interleaved, one_f_one_b, zero_bubble

NUMBERS = st.integers(1, 9), st.integers(1, 24)


def test_text_becomes_actions_and_text_again():
    text = "F0 F1 B0 B1\nF0.1 B0.1 F1.1 B1.1"
    schedule = schedules.parse(f"\n{text}\n\n")
    assert schedule[1][0] == Action("F", 0, 1) and schedules.write(schedule) == text
    assert (schedules.micro_batches_of(schedule), schedules.chunks_of(schedule)) == (2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 B0\nF0 X", "line 2: 'X' is not an action; write F0, B0 or W0, or F0.1 for chunk 1"),
        ("F0 B0\nF1 B1", "stage 0 never runs B1"),
        ("F0 F0 B0", "stage 0 runs F0 more than once"),
        ("F0 B0\nB0 F0", "stage 1 runs B0 before F0"),
        ("F0 W0 B0", "stage 0 runs W0 before B0"),
        (
            "F0 B0 F1 B1\nF0 F1 B0 B1",
            "deadlock: stage 0 waits to run B0 until stage 1 has run B0, but stage 1 is itself waiting to run F1",
        ),
        ("F0 F1 B0 B1\nF1 F0 B0 B1", "stage 1 receives the output of F1 where stage 0 sends the output of F0"),
        ("F0 F1 B0 B1\nF0 F1 B1 B0", "stage 0 receives the gradient of B0 where stage 1 sends the gradient of B1"),
        ("", "a schedule needs at least one stage with one action"),
    ],
)
def test_a_schedule_that_cannot_work_is_explained_in_one_sentence(text, message):
    with pytest.raises(ValueError) as error:
        schedules.check_schedule(schedules.parse(text))
    assert str(error.value) == message


def test_an_action_of_a_micro_batch_before_the_first_is_explained():
    actions = [Action("F", 0), Action("B", 0), Action("W", -1), Action("W", 0)]
    with pytest.raises(ValueError, match="stage 0 runs W-1, but the schedule has F, B, W of micro-batches 0 to 0, and"):
        schedules.check_schedule([actions])


@given(*NUMBERS)
def test_postponed_weights_leave_a_third_of_the_bubble(stages, micro_batches):
    schedule = zero_bubble(stages, micro_batches)
    schedules.check_schedule(schedule)
    assert max(schedules.most_in_flight(actions) for actions in schedule) == min(stages, micro_batches)
    if micro_batches >= stages:
        simulated = schedules.simulate(schedule, forward=1, backward=2, weights=1)
        assert simulated.total - simulated.ideal == pytest.approx(stages - 1)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_the_closed_forms_give_the_same_orders(stages, sets, chunks):
    micro_batches = stages * sets
    assert published_schedules.interleaved(stages, micro_batches, chunks) == interleaved(stages, micro_batches, chunks)


@given(*NUMBERS)
def test_the_closed_form_of_zero_bubble_gives_the_same_order(stages, micro_batches):
    assert published_schedules.zero_bubble(stages, micro_batches) == zero_bubble(stages, micro_batches)


def test_the_texts_are_those_of_the_closed_forms():
    assert schedules.parse(published_schedules.INTERLEAVED) == published_schedules.interleaved(4, 8, 2)
    assert schedules.parse(published_schedules.ZERO_BUBBLE) == published_schedules.zero_bubble(4, 8)


def test_too_few_micro_batches_for_the_closed_form_are_rejected():
    with pytest.raises(ValueError, match="the number of micro-batches must be a multiple of 4, got 6"):
        published_schedules.interleaved(4, 6, 2)


# -- the figure that a dropdown changes

BUILDERS = {
    "GPipe": lambda p, m, v: gpipe(p, m),
    "1F1B": lambda p, m, v: one_f_one_b(p, m),
    "interleaved": published_schedules.interleaved,
    "zero bubble": lambda p, m, v: published_schedules.zero_bubble(p, m),
}


@pytest.mark.parametrize(
    ("name", "bubble", "messages", "activations"),
    [
        ("GPipe", "27.3% of the total time, 37.5%", 48, "8, 8, 8, 8"),
        ("1F1B", "27.3% of the total time, 37.5%", 48, "4, 3, 2, 1"),
        ("interleaved", "15.8% of the total time, 18.8%", 112, "5.5, 4.5, 3.5, 2.5"),
        ("zero bubble", "11.1% of the total time, 12.5%", 48, "4, 4, 4, 4"),
    ],
)
def test_the_figure_of_a_choice_says_its_bubble_messages_and_activations(name, bubble, messages, activations):
    text = widgets.schedule_chooser(BUILDERS, name)._supxlabel.get_text()
    assert f"Bubble: {bubble} of the ideal time. Messages: {messages} per step." in text
    assert f"Activations at the peak: {activations} (" in text


def test_dropdowns_choose_a_schedule_and_say_why_one_does_not_exist(displayed, request):
    figure = widgets.schedule_chooser(BUILDERS, "1F1B")
    assert displayed == []
    request.getfixturevalue("with_a_reader")
    widgets.schedule_chooser(BUILDERS, "1F1B")
    [box] = displayed
    dropdowns, picture = {dropdown.description: dropdown for dropdown in box.children[0].children}, box.children[1]
    assert list(dropdowns) == ["schedule", "stages", "micro-batches", "chunks"]
    assert dropdowns["schedule"].options == tuple(BUILDERS) and picture.value == widgets.as_png(figure)
    dropdowns["schedule"].value, dropdowns["micro-batches"].value = "interleaved", 6
    why = "the number of micro-batches must be a multiple of 4, got 6"
    assert picture.value == widgets.as_png(pipeline_plots.impossible("interleaved", why))
    with pytest.raises(ValueError, match="stages must be one of 1, 2, 3, 4, 6, 8, got 5"):
        widgets.schedule_chooser(BUILDERS, "1F1B", stages=5)
