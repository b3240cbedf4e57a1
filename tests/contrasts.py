"""How well text stands out from what is behind it, in a page that a browser shows."""

from playwright.sync_api import Locator

READABLE, ENOUGH_FOR_A_SIGN = 4.5, 3.0  # what WCAG 2.2 asks of text, and of pictograms

_CONTRASTS = """
element => {
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const [red, green, blue, alpha = 1] = parts(getComputedStyle(node).backgroundColor);
      if (alpha > 0.5) return [red, green, blue];
    }
    return [255, 255, 255];
  };
  const light = colour => {
    const linear = part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const [red, green, blue] = colour.map(part => linear(part / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const found = [];
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.textContent.trim()) continue;
    const colours = [parts(getComputedStyle(node.parentElement).color).slice(0, 3), behind(node.parentElement)];
    const [low, high] = colours.map(light).sort((a, b) => a - b);
    found.push([(high + 0.05) / (low + 0.05), node.textContent.trim()]);
  }
  return found;
}
"""


def contrasts_in(element: Locator) -> list[tuple[float, str]]:
    """→ of each piece of text in an element: its contrast by WCAG 2.2 (1 for none, 21 at most), and itself"""
    return [(contrast, text) for contrast, text in element.evaluate(_CONTRASTS)]
