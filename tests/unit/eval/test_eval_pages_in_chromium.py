"""The pages in a real browser, wide and on a phone, light and dark: nothing sticks out, loads, complains or is faint.

`SCREENSHOTS=folder` keeps a picture of each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chromium import Browser, find_chromium

from eagle3.wiring import Site, Wiring
from eval.alarm import find_alarms
from eval.matrix.cells import matrix
from eval.matrix.measure import Measured
from eval.matrix.page import matrix_page
from eval.report import render_page
from eval.results import AcceptResult
from eval.training import Training

LOOKS = [(width, scheme) for width in (1280, 360) for scheme in ("light", "dark")]

# Elements that reach past the screen, unless a box of their own scrolls them.
STICKS_OUT = """
[...document.querySelectorAll('body *')].filter(e => {
  const box = e.getBoundingClientRect();
  if (!box.width || (box.right <= innerWidth + 0.5 && box.left >= -0.5)) return false;
  for (let p = e; p; p = p.parentElement)
    if (p !== e && ['auto', 'scroll'].includes(getComputedStyle(p).overflowX)) return false;
  return true;
}).map(e => e.tagName + ' ' + e.className + ' ' + e.getBoundingClientRect().right).concat(
  document.documentElement.scrollWidth > innerWidth ? ['the page scrolls sideways'] : [])
"""

# Texts with less contrast than WCAG AA asks for, against the nearest opaque background under them.
FAINT = """
(() => {
  const parse = c => { const m = c.match(/[\\d.]+/g).map(Number); return m.length < 4 ? [...m, 1] : m; };
  const light = c => c.slice(0, 3).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
  const under = e => {
    for (let p = e; p; p = p.parentElement) {
      const c = parse(getComputedStyle(p).backgroundColor);
      if (c[3] === 1) return c;
    }
    return [255, 255, 255, 1];
  };
  const out = new Set();
  let seen = 0;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || ['STYLE', 'TITLE', 'title'].includes(e.tagName)) continue;
    const style = getComputedStyle(e), size = parseFloat(style.fontSize), svg = e instanceof SVGElement;
    const ground = svg && e.classList.contains('number')
      ? parse(getComputedStyle(document.querySelector('svg .layer')).fill) : under(e);
    const [a, b] = [light(parse(svg ? style.fill : style.color)), light(ground)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    seen += 1;
    if (ratio < (large ? 3 : 4.5)) out.add(`${e.tagName}.${e.getAttribute('class')}: ${ratio.toFixed(2)}`);
  }
  return [seen, ...out];
})()
"""

# Letters of pictures that shrink below what can be read.
SMALL = """
[...document.querySelectorAll('svg text')].map(e => [e.textContent, e.getBoundingClientRect().height])
  .filter(([text, height]) => height && height < 8).map(([text, height]) => text + ' ' + height.toFixed(1))
"""

# Names at the ends of lines and taps that lie on one another, or outside their picture.
COLLIDE = """
[...document.querySelectorAll('svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  const outside = texts.filter(([_, b]) => b.left < frame.left - 1 || b.right > frame.right + 1)
    .map(([text, _]) => text + ' leaves its picture');
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3;
  return outside.concat(texts.flatMap(([one, a], k) => texts.slice(k + 1)
    .filter(([_, b]) => meet(a, b)).map(([other, _]) => one + ' lies on ' + other)));
})
"""

UNNAMED = """
[...document.querySelectorAll('svg, [role=region]')].filter(e => !(e.getAttribute('aria-label') || '').trim())
  .map(e => e.outerHTML.slice(0, 80))
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium is installed; CHROMIUM=path names one")
    one = Browser(path, tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


def one_draft(result: AcceptResult, training: Training) -> str:
    recipes = {"Serve it": "python -m sglang.launch_server --model-path " + "/a/long/path" * 12 + " --port 30000"}
    one = replace(result, served=result.served[:1], training=training, allowed_gap=0.3, recipes=recipes)
    return render_page([one], "one draft with_a_long_name_that_has_no_place_to_break_it_but_underscores")


def compared(result: AcceptResult, training: Training) -> str:
    return render_page([replace(result, training=training), replace(result, title="another_draft")], "two drafts")


def of_a_server(result: AcceptResult, training: Training) -> str:
    """Three batch sizes, one with an alarm and failures, and a server that says much of itself."""
    facts = {
        "engine": "sglang", "build": "0.5.23", "convention": "sglang-0.5.23", "convention_from": "its source",
        "ids": [0, 3, 1], "command": ["python", "-m", "sglang.launch_server", "--model-path", "/targets/" + "x" * 120],
        "resolved": {"speculative_num_steps": 2, "speculative_algorithm": "EAGLE3", "page_size": 1},
    }  # fmt: skip
    first = result.served[0]
    served = [replace(first, batch=batch, facts=facts) for batch in (1, 4, 16)]
    served[1] = replace(served[1], failures={"chat/p0": "the server closed the connection " + "y" * 150})
    alarmed = replace(result, served=served, training=training, plain_facts=facts)
    alarmed.predicted_acceptance = [0.99, 0.99]
    alarmed.alarm = find_alarms(
        alarmed, 0.01, ["python -m eval.probe live --url http://127.0.0.1:30000 --target " + "t" * 90]
    )
    assert alarmed.alarm
    return render_page([alarmed], "a server")


def earlier_release(result: AcceptResult, _training: Training) -> str:
    """Nothing that later releases add."""
    return render_page([replace(result, predicted_acceptance=None, commands=[], environment={})], "old")


def the_matrix(_result: AcceptResult, _training: Training) -> str:
    cells = matrix({
        name: Wiring(tuple(map(Site, layers)), "final", "deepseek_v3", 61, 64)
        for name, layers in (("native", (3, 31, 59)), ("embedding", (0, 3, 31)))
    })  # fmt: skip
    measured = {cells[0].key: Measured(cells[0].key, 1.5, 1.4, 1.6, 40, ((1, 2),), 1)}
    return matrix_page(cells, measured, ["a line about a build"], ["a contradiction"], ["python -m eval.matrix a b"])


@pytest.mark.parametrize("make", [one_draft, compared, of_a_server, earlier_release, the_matrix])
def test_a_page_is_sound_at_every_width_and_scheme(
    tmp_path: Path,
    browser: Browser,
    accept_result: AcceptResult,
    trained: Training,
    make: Callable[[AcceptResult, Training], str],
) -> None:
    page = tmp_path / f"{make.__name__}.html"
    page.write_text(make(accept_result, trained).replace("<details>", "<details open>"))  # what is folded counts, too
    for width, scheme in LOOKS:
        browser.open(page, width, scheme)
        look = f"{make.__name__} at {width}, {scheme}"
        assert browser.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
        if os.environ.get("SCREENSHOTS"):
            browser.picture(Path(os.environ["SCREENSHOTS"]) / f"{make.__name__}-{width}-{scheme}.png")
        assert browser.complaints() == [], look
        assert browser.evaluate(STICKS_OUT) == [], look
        seen, *faint = browser.evaluate(FAINT)
        assert faint == [] and seen > 50, look
        assert browser.evaluate(SMALL) == [], look
        assert browser.evaluate(COLLIDE) == [], look
        assert browser.evaluate(UNNAMED) == [], look


PLANTED = {
    STICKS_OUT: '<div style="width:2000px">wide</div>',
    FAINT: '<p style="color:#999;background:#888">faint</p>',
    SMALL: '<svg viewBox="0 0 9000 20" aria-label="x"><text y="12">tiny</text></svg>',
    COLLIDE: '<svg viewBox="0 0 90 20" aria-label="x"><text y="12">one</text><text y="13">other</text></svg>',
    UNNAMED: '<svg viewBox="0 0 90 20"></svg>',
}


def test_the_measures_find_what_is_planted(tmp_path: Path, browser: Browser) -> None:
    page = tmp_path / "bad.html"
    page.write_text('<body><p>fine</p><img src="http://127.0.0.1:9/x.png">' + "".join(PLANTED.values()))
    browser.open(page, 360, "light")
    for script in PLANTED:
        found = browser.evaluate(script)
        assert [entry for entry in found if isinstance(entry, str)], script
    assert any("asks for http://127.0.0.1:9/x.png" in line for line in browser.complaints())
