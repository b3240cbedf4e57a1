"""The site has all pages, they work in a browser without a network, and predictions are not spoiled.

The site is built once. Screenshots are saved in build/screenshots/site_*.png.
"""

import io
import json
import os
import time

import nbformat
import pytest

from instructor import answers, build, contents, folding, glossary
from instructor.site import addresses, command, figures, notebooks, sources
from shared.deadlines import scaled
from tests import browser, lab_server, site_pages
from tests.shared.test_widgets import ring_logs
from tests.site_pages import Site

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

CHAPTERS = [chapter.name for chapter in build.chapters() if not chapter.is_draft]
NUMBERS = [name[:2] for name in CHAPTERS]  # not the names, so that a chapter's own tests build no site
REPOSITORY = addresses.Repository("https://github.com/somebody/a-course")
UNKNOWN = addresses.Repository("https://github.com/OWNER/a-course")
START, LESSON, LAB = "index.html", "chapters/01_collectives.html", "labs/02_manual_ddp_lab.html"
PLANNER, GLOSSARY = "chapters/06_memory_wall.html", "chapters/glossary.html"
MISSING = "the site's packages are missing: install the extra `site` of pyproject.toml"
BUILD_S = 90


def page_of(kind: str, chapter: str) -> str:
    return contents.notebook(kind, chapter).replace(".ipynb", ".html")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Site, str, float]:
    """Build the site. Returns it, the warnings, and the seconds of processor time that it took."""
    if command.missing():
        pytest.skip(f"{MISSING} ({', '.join(command.missing())})")
    folder, warnings = tmp_path_factory.mktemp("built") / "site", io.StringIO()
    began_s = time.process_time()
    status = command.build(folder, REPOSITORY, warnings)
    assert status == 0, warnings.getvalue()
    return Site(folder), warnings.getvalue(), time.process_time() - began_s


@pytest.fixture(scope="module")
def site(built) -> Site:
    return built[0]


# -- the files


def test_the_site_is_built_without_warnings_and_soon(built):
    _, warnings, took_s = built
    assert warnings == ""
    assert took_s < BUILD_S


def test_every_notebook_and_page_is_there(site):
    expected = {page_of(kind, name) for kind in sources.KINDS for name in CHAPTERS}
    expected |= {START, GLOSSARY, "search.html", *(page.replace(".md", ".html") for page in sources.DOCS)}
    assert set(site.pages) == expected


def test_no_link_is_broken(site):
    assert site.broken_links() == []


def test_pages_load_nothing_from_the_network(site):
    """Addresses may only be followed by somebody who clicks them."""
    for page, soup in site.pages.items():
        loaded = [*soup.select("[src]"), *soup.select("link[href]")]
        targets = [element.get("src") or element["href"] for element in loaded]
        assert [target for target in targets if "//" in target] == [], page


def test_previous_and_next_lead_through_lessons_and_labs(site):
    page, visited = START, []
    while link := site.pages[page].select_one("a.right-next"):
        before, page = page, os.path.normpath(os.path.join(os.path.dirname(page), link["href"]))
        back = site.pages[page].select_one("a.left-prev")["href"]
        assert os.path.normpath(os.path.join(os.path.dirname(page), back)) == before
        visited.append(page)
    assert visited[: 2 * len(CHAPTERS)] == [page_of(kind, name) for name in CHAPTERS for kind in ("chapters", "labs")]
    assert visited[2 * len(CHAPTERS)] == GLOSSARY


@pytest.mark.parametrize("name", CHAPTERS, ids=NUMBERS)
def test_outputs_that_answer_a_prediction_are_folded(site, name):
    notebook = nbformat.read(build.ROOT / contents.notebook("chapters", name), as_version=4)
    hidden = zip(notebook.cells, folding.folded(notebook), strict=True)
    expected = [cell.id for cell, is_folded in hidden if is_folded and cell.outputs]
    folds = site.article(page_of("chapters", name)).select("details.fold")
    predictions = [fold for fold in folds if fold.summary.get_text() == notebooks.PREDICT_FIRST]
    assert len(predictions) == len(expected) > 0
    assert not [fold for fold in folds if fold.has_attr("open")]
    assert all(fold.select(".cell_output") for fold in predictions)


@pytest.mark.parametrize("name", CHAPTERS, ids=NUMBERS)
def test_texts_that_answer_a_prediction_are_folded_and_assertions_are_left_out(site, name):
    article, notebook = site.article(page_of("chapters", name)), build.lesson_of(build.Chapter(name))
    hidden = [cell for cell in notebook.cells if '<details class="answer">' in cell.source]
    assert len(article.select("details.answer:not(.fold)")) == len(hidden) > 0
    assert answers.COVER not in article.get_text()


@pytest.mark.parametrize("name", CHAPTERS, ids=NUMBERS)
def test_a_solution_is_behind_a_click_in_its_lab(site, name):
    solution = page_of("solutions", name)
    for page, of_page in site.links.items():
        links = [link for link in of_page if link["href"].endswith(solution) and page != solution]
        assert len(links) == (page == page_of("labs", name)), page
        assert all(link.find_parent("details") and not link.find_parent("nav") for link in links)
    assert "Solution" in site.article(solution).h1.get_text()


def test_figures_have_alternative_texts(site):
    for page, soup in site.pages.items():
        texts = [image.get("alt", "") for image in soup.select("article img")]
        assert not [text for text in texts if len(text) < 20 or ".png" in text], page


def test_every_term_and_heading_has_a_link(site):
    names = {f"{term.name} ({term.kind})" if term.kind else term.name for term in glossary.glossary(build.chapters())}
    terms = site.article(GLOSSARY).select("dl.glossary > dt[id]")
    assert {term.get_text().removesuffix("#").replace("`", "") for term in terms} == {
        name.replace("`", "") for name in names
    }
    for page in (START, LESSON, LAB):
        headings = site.article(page).select("h1, h2, h3")
        assert headings and all(heading.select("a.headerlink") for heading in headings)


def test_links_of_a_page_lead_to_colab_the_notebook_and_its_source(site):
    row = {link.get_text(): link["href"] for link in site.article(LESSON).select(".page-links a")}
    path = "chapters/01_collectives.ipynb"
    assert row == {
        "Lab 01": "../labs/01_collectives_lab.html",
        "Open in Colab": f"https://colab.research.google.com/github/somebody/a-course/blob/gh-pages/colab/{path}",
        "Download notebook": f"../notebooks/{path}",
        "Edit this page": "https://github.com/somebody/a-course/edit/main/source/01_collectives/lesson.py",
    }
    assert (site.folder / "notebooks" / path).read_bytes() == (build.ROOT / path).read_bytes()
    assert "git clone" in (site.folder / "colab" / path).read_text() and (site.folder / ".nojekyll").exists()
    assert addresses.PAGES_BRANCH in (build.ROOT / ".github" / "workflows" / "site.yml").read_text()


def test_without_a_public_address_nothing_links_to_it():
    page = notebooks.Page("chapters", "01_collectives", lambda path: True, UNKNOWN)
    assert "OWNER" not in nbformat.writes(page.source())
    link = "See [the policy](../instructor/grade/policy.py) and [the README](../README.md#chapters)."
    assert notebooks.resolved(link, "docs/teaching.md", {"index.md"}.__contains__, UNKNOWN) == (
        "See the policy and [the README](../index.md#chapters)."
    )
    known = notebooks.resolved(link, "docs/teaching.md", {"index.md"}.__contains__, REPOSITORY)
    assert "[the policy](https://github.com/somebody/a-course/blob/main/instructor/grade/policy.py)" in known
    assert "git clone" not in sources.start(build.chapters(), UNKNOWN)


def test_frames_are_those_that_pages_ask_for(site):
    for name in figures.OFFERED:
        widget = figures.offered(name)
        if isinstance(widget, figures.Choices):
            files = {path.stem for path in (site.folder / figures.FOLDER / widget.name).glob("*.png")}
            assert files == {frame for frame, _ in widget.frames()}
    for output in site.pages[LESSON].select(".output:has(.course-widget)"):
        assert output.find_next_sibling("img"), "without scripts, a page shows the stored figure"
    lessons = [chapter.read("lesson") for chapter in build.chapters()]
    used = {figures.used_in(cell.source) for lesson in lessons for cell in lesson.cells} - {""}
    assert set(figures.OFFERED) <= used <= set(figures.widget_names())


def test_the_ring_on_the_page_is_the_one_of_the_lesson():
    assert figures.ring_logs(4) == ring_logs(4)


# -- in a browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    path = browser.find_browser()
    if path is None:
        required = os.environ.get("CI") or os.environ.get("COURSE_BROWSER") == "required"
        (pytest.fail if required else pytest.skip)("Chromium is missing: run `apt-get install chromium`")
    with lab_server.nothing_left() as mark, browser.browser(path, tmp_path_factory.mktemp("profile"), mark) as context:
        yield context


@pytest.fixture(scope="module")
def address(site):
    with site_pages.served(site.folder) as address:
        yield address


@pytest.fixture
def page(chromium, address):
    """An empty page. After the test, it must not have asked for another address, and must not have had errors."""
    page = chromium.new_page()
    page.set_viewport_size({"width": 1280, "height": 900})
    errors, asked = browser.listen(page), []
    page.on("request", lambda request: asked.append(request.url))
    yield page
    page.close()
    assert errors == []
    assert [url for url in asked if not url.startswith((address, "data:", "file:", "blob:"))] == []


def screenshot(page, name: str) -> None:
    browser.SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=browser.SCREENSHOTS / f"site_{name}.png")


def choose_theme(page, theme: str) -> None:
    page.locator("button.theme-switch-button:visible").click()
    page.locator(f'button.theme-change-button[data-mode="{theme}"]:visible').click()
    page.wait_for_function(f"document.documentElement.dataset.theme === '{theme}'")
    page.wait_for_function("document.getAnimations().every(each => each.playState !== 'running')")  # colors are fading


def test_search_finds_a_word(page, address):
    page.goto(address + START)
    page.keyboard.press("Control+k")
    page.keyboard.type("straggler")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html?q=straggler*")
    results = page.locator("#search-results li a")
    results.first.wait_for()
    page.get_by_text("Search finished").wait_for()
    assert {"Glossary", "05 · Scaling"} <= {text.strip() for text in results.all_inner_texts()}
    screenshot(page, "search")


def test_the_dark_theme_can_be_chosen_and_figures_follow(page, address):
    page.goto(address + LESSON)
    figure = page.locator(".cell_output img").first
    for theme in ("dark", "light"):
        choose_theme(page, theme)
        inverted = "invert" in figure.evaluate("image => getComputedStyle(image).filter")
        assert inverted == (theme == "dark")
        screenshot(page, theme)


def test_no_page_scrolls_sideways_on_a_phone(page, address, site):
    page.set_viewport_size({"width": 390, "height": 844})
    wide = []
    for name in (name for name in site.pages if not name.startswith("solutions/")):
        page.goto(address + name)
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        if page.evaluate("document.documentElement.scrollWidth") > 390:
            wide.append(name)
    assert wide == []
    page.goto(address + LESSON)
    screenshot(page, "phone")


@pytest.mark.parametrize("name", [START, LESSON, LAB, GLOSSARY])
def test_a_page_reacts_within_three_seconds_without_a_server(page, site, name):
    began_s = time.monotonic()
    page.goto(f"file://{site.folder / name}", wait_until="domcontentloaded")
    page.locator(".search-button__button:visible, .search-button-field:visible").first.click()
    page.locator("input[type=search]:visible").first.wait_for()
    assert time.monotonic() - began_s < scaled(3)


def test_code_can_be_copied(page, address, chromium):
    chromium.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(address + LESSON)
    page.locator("div.cell_input").first.hover()
    page.locator("div.cell_input button.copybtn").first.click()
    page.wait_for_function("navigator.clipboard.readText().then(text => text.includes('ranks.start'))")


# For each answer, whether it is open, and whether it stands below the second prediction
ANSWERS = """answers => {
  const isPrediction = (found) => found.textContent === "Predict.";
  const second = [...document.querySelectorAll("p > strong")].filter(isPrediction)[1];
  return answers.map((found) => [found.open, second.compareDocumentPosition(found) === 4]);
}"""


def test_opening_an_answer_opens_what_belongs_to_it_and_no_other(page, address):
    page.goto(address + LESSON)
    found = page.locator("details.answer")
    assert not any(is_open for is_open, _ in found.evaluate_all(ANSWERS))
    found.first.locator("summary").first.click()
    page.wait_for_function("document.querySelectorAll('details.answer[open]').length > 1")
    assert all(is_open != is_later for is_open, is_later in found.evaluate_all(ANSWERS))
    screenshot(page, "answer")


def test_the_ring_can_be_stepped_through(page, address):
    page.goto(address + LESSON)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    widget = page.locator(".course-widget")
    image, text = widget.locator("img"), widget.locator("output")
    assert text.inner_text() == "step 0 of 4" and image.get_attribute("src").endswith("/ring/0.png")
    widget.get_by_role("button", name="Next").click()
    assert text.inner_text() == "step 1 of 4" and image.get_attribute("src").endswith("/ring/1.png")
    widget.locator("input[type=range]").press("End")
    assert text.inner_text() == "step 4 of 4"
    widget.get_by_role("button", name="Play").click()
    page.wait_for_function("document.querySelector('.course-widget output').textContent === 'step 1 of 4'")
    stored = page.locator(".cell_output:has(.course-widget) > img")
    assert stored.count() == 1 and not stored.is_visible()


def test_the_planner_computes_what_the_course_does(page, address):
    from shared import planner
    from shared.planner.shapes import SHAPES

    page.goto(address + PLANNER)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    widget = page.locator(".course-widget")
    choice = {"model": "Llama-3 70B", "ranks": "64", "micro-batch": "2", "checkpointing": "selective"}
    for label, value in choice.items():
        widget.get_by_label(label).select_option(value)
    how = {"micro_batch": 2, "checkpointing": "selective", "attention": "fused"}
    for stage, name in planner.STAGES.items():
        total_gb = planner.plan(SHAPES["Llama-3 70B"], ranks=64, stage=stage, **how).total_bytes / 1e9
        label = widget.locator(".planner-bar").nth(stage).get_attribute("aria-label")
        shown_gb = float(label.removeprefix(f"{name}: ").split(" GB")[0].replace(",", ""))
        assert shown_gb == pytest.approx(total_gb, rel=0.01)
    screenshot(page, "planner")


def test_a_schedule_can_be_chosen(page, address):
    page.goto(address + "chapters/15_pipeline_parallel.html")
    widget = page.locator(".course-widget")
    widget.get_by_label("schedule").select_option("GPipe")
    widget.get_by_label("micro-batches").select_option("32")
    image = widget.locator("img")
    assert image.get_attribute("alt") == "Figure for schedule: GPipe, micro-batches: 32"
    page.wait_for_function("document.querySelector('.course-widget img').naturalWidth > 0")
    data = json.loads(widget.locator("script").text_content())
    assert image.get_attribute("src") == f"../frames/schedules/0-{data['options']['micro-batches'].index('32')}.png"


def test_axe_finds_no_serious_barriers(page, address):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason=MISSING).Axe()
    found = []
    for name in (START, PLANNER, LAB, GLOSSARY, "search.html?q=ring"):
        page.goto(address + name)
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        # Only colors differ between the themes, and looking for everything on a long page takes seconds.
        for theme, only in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
            choose_theme(page, theme)
            violations = axe.run(page, options={"preload": False} | only).response["violations"]
            serious = [each for each in violations if each["impact"] in ("serious", "critical")]
            found += [(name, theme, each["id"], each["nodes"][0]["html"]) for each in serious]
    assert found == []
