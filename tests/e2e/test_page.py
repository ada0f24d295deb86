"""The page at `/`, used with the keyboard in a headless browser."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from serving import running_server

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")]


def test_the_page_streams_compares_and_explains(tmp_path: Path) -> None:
    plain_flags = ("--allow-origin", "*")
    with (
        running_server("--draft", os.environ.get("EXACTSPEC_PAGE_DRAFT", "dspark")) as server,
        running_server(*plain_flags) as plain,
        Browser() as page,
    ):
        page.open(server.url + "/")
        page.until("document.getElementById('about').textContent.includes('ready')")
        assert not page.js("document.getElementById('plain').disabled")
        page.js("document.getElementById('tokens').value = 96")
        page.js(f"document.getElementById('other').value = {plain.url!r}")
        page.js("document.getElementById('prompt').focus()")
        page.key("Enter", ctrl=True)
        page.until("document.getElementById('same').textContent !== ''", 120)
        told = page.js("document.getElementById('same').textContent")
        assert told.startswith("The same tokens each time. With drafts ")
        titles = page.js("[...document.querySelectorAll('.panel h2')].map((title) => title.textContent)")
        assert titles == ["With drafts", "Plain: without drafts", plain.url]
        kinds = (
            "new Set([...document.querySelectorAll('.panel')[1].querySelectorAll('.token')].map((t) => t.className))"
        )
        assert page.js(f"[...{kinds}]") == ["token plain"]
        tokens = page.js("document.querySelectorAll('.panel')[0].querySelectorAll('.token').length")
        assert 1 < tokens <= 96
        assert page.js("document.querySelectorAll('.token.accepted').length") > 0
        page.js("document.querySelector('.text .token').focus()")
        page.key("ArrowRight")
        assert page.js("document.activeElement === document.querySelectorAll('.text .token')[1]")
        assert page.js("!document.getElementById('tip').hidden")
        assert page.js("document.querySelectorAll('#tip tr').length") == 5
        page.screenshot(Path(os.environ.get("EXACTSPEC_SCREENSHOT", tmp_path / "page.png")))
        page.key("Escape")
        assert page.js("document.getElementById('stop').disabled")
        _what_goes_wrong_is_told(page)
        _a_small_dark_window_holds_it(page)
        page.open(plain.url + "/")
        page.until("document.getElementById('about').textContent.includes('no draft')")
        assert page.js("document.getElementById('plainbox').hidden")
        page.js("document.getElementById('tokens').value = 2")
        page.key("Enter", ctrl=True)
        page.until("document.querySelectorAll('.text .token').length === 2")
        assert page.js("[...document.querySelectorAll('.panel h2')].map((title) => title.textContent)") == ["Answer"]
        assert page.js("[...document.querySelectorAll('#legend .drafts')].every((item) => item.hidden)")


def _what_goes_wrong_is_told(page: Browser) -> None:
    """By the panel that it is about; no verdict on answers that have not come. A seed of 0 is a seed."""
    page.js("document.getElementById('seed').value = 0")
    page.js("document.getElementById('tokens').value = 100000")
    page.js("document.getElementById('other').value = 'http://127.0.0.1:9'")
    page.js("run()")
    told = [note.split(": ")[0] for note in _notes(page)]
    assert told == ["max_new_tokens", "max_new_tokens", "The server does not answer"]
    assert page.js("document.getElementById('same').textContent") == ""
    page.js("document.getElementById('tokens').value = 4000")
    page.js("void run()")
    page.until("document.querySelectorAll('.text .token').length > 20")
    page.key("Escape")
    page.until("document.querySelectorAll('.note').length === 1")
    assert _notes(page) == ["Stopped."]
    page.js("document.getElementById('tokens').value = 3")
    page.js("document.getElementById('other').value = ''")
    page.js("run()")
    numbers = page.js("[...document.querySelectorAll('.numbers')].map((list) => list.textContent)")
    assert all(text.endswith("seed0") for text in numbers), numbers


def _notes(page: Browser) -> list[str]:
    return page.js("[...document.querySelectorAll('.note')].map((note) => note.textContent)")


def _a_small_dark_window_holds_it(page: Browser) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.js("document.getElementById('tokens').value = 300")
    page.js("run()")
    assert page.js("document.documentElement.scrollWidth") == 360
    inside = "[...document.querySelectorAll('.blocks')].every((bars) => bars.scrollWidth <= bars.clientWidth)"
    assert page.js(inside)
    ink, paper = (
        page.js(f"getComputedStyle(document.querySelector('.text .token')).{x}") for x in ("color", "backgroundColor")
    )
    assert _light(ink) > 0.8 > 0.4 > _light(paper)
    halves = "[[0, 1, '\\uFFFD'], [0, 2, '\\uFFFD'], [0, 3, ' a'], [0, 4, '<end>'], [0, 5, '\\uFFFD']]"
    assert page.js(f"textsOf({halves}, '€ a').join('|')") == "|€| a|<end>|"
    assert page.js("textsOf([[0, 5, '\\uFFFD'], [0, 6, 'b']], '日b').join('|')") == "日|b"
    page.call("Emulation.clearDeviceMetricsOverride")


def _light(colour: str) -> float:
    return sum(float(part) for part in re.findall(r"[0-9.]+", colour)[:3]) / 765
