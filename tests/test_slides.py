"""Slides for instructors: every marked cell is on one, they load nothing from the network, and they fit the screen."""

import re

import pytest

from instructor import answers, build, slides
from tests import browser

pytest.importorskip("latex2mathml", reason="only `make slides`, `make site` and all tests need it")
CHAPTERS = [chapter for chapter in build.chapters() if any(slides.marks(chapter))]


def test_the_fast_path_has_slides():
    assert {"00", "01", "02", "04", "07", "09"} <= {chapter.name[:2] for chapter in CHAPTERS}


@pytest.mark.parametrize("chapter", CHAPTERS, ids=str)
def test_slides_have_a_motive_figures_and_a_recap(chapter):
    cells = slides.slides(chapter).cells
    kinds = [cell.metadata["slideshow"]["slide_type"] for cell in cells]
    assert kinds.count("slide") == slides.marks(chapter).count("slide") + 1
    assert "## Recap" in [cell.source for cell in cells] and sum("outputs" in cell for cell in cells) >= 4
    texts = [cell.source for cell, kind in zip(cells, kinds, strict=True) if kind == "-" and "outputs" not in cell]
    assert not any(text.endswith(":") or "$" in text for text in texts)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=str)
def test_texts_on_slides_need_no_click(chapter):
    assert not [cell.source for cell in slides.slides(chapter).cells if answers.SUMMARY in cell.source]


def test_what_fits_on_a_slide():
    text = "One. See the next cell. " + "Many words here. " * 40 + "\n\n**Predict.** No."
    assert slides.shortened(text, 45).startswith("One. Many words") and len(slides.shortened(text, 45).split()) <= 45
    assert slides.shortened("A table:\n\n| a |\n|---|\n\n**Terms**\n\n- x", 100).endswith("|---|")
    assert slides.shortened("[Lab 04](../labs/04.ipynb) uses $x$.", 45).startswith("Lab 04 uses <math")


@pytest.mark.slow
def test_slides_need_no_network_and_fit_the_screen(tmp_path):
    if browser.find_browser() is None or not slides.fetch_reveal(tmp_path):
        pytest.skip("there is no Chromium here, or pip cannot download reveal.js")
    written = [slides.write(chapter, tmp_path) for chapter in CHAPTERS]
    with browser.browser(browser.find_browser(), tmp_path / "profile", "slides") as context:
        for path in written:
            assert not re.search(r'(src|import)[^>]{1,20}"https?:', path.read_text(encoding="utf-8"))
            page = context.new_page()
            page.set_viewport_size({"width": 1280, "height": 720})
            errors = browser.listen(page)
            page.goto(path.as_uri())
            page.wait_for_function("window.Reveal && Reveal.isReady()")
            for number in range(page.evaluate("Reveal.getTotalSlides()")):
                page.evaluate(f"Reveal.slide({number})")
                shown = page.locator("section.present").locator("h1, h2, p, table, img, pre, li").filter(visible=True)
                boxes = [box for box in (each.bounding_box() for each in shown.all()) if box]
                assert max(box["y"] + box["height"] for box in boxes) <= 720, (path.name, number)
                assert max(box["x"] + box["width"] for box in boxes) <= 1280, (path.name, number)
            assert not errors
            page.close()
