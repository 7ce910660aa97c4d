"""The page in a browser: silent, offline, right, and usable by keyboard at any width."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_model_of_the_page import PROBLEMS

from fasim import gpu, planner, report
from fasim.problem import Problem

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")

V3 = {"seq": 8192, "causal": True}
E4M3 = {**V3, "dtype": "e4m3"}
# The most that a moment draws and looks at: calls of a canvas, elements of the page, events of as
# many rows of tiles, some of them looked at again.
MOST_DRAWN, MOST_ELEMENTS, MOST_ROWS = 1000, 1000, 16


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as engine:
        found = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Shown:
    """Pages that were opened, and all that they said or asked for."""

    def __init__(
        self, browser: Any, path: Path | None = None, width: int = 1280, **options: Any
    ) -> None:
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, offline=True, **options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.opened: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        if path:
            self.open(path)

    def open(self, path: Path) -> None:
        self.opened.append(path.as_uri())
        self.page.goto(path.as_uri())

    def value(self, selector: str) -> str:
        return str(self.page.get_attribute(selector, "data-value"))

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def close(self) -> None:
        """They never said a word, and asked for nothing but themselves."""
        self.page.wait_for_timeout(20)
        assert self.said == []
        assert [url for url in self.asked if not url.startswith("data:")] == self.opened
        self.context.close()


def written(folder: Path, algo: str, device: str, options: dict[str, Any], **more: Any) -> Any:
    chosen = gpu.load(device)
    entry = planner.plan(Problem(**options), chosen, algo)
    text = report.page(entry, chosen, **more)
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    return path, entry


@pytest.fixture
def v3(tmp_path: Path, browser: Any) -> Iterator[Shown]:
    shown = Shown(browser, written(tmp_path, "v3", "h200", V3)[0])
    yield shown
    shown.close()


def at(document: Any, path: str) -> Any:
    for name in path.split("."):
        document = document[name]
    return document


def test_numbers_are_those_of_the_plan(tmp_path: Path, browser: Any) -> None:
    shown = Shown(browser)
    for algo, device, options in PROBLEMS[4:]:
        path, entry = written(tmp_path, algo, device, options)
        assert path.stat().st_size < 400_000
        shown.open(path)
        check_numbers(shown, json.loads(json.dumps(entry.to_json())))
    shown.close()


def check_numbers(shown: Shown, document: dict[str, Any]) -> None:
    found = shown.page.eval_on_selector_all(
        "#facts dd", "all => all.map(one => [one.dataset.key, one.dataset.value])"
    )
    assert len(found) == 22
    for key, value in found:
        expected = at(document, key)
        if isinstance(expected, str):
            assert value == expected
        else:
            assert float(value) == pytest.approx(expected, rel=1e-12), key
    shown.page.keyboard.press("End")
    issued = document["traffic"]["issued"]
    assert float(shown.value("[data-counter=read]")) == issued["read"]
    assert float(shown.value("[data-counter=written]")) == issued["write"]


def test_time_moves_by_play_step_and_scrub(v3: Shown) -> None:
    v3.page.keyboard.press("Home")
    assert v3.value("[data-counter=read]") == "0"
    v3.page.keyboard.press("ArrowRight")
    first = float(v3.page.input_value("#time"))
    v3.page.click("#step")
    second = float(v3.page.input_value("#time"))
    assert 0 < first < second
    v3.page.keyboard.press("ArrowLeft")
    assert float(v3.page.input_value("#time")) == first
    half = "time => { time.value = time.max / 2; time.dispatchEvent(new Event('input')); }"
    v3.page.eval_on_selector("#time", half)
    assert float(v3.value("[data-counter=read]")) > 0
    before = float(v3.page.input_value("#time"))
    v3.page.locator("body").press("Space")
    v3.page.wait_for_function(f"Number(document.querySelector('#time').value) > {before}")
    v3.page.locator("body").press("Space")
    assert v3.text("#play") == "▶"


def test_the_row_ends_at_the_exact_softmax(v3: Shown) -> None:
    v3.page.keyboard.press("Home")
    assert v3.page.locator("[data-result]").count() == 0
    for version in "123":
        v3.page.keyboard.press(version)
        v3.page.keyboard.press("End")
        line = v3.page.locator("[data-result]")
        result, exact = (float(line.get_attribute(f"data-{n}")) for n in ("result", "exact"))
        assert result == pytest.approx(exact, rel=1e-14)
    v3.page.fill("#scores", "1 2 | x")
    assert "numbers" in v3.text("#softmax-error")
    v3.page.fill("#scores", "1 2 | 3 4")
    assert v3.text("#softmax-error") == ""


WORK = """() => {
  const proto = CanvasRenderingContext2D.prototype, work = { drawn: 0, events: 0 };
  for (const name of ["fillRect", "strokeRect", "fillText", "drawImage", "stroke", "lineTo"]) {
    const real = proto[name];
    proto[name] = function (...given) { work.drawn += 1; return real.apply(this, given); };
  }
  const sim = simOf("v3"), { turn } = sim, sizes = [];
  for (let i = 0; i < sim.turns; ++i) sizes.push(turn(i).length);
  sim.turn = (i) => { const events = turn(i); work.events += events.length; return events; };
  const most = { drawn: 0, events: 0, row: Math.max(...sizes), sims: Object.keys(state.sims) };
  for (let i = 0; i <= 50; ++i) {
    work.drawn = work.events = 0;
    seek((sim.duration * i) / 50);
    for (const name of ["drawn", "events"]) most[name] = Math.max(most[name], work[name]);
  }
  return { ...most, rows: sim.turns - sim.before, elements: document.querySelectorAll("*").length };
}"""


def test_a_moment_costs_what_happens_then_however_long_the_head(
    tmp_path: Path, browser: Any
) -> None:
    """Opening walks one head of one version; a moment looks at a few rows of its tiles."""
    path, entry = written(tmp_path, "v3", "h200", E4M3)
    shown = Shown(browser, path)
    most = shown.page.evaluate(WORK)
    assert entry.tile
    assert most["sims"] == ["v3"]
    assert most["rows"] == -(-E4M3["seq"] // entry.tile.block_q)
    assert 0 < most["drawn"] < MOST_DRAWN
    assert most["elements"] < MOST_ELEMENTS
    assert most["row"] < most["events"] < MOST_ROWS * most["row"]
    shown.close()


def test_v_is_laid_out_before_the_rest_starts(tmp_path: Path, browser: Any) -> None:
    path, entry = written(tmp_path, "v3", "h200", {**E4M3, "kv_heads": 4})
    shown = Shown(browser, path)
    assert "Vᵀ" in shown.text("#memory .caption")
    assert "one after the other" in shown.text("#lanes .caption")  # no turns, nothing behind
    shown.page.evaluate("seek(simOf('v3').begun / 2)")
    states = shown.page.locator("#lane-now li").all_inner_texts()
    assert states[0].startswith("V3 transposer: load V")
    assert states[1] == "V3 producer: starts when V is laid out"
    assert shown.page.text_content("#memory [data-label=registers]") == "0 B"
    shown.page.evaluate("seek(simOf('v3').begun)")
    assert entry.issued
    assert float(shown.value("[data-counter=read]")) == entry.issued.reads["v"]
    assert float(shown.value("[data-counter=written]")) == entry.issued.writes["vt"]
    states = shown.page.locator("#lane-now li").all_inner_texts()
    assert states[0] == "V3 transposer: done"
    shown.page.keyboard.press("2")
    assert "Vᵀ" not in shown.text("#memory .caption")
    shown.close()


def test_a_tile_that_breaks_a_limit_says_which(v3: Shown) -> None:
    v3.page.fill("#block_kv", "256")
    v3.page.press("#block_kv", "Enter")
    v3.page.locator("#block_kv").blur()
    assert "exceed" in v3.text("#illegal")
    v3.page.click("[data-language=zh]")
    assert "超过" in v3.text("#illegal")
    v3.page.fill("#block_kv", "64")
    v3.page.locator("#block_kv").blur()
    assert v3.text("#illegal") == ""
    assert v3.value("[data-key='tile.block_kv']") == "64"
    v3.page.check("#auto")
    assert v3.value("[data-key='tile.block_kv']") != "64"


def test_controls_plan_anew(v3: Shown) -> None:
    v3.page.uncheck("#causal")
    v3.page.fill("#seq", "4096")
    v3.page.fill("#head_dim", "64")
    v3.page.locator("#head_dim").blur()
    v3.page.select_option("#gpu", "h100-sxm5-80gb")
    entry = planner.plan(Problem(seq=4096, head_dim=64), gpu.load("h100"), "v3")
    assert entry.tile
    assert entry.issued
    assert v3.value("[data-key='tile.block_kv']") == str(entry.tile.block_kv)
    assert float(v3.value("[data-key='time.seconds']")) == pytest.approx(entry.time.seconds)
    v3.page.keyboard.press("End")
    assert v3.value("[data-counter=read]") == str(entry.issued.read)
    v3.page.select_option("#gpu", "a100-sxm4-80gb")
    assert "sm_90a" in v3.text("#illegal")


def test_chinese_and_the_kitchen(v3: Shown) -> None:
    assert not v3.page.is_visible("#kitchen")
    v3.page.click("[data-language=zh]")
    assert v3.page.get_attribute("html", "lang") == "zh-CN"
    plain = v3.text("#lanes .caption")
    v3.page.check("#kitchen")
    assert v3.text("#lanes .caption") != plain
    v3.page.keyboard.press("1")
    assert "v1" in str(v3.page.get_attribute("[data-version=v1]", "data-version"))
    assert v3.page.get_attribute("[data-version=v1]", "aria-pressed") == "true"


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_draws_at_any_width(
    tmp_path: Path, browser: Any, width: int, scheme: str
) -> None:
    shown = Shown(browser, written(tmp_path, "v2", "a100", V3)[0], width, color_scheme=scheme)
    shown.page.check("#side")
    assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    colors = """all => all.map(c => new Set(new Uint32Array(
      c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size)"""
    assert min(shown.page.eval_on_selector_all("canvas", colors)) > 4
    labels = "all => all.every(one => one.getAttribute('aria-label'))"
    assert shown.page.eval_on_selector_all("canvas, svg, #time, #play, #step, #back", labels)
    shown.close()


def test_reduced_motion_moves_event_by_event(tmp_path: Path, browser: Any) -> None:
    path, _ = written(tmp_path, "v2", "a100", {"seq": 512})
    shown = Shown(browser, path, reduced_motion="reduce")
    shown.page.click("#play")
    shown.page.wait_for_function("Number(document.querySelector('#time').value) > 0")
    shown.page.click("#play")
    time = float(shown.page.input_value("#time"))
    shown.page.keyboard.press("ArrowLeft")
    shown.page.keyboard.press("ArrowRight")
    assert float(shown.page.input_value("#time")) == pytest.approx(time)
    shown.close()


def test_a_measurement_becomes_a_point(tmp_path: Path, browser: Any) -> None:
    problem = Problem(**V3).to_json()
    peers = [{"name": "theirs", "seconds": 6e-4}]
    points = [{"kernel": "mine", "seconds": 5e-4, "problem": problem, "peers": peers}]
    path, _ = written(tmp_path, "v3", "h200", V3, measured=points)
    shown = Shown(browser, path)
    texts = shown.page.locator("[data-point=measured]").all_inner_texts()
    assert [text.split(" · ")[1] for text in texts] == ["mine", "theirs"]
    shown.page.uncheck("#causal")  # another problem: nobody measured it
    assert shown.page.locator("[data-point=measured]").count() == 0
    shown.close()
