"""The course works in JupyterLab and headless Chromium, beginning with `make lab`.

Screenshots are saved in build/screenshots/. Without Chromium, the tests are skipped; in CI, or with
COURSE_BROWSER=required, they fail.
"""

import os
import re
import time

import nbformat
import pytest
from playwright.sync_api import Locator, expect

from instructor import folding
from shared.deadlines import scaled
from tests import browser, lab_server
from tests.browser import FIRST_LESSON, Course, Lab
from tests.contrasts import ENOUGH_FOR_A_SIGN, READABLE, contrasts_in

pytestmark = pytest.mark.slow

LAB = "labs/00_ranks_lab.ipynb"
NO_BROWSER = "Chromium is missing: run `apt-get install chromium`, then run this again"


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    path = browser.find_browser()
    if path is None:
        required = os.environ.get("CI") or os.environ.get("COURSE_BROWSER") == "required"
        (pytest.fail if required else pytest.skip)(NO_BROWSER)
    folder = lab_server.copy_course(tmp_path_factory.mktemp("course"))
    home = tmp_path_factory.mktemp("home")
    with lab_server.nothing_left() as mark:
        environment = lab_server.newcomers_environment(folder, home, mark)
        with lab_server.make_lab(folder, environment, home / "server.log") as address:
            with browser.browser(path, home / "profile", mark) as context:
                yield Course(folder, address, context)


@pytest.fixture(autouse=True)
def no_console_errors(course):
    """Fail each test after which a page has errors in its console."""
    yield
    messages = [message for errors in course.errors for message in errors]
    for errors in course.errors:
        errors.clear()
    assert messages == []


@pytest.fixture(scope="module")
def lab(course) -> Lab:
    """Open lab 00 and start its ranks."""
    lab = course.open(LAB)
    lab.run(lab.cell("ranks.start("))
    lab.run(lab.cell('"""First collectives'))
    return lab


def solution(piece: str) -> str:
    """Return the source of the cell in the solution that defines a piece."""
    cells = nbformat.read(lab_server.ROOT / "solutions" / "00_ranks_solution.ipynb", as_version=4).cells
    (found,) = [cell.source for cell in cells if f"def {piece}(" in cell.source and cell.cell_type == "code"]
    return found


def solve_the_first_exercise(lab: Lab) -> Locator:
    """Write and run the solution, and return the cell of its check after it has run."""
    exercise = lab.cell("def sum_over_ranks(")
    lab.write(exercise, solution("sum_over_ranks"))
    lab.run(exercise)
    return lab.run(lab.cell("check.sum_over_ranks()"))


def output(cell: Locator) -> Locator:
    return cell.locator(".jp-OutputArea-output")


# -- the first five minutes


def test_make_lab_opens_the_start_page_which_leads_to_the_first_lesson(course):
    page = course.new_page()
    page.goto(course.address)
    shown = page.locator(".jp-MarkdownViewer")
    assert shown.locator("h1").inner_text() == "Distributed training, built by hand"
    browser.SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=browser.SCREENSHOTS / "start.png")
    rendered = shown.locator(".jp-RenderedMarkdown")
    assert rendered.evaluate("element => element.scrollWidth <= element.clientWidth"), "the page scrolls sideways"
    listed = page.locator(".jp-DirListing-itemText").all_inner_texts()
    assert sorted(listed) == ["LICENSE", "README.md", "START_HERE.md", "chapters", "docs", "labs", "solutions"]
    assert page.get_by_title("IPython Parallel").count() == 0  # a panel for clusters that the course does not use
    shown.get_by_role("link", name="00 · Ranks").click()
    title = page.locator(".jp-NotebookPanel h1").first
    title.wait_for()
    assert title.inner_text().startswith("00 · Ranks")
    page.close()  # Two windows on one kernel cause errors in JupyterLab's widgets.


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["chapters/06_memory_wall.ipynb", "labs/06_memory_wall_lab.ipynb"])
def test_opening_and_saving_a_notebook_changes_nothing_in_it(course, name):
    notebook = course.open(name)
    before = notebook.file.read_bytes()
    notebook.scroll_through()
    assert not notebook.has_unsaved_changes()
    notebook.save()
    assert notebook.file.read_bytes() == before


@pytest.mark.exhaustive
def test_a_folded_answer_is_not_on_the_screen(course):
    lesson = course.open(FIRST_LESSON)
    cell = lesson.cell('print(f"rank 2 holds')
    cell.scroll_into_view_if_needed()
    expect(cell.locator(".jp-Cell-outputWrapper")).to_have_text(folding.COVER, timeout=scaled(10) * 1000)


@pytest.mark.exhaustive
def test_the_text_that_answers_a_prediction_opens_when_the_result_is_there(course):
    lesson = course.open(FIRST_LESSON)
    answer = lesson.page.locator("details.answer").first
    answer.scroll_into_view_if_needed()
    expect(answer.locator("summary")).to_be_visible()
    for text in ("ranks.start(", "total = torch.tensor([rank + 1.0]", 'print(f"rank 2 holds'):
        lesson.run(lesson.cell(text))
    expect(answer.locator("summary")).to_be_hidden()
    expect(answer.get_by_text("Every rank has the sum")).to_be_visible()
    assert answer.evaluate("each => each.innerText").startswith("Every rank has the sum")


@pytest.mark.exhaustive
def test_no_dialogs_or_notifications_appear(course):
    """JupyterLab does not ask about news, and does not suggest updates of pinned packages or a grader's menus."""
    page = course.open(FIRST_LESSON).page
    page.wait_for_timeout(2000)  # JupyterLab asks a second after it has started.
    assert page.locator(".jp-Dialog").count() == 0
    assert page.locator(".Toastify__toast").all_inner_texts() == []
    assert "Nbgrader" not in page.locator(".lm-MenuBar-itemLabel").all_inner_texts()


@pytest.mark.exhaustive
def test_the_first_lesson_runs_to_its_end(course):
    lesson = course.open(FIRST_LESSON)
    lesson.clear_outputs()
    lesson.choose("Run", "Run All Cells")
    prompts = lesson.page.locator(".jp-CodeCell .jp-InputPrompt")
    busy_at = time.monotonic()

    def ended() -> bool:  # After an unexpected failure, the remaining cells get no number.
        nonlocal busy_at
        numbers = [text.strip("[]: ") for text in prompts.all_text_contents()]
        if "*" in numbers or not lesson.is_idle():
            busy_at = time.monotonic()
        return all(number.isdigit() for number in numbers) or time.monotonic() > busy_at + scaled(5)

    lesson.wait_until("lesson 00 had run", ended, deadline_s=scaled(180))
    lesson.screenshot("lesson_00", whole=True)
    lesson.save()
    cells = [cell for cell in nbformat.read(lesson.file, as_version=4).cells if cell.cell_type == "code"]
    first = cells[0].execution_count  # not 1, if another test has used this kernel
    assert [cell.execution_count for cell in cells] == list(range(first, first + len(cells)))
    for cell in cells:
        errors = [f"{error.ename}: {error.evalue}" for error in cell.outputs if error.output_type == "error"]
        expected = "raises-exception" in cell.metadata.get("tags", [])
        assert bool(errors) == expected, f"{cell.source}\n{errors}"


# -- the lab


@pytest.mark.exhaustive
def test_long_lines_of_code_wrap(lab):
    code = lab.cell("def sum_over_ranks(").locator(".cm-content")
    assert "cm-lineWrapping" in code.get_attribute("class")


def test_a_wrong_answer_gets_a_hint_and_a_right_one_check_marks(lab):
    exercise, check = lab.cell("def sum_over_ranks("), lab.cell("check.sum_over_ranks()")
    wrong = solution("sum_over_ranks").replace(", dtype=torch.float64", "")
    assert wrong != solution("sum_over_ranks")
    lab.write(exercise, wrong)
    lab.run(exercise)
    shown = output(lab.run(check))
    assert (
        "✗" in shown.first.inner_text() and "Hint: which dtype does torch.tensor(0.1) have?" in shown.first.inner_text()
    )
    assert "not there yet" in shown.last.inner_text()
    lab.screenshot("lab_00_wrong")

    shown = output(solve_the_first_exercise(lab))
    assert shown.count() == 1
    signs = shown.locator("td:first-child").all_inner_texts()
    assert signs == ["✓"] * len(signs) and signs
    lab.screenshot("lab_00_right")


def test_a_cell_that_hangs_is_explained_and_the_next_one_runs(lab):
    hanging = lab.run(lab.cell("def log_loss("))
    *shown, report = output(hanging).all_inner_texts()
    assert re.search(r"Rank 0 waits in all_reduce .* for ranks 1–3\.", report)
    assert "A new process group is ready" in report
    assert "last call" in " ".join(shown) and "last call" not in report  # the table stands there once
    lab.screenshot("lab_00_hang")
    after = lab.cell("def log_mean_loss(")
    lab.write(after, '%%ranks\nprint("continuing")')
    assert output(lab.run(after)).inner_text().strip() == "ranks 0–3 │ continuing"


def choose_theme(lab: Lab, theme: str) -> None:
    lab.choose("Settings", "Theme", theme)
    light = str("Light" in theme).lower()
    body = lab.page.locator("body")
    lab.wait_until(f"the theme was {theme}", lambda: body.get_attribute("data-jp-theme-light") == light)


@pytest.mark.exhaustive
@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_outputs_are_readable_in_both_themes(lab, theme):
    choose_theme(lab, theme)
    passed = solve_the_first_exercise(lab)
    lab.run(lab.cell("def broadcast_by_hand("))
    unwritten = lab.run(lab.cell("check.broadcast_by_hand()"))
    lab.write(lab.cell("def global_mean("), "%%ranks\ndef global_mean(values):\n    return values.mean()")
    lab.run(lab.cell("def global_mean("))
    failed = lab.run(lab.cell("check.global_mean()"))
    lab.screenshot(f"lab_00_{theme.split()[1].lower()}", whole=True)
    contrasts = [
        pair for cell in (passed, failed, unwritten) for pair in contrasts_in(cell.locator(".jp-OutputArea").first)
    ]
    texts = [text for _, text in contrasts]
    assert "✓" in texts and "✗" in texts and any("it is not written yet" in text for text in texts)
    for contrast, text in contrasts:
        assert contrast > (ENOUGH_FOR_A_SIGN if text in "✓✗–" else READABLE), f"{text!r}: {contrast:.1f}"


@pytest.mark.exhaustive
def test_figures_are_dark_in_the_dark_theme(course):
    lesson = course.open(FIRST_LESSON)
    lesson.scroll_through()
    figure = lesson.cell("diagrams.processes()").locator(".jp-OutputArea-output img")
    for theme, is_dark in {"JupyterLab Dark": True, "JupyterLab Light": False}.items():
        choose_theme(lesson, theme)
        figure.scroll_into_view_if_needed()
        assert ("invert" in figure.evaluate("image => getComputedStyle(image).filter")) == is_dark
        lesson.screenshot(f"figure_{theme.split()[1].lower()}")
    lesson.page.close()  # Two windows on one kernel cause errors in JupyterLab's widgets.


def test_the_first_page_shows_progress_and_links_to_the_lab(course, lab):
    solve_the_first_exercise(lab)
    lesson = course.open(FIRST_LESSON)
    lesson.clear_outputs()
    page = output(lesson.run(lesson.cell("progress.show()")))
    row = page.locator("tr", has_text="Lab 00").inner_text()
    assert "✓ sum_over_ranks" in row and "1 of 5" in row and "2 of 15" in row
    lesson.screenshot("progress")
    assert (course.folder / "progress.jsonl").exists(), "progress is recorded in the course's own folder"
    lab.page.close()  # Two windows on one kernel cause errors in JupyterLab's widgets. No later test needs this one.
    page.locator("a", has_text=LAB).first.click()
    tab = lesson.page.locator("#jp-main-dock-panel .lm-TabBar-tab.jp-mod-current")
    lesson.wait_until("the link had opened the lab", lambda: LAB in (tab.get_attribute("title") or ""))


# -- widgets


def digest_of(picture: Locator) -> str:
    """Return a digest of the image that a widget shows."""
    return picture.evaluate(
        """async image => {
            const bytes = new Uint8Array(await (await fetch(image.src)).arrayBuffer());
            const digest = await crypto.subtle.digest('SHA-256', bytes);
            return image.naturalWidth + ' ' + Array.from(new Uint8Array(digest)).join(' ');
        }"""
    )


@pytest.mark.exhaustive
def test_the_stepper_reacts_to_clicks_keys_and_play(course):
    lesson = course.open("chapters/01_collectives.ipynb")
    lesson.clear_outputs()
    stepper = lesson.cell("widgets.ring_stepper(")
    stepper.locator(".cm-content").click()
    lesson.choose("Run", "Run All Above Selected Cell")
    lesson.run(stepper)
    widget = stepper.locator(".jupyter-widgets.widget-vbox")
    picture, readout = widget.locator("img"), widget.locator(".widget-readout")
    pictures = {readout.inner_text(): digest_of(picture)}

    def wait_for_step(step: str) -> None:
        def is_shown() -> bool:
            return readout.inner_text() == step and digest_of(picture) not in set(pictures.values())

        lesson.wait_until(f"the stepper showed step {step}", is_shown)
        pictures[step] = digest_of(picture)

    widget.locator(".noUi-handle").press("ArrowRight")
    wait_for_step("1")
    widget.evaluate("element => element.scrollIntoView()")
    lesson.screenshot("stepper")
    widget.locator(".noUi-target").click()  # A click in the middle.
    wait_for_step("2")
    widget.locator(".jupyter-widget-play, .widget-play").locator("button").first.click()
    wait_for_step("3")
    assert list(pictures) == ["0", "1", "2", "3"]


@pytest.mark.exhaustive
def test_the_planner_reacts_to_a_choice_and_a_key(course):
    lesson = course.open("chapters/06_memory_wall.ipynb")
    lesson.clear_outputs()
    lesson.run(lesson.cell("from shared.plots import memory_plan"))
    lesson.run(lesson.cell("widgets.memory_planner(", before=1))  # the prediction
    cell = lesson.run(lesson.cell("widgets.memory_planner("))
    widget = cell.locator(".jupyter-widgets.widget-vbox")
    picture, model = widget.locator("img"), widget.locator("select").first
    pictures = [digest_of(picture)]

    def wait_for_new_picture(cause: str) -> None:
        lesson.wait_until(f"the planner's figure followed {cause}", lambda: digest_of(picture) not in pictures)
        pictures.append(digest_of(picture))

    widget.evaluate("element => element.scrollIntoView()")
    lesson.screenshot("planner")
    assert cell.locator(".jp-RenderedImage:visible").count() == 0  # the figure that the file keeps
    model.select_option(index=0)
    wait_for_new_picture("the model chosen")
    ranks = widget.locator("select").nth(1)
    before = ranks.input_value()
    ranks.press("6")  # JupyterLab handles the arrow keys itself.
    wait_for_new_picture("a key")
    assert (before, ranks.input_value()) == ("8", "64")


@pytest.mark.exhaustive
def test_a_cell_that_was_left_says_so_when_the_notebook_is_opened_again(course):
    left = course.open("labs/01_collectives_lab.ipynb")
    first, second = left.page.locator(".jp-CodeCell").nth(0), left.page.locator(".jp-CodeCell").nth(1)
    left.write(first, "from shared import ranks\nranks.start(world_size=2)")
    left.run(first)
    left.write(second, "%%ranks\nimport time\ntime.sleep(15)")
    second.locator(".cm-content").click()
    left.page.keyboard.press("Shift+Enter")
    line = second.locator(".jp-OutputArea-output", has_text="running")
    line.wait_for()
    assert not line.locator(".course-no-news").is_visible()
    left.save()
    left.page.close()
    opened = course.open("labs/01_collectives_lab.ipynb").page.locator(".course-no-news")
    expect(opened).to_be_visible(timeout=scaled(30) * 1000)
