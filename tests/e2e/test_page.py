"""The page at `/`, used with the keyboard in a headless browser."""

from __future__ import annotations

import os
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
        assert titles == ["with drafts", "plain: without drafts", plain.url]
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
