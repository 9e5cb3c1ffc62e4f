"""The page in a real browser: growing texts, verdicts, trees, Stop and hostile text.

Without Chromium these tests are skipped with a warning, or fail if REQUIRE_BROWSER=1.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from pathlib import Path

import pytest
from helpers import ROOT

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, which `make test` installs")
expect = sync_api.expect

TIMEOUT = 60_000  # milliseconds for a run on a busy machine
HOSTILE = '<img src=x onerror="window.hacked=1"><b id="bold">b</b> ${window.hacked=1} {{value}} שלום עולם 🙂 &lt;'


@pytest.fixture(scope="module")
def browser():
    """A Chromium."""
    with sync_api.sync_playwright() as playwright:
        path = shutil.which("chromium") or playwright.chromium.executable_path
        if not Path(path).exists():
            reason = "NO CHROMIUM: THE PAGE WAS NOT TESTED. Install Chromium with tests/install_chromium.sh"
            if os.environ.get("REQUIRE_BROWSER") == "1":
                pytest.fail(reason)
            warnings.warn(reason, stacklevel=1)
            pytest.skip(reason)
        # Chromium's sandbox needs rights that a container may not have
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The address of `python app.py`, which is started for these tests."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("app") / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        command = [sys.executable, "app.py", "--port", str(port)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        try:
            wait_for(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()
    assert "Traceback" not in log.read_text()


def wait_for(address, process, log):
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(address).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"no answer from {address}: {log.read_text()}")


@pytest.fixture
def page(browser, address):
    """A new page. The test fails if a script on it raises an error or if it requests anything from another host."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: problems.append(request.url) if is_elsewhere(request.url, address) else None)
    page.goto(address)
    button(page, "Run").wait_for(timeout=TIMEOUT)
    yield page
    page.close()
    assert problems == []


def is_elsewhere(url, address):
    return url.startswith("http") and not url.startswith(address)


def button(page, name):
    return page.get_by_role("button", name=name, exact=True).locator("visible=true")


def text_of(page, label):
    return page.get_by_label(label, exact=True).locator("visible=true").input_value()


def set_number(page, label, value):
    field = page.get_by_label(f"number input for {label}").locator("visible=true")
    field.fill(str(value))
    field.press("Enter")


def ask(page, prompt, tokens=20):
    page.get_by_label("Prompt", exact=True).locator("visible=true").fill(prompt)
    set_number(page, "Max new tokens", tokens)


def verdict(page):
    return page.locator(".verdict:visible")


def run(page, name="Run"):
    """Press the button and wait until the run has ended."""
    button(page, name).click()
    expect(button(page, "Stop")).to_be_enabled(timeout=TIMEOUT)
    expect(button(page, "Run")).to_be_enabled(timeout=TIMEOUT)


# collects every length that the two texts have while they grow
WATCH = """() => {
    window.lengths = {"Plain generation": new Set(), "DDTree": new Set()};
    setInterval(() => document.querySelectorAll("label").forEach(label => {
        const seen = window.lengths[label.innerText.trim()], area = label.querySelector("textarea");
        if (seen && area && area.offsetParent && area.value) seen.add(area.value.length);
    }), 20);
}"""


@pytest.mark.parametrize("tab", ["Greedy", "Sampled"])
def test_run_shows_both_texts_growing(page, tab):
    page.get_by_role("tab", name=tab).click()
    ask(page, "Tell a long story about a whale.", 20)
    page.evaluate(WATCH)
    run(page)
    expect(verdict(page)).to_contain_text("Identical. All 20 tokens are the same")
    assert text_of(page, "Plain generation") == text_of(page, "DDTree") != ""
    for label in ("Plain generation", "DDTree"):
        assert page.evaluate("label => window.lengths[label].size", label) > 2, label
    plain, drafted = page.locator(".stats:visible").all_inner_texts()
    assert re.search(r"tokens\s+20", plain) and "rounds" not in plain
    for figure in ("tokens/s", "first token", "rounds", "tokens_per_round", "tree budget used"):
        assert figure in drafted


def test_run_names_the_policy_in_use(page):
    """With prompt look-up the policy is always "target"."""
    page.get_by_role("tab", name="Sampled").click()
    page.get_by_label("hybrid").locator("visible=true").check()
    ask(page, "Say hello.", 8)
    run(page)
    lookup = page.get_by_label("prompt look-up").locator("visible=true").is_checked()
    expect(verdict(page)).to_contain_text("policy “target”" if lookup else "policy “hybrid”")


def test_slider_steps_through_the_trees(page):
    ask(page, "Repeat three times: one two three four five.", 20)
    expect(page.locator(".tree svg")).to_have_count(0)
    run(page)
    svg = page.locator(".tree svg:visible")
    expect(svg).to_be_visible()
    pictures = set()
    slider = page.get_by_label("range slider for Tree of round")
    for number in range(1, int(slider.get_attribute("max")) + 1):
        slider.fill(str(number))
        expect(page.locator(".round:visible")).to_contain_text(f"Round {number} of")
        pictures.add(svg.inner_html())
    assert len(pictures) > 1
    assert svg.locator("g.root").count() == 1


def test_stop_ends_a_run_and_the_next_run_works(page):
    ask(page, "Tell a long story.", 512)
    button(page, "Run").click()
    page.wait_for_function(
        "[...document.querySelectorAll('textarea')].filter(a => a.offsetParent)[1].value.length > 20"
    )
    button(page, "Stop").click()
    expect(verdict(page)).to_contain_text("Stopped.", timeout=10_000)
    stopped = text_of(page, "Plain generation")
    page.wait_for_timeout(500)
    assert text_of(page, "Plain generation") == stopped != ""
    ask(page, "Say hello.", 8)
    run(page)
    expect(verdict(page)).to_contain_text("Identical.")


def test_run_waits_for_the_run_of_another_visitor(page, browser, address):
    with browser.new_page() as second:
        second.goto(address)
        button(second, "Run").wait_for(timeout=TIMEOUT)
        ask(page, "Tell a long story.", 512)
        ask(second, "Say hello.", 8)
        button(page, "Run").click()
        expect(verdict(page)).to_contain_text("Running plain generation")
        button(second, "Run").click()
        expect(verdict(second)).to_contain_text("Waiting")
        page.wait_for_timeout(1_500)
        assert text_of(second, "Plain generation") == ""
        button(page, "Stop").click()
        expect(verdict(second)).to_contain_text("Identical.", timeout=TIMEOUT)


def test_follow_up_shows_hostile_text_as_text(page):
    ask(page, HOSTILE, 12)
    run(page)
    ask(page, f"Repeat: {HOSTILE}", 12)
    run(page, "Follow up")
    turns = page.locator(".turn:visible")
    expect(turns).to_have_count(3)
    assert turns.nth(0).inner_text() == HOSTILE
    assert turns.nth(2).inner_text() == f"Repeat: {HOSTILE}"
    assert page.locator("#bold, img[src=x]").count() == 0
    assert page.evaluate("window.hacked") is None
    expect(verdict(page)).to_contain_text("Identical.")


def test_run_explains_mistakes(page):
    ask(page, "  ")
    run(page)
    expect(verdict(page)).to_contain_text("The prompt is empty")
    assert "Traceback" not in page.inner_text("body")


# elements that reach beyond the window's right edge, even if an ancestor clips them
OUTSIDE = """() => [...document.querySelectorAll("h1, p, label, button, textarea, input, .verdict")].filter(
    element => element.offsetParent && element.getBoundingClientRect().right > window.innerWidth + 1
).map(element => element.outerHTML)"""


@pytest.mark.parametrize("width", [1280, 390])
def test_page_fits_the_window(page, width):
    page.set_viewport_size({"width": width, "height": 844})
    for tab in ("Greedy", "Sampled"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OUTSIDE) == []
