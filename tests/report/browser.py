"""A page in headless Chromium: what its scripts would say, and what it looks like to a script of ours."""

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=4000", "--dump-dom"),
)
# measured inside a frame as wide as a phone: marks of every picture that take up room, and what sticks out sideways
MEASURE = """
<script>
addEventListener("load", () => {
  const inner = document.querySelector("iframe").contentDocument;
  const drawn = [...inner.querySelectorAll("svg")].map(svg => ({
    title: svg.getAttribute("aria-label"),
    width: svg.getBoundingClientRect().width,
    marks: [...svg.querySelectorAll("polyline, .bar, .stage")].filter(mark => {
      const box = mark.getBoundingClientRect();
      const style = inner.defaultView.getComputedStyle(mark);
      return box.width + box.height > 0 && (style.fill !== "none" || style.stroke !== "none");
    }).length,
  }));
  const root = inner.documentElement;
  const out = document.createElement("output");
  out.textContent = JSON.stringify({drawn, overflow: root.scrollWidth - root.clientWidth});
  document.body.append(out);
});
</script>
"""


def chromium() -> str:
    """The browser's command; skips the test where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium on this machine")
    return found


def opened(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The document after loading, and what was written to the console, errors of the browser's own included."""
    command = [chromium(), *FLAGS, f"--user-data-dir={profile}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, re.findall(r":CONSOLE[^\]]*\] (.*)", done.stderr)


def measured(page: Path, profile: Path, width: int) -> dict[str, Any]:
    """Every picture of the page with the number of its visible marks, in a frame `width` pixels wide."""
    wrapper = page.with_name("wrapper.html")
    frame = f'<iframe width="{width}" height="900" srcdoc="{escape(page.read_text(encoding="utf-8"))}"></iframe>'
    wrapper.write_text(f'<!doctype html><link rel="icon" href="data:,"><body>{frame}{MEASURE}', encoding="utf-8")
    document, console = opened(wrapper, profile)
    assert console == []
    match = re.search(r"<output>(.*?)</output>", document, re.S)
    assert match, document[-500:]
    found: dict[str, Any] = json.loads(match.group(1))
    return found
