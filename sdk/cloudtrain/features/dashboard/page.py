"""The HTML of the page: live, or as one file with its data."""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path
from typing import Any, Final

from cloudtrain_runtime.contract.strict_json import dump_json

STATIC: Final = Path(__file__).parent / "static"
_OWN_SCRIPTS: Final = (
    "format.js",
    "thinning.js",
    "chart_head.js",
    "charts.js",
    "drawings.js",
    "log_view.js",
    "results_view.js",
    "timeline_view.js",
    "run_view.js",
    "list_rows.js",
    "list_view.js",
    "compare_view.js",
    "sweep_view.js",
    "app.js",
)
SCRIPTS: Final = ("vendor/uPlot.iife.min.js", *_OWN_SCRIPTS)
STYLES: Final = ("vendor/uPlot.min.css", "base.css", "charts.css", "list.css", "run.css")


def live_page() -> str:
    """Return the page that the dashboard serves. It loads scripts and styles from the same server."""
    styles = "".join(f'<link rel="stylesheet" href="{name}">' for name in STYLES)
    scripts = "".join(f'<script src="{name}" defer></script>' for name in SCRIPTS)
    return _page("cloudtrain", styles, scripts)


def report_page(title: str, content: Any) -> str:
    """Return the page as one file that needs no server.

    Args:
        title: Title of the document.
        content: The data, which becomes JSON.
    """
    styles = "".join(f"<style>{_read(name)}</style>" for name in STYLES)
    scripts = [_read(name) for name in SCRIPTS]
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    # Only these two scripts run; nothing is loaded.
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">{styles}'
    data = f'<script type="application/json" id="data">{_in_script(dump_json(content))}</script>'
    return _page(title, head, data + "".join(f"<script>{script}</script>" for script in scripts))


MARK: Final = '<meta name="generator" content="cloudtrain">'
"""Element of each page, by which a report may be replaced by a newer one."""


def _page(title: str, head: str, scripts: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{MARK}'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"{head}<title>{html.escape(title, quote=False)}</title></head>"
        f'<body><div id="app"><p class="state" role="status">Loading…</p></div>{scripts}</body></html>\n'
    )


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8").rstrip("\n")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _in_script(json: str) -> str:
    """Return JSON that ends no `<script>` element and begins no comment in it."""
    return json.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
