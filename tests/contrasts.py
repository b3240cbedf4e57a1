"""Measure the contrast between text and its background in a page that a browser shows."""

from playwright.sync_api import Locator

READABLE, ENOUGH_FOR_A_SIGN = 4.5, 3.0  # WCAG 2.2 requires these of text and of pictograms.

_CONTRASTS = """
element => {
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  const background = node => {
    for (; node; node = node.parentElement) {
      const [red, green, blue, alpha = 1] = parts(getComputedStyle(node).backgroundColor);
      if (alpha > 0.5) return [red, green, blue];
    }
    return [255, 255, 255];
  };
  const luminance = color => {
    const linear = part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const [red, green, blue] = color.map(part => linear(part / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const found = [];
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.textContent.trim()) continue;
    const colors = [parts(getComputedStyle(node.parentElement).color).slice(0, 3), background(node.parentElement)];
    const [low, high] = colors.map(luminance).sort((a, b) => a - b);
    found.push([(high + 0.05) / (low + 0.05), node.textContent.trim()]);
  }
  return found;
}
"""


def contrasts_in(element: Locator) -> list[tuple[float, str]]:
    """Return, for each piece of text in an element, its contrast by WCAG 2.2 (from 1 to 21) and the text."""
    return [(contrast, text) for contrast, text in element.evaluate(_CONTRASTS)]
