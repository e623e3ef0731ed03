"""Opens the page in the browser, without its token in the browser's arguments."""

from __future__ import annotations

import contextlib
import html
import tempfile
import webbrowser
from collections.abc import Iterator
from pathlib import Path

_PAGE = """\
<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={url}">
<title>cloudtrain</title>
<a href="{url}">the dashboard</a>
"""


@contextlib.contextmanager
def opened_page(url: str) -> Iterator[None]:
    """Open an address in the browser, through a file that only this user can read.

    All users of a machine can read the arguments of a process. The file is there until the block ends, because the
    browser may take its time.
    """
    with tempfile.TemporaryDirectory(prefix="cloudtrain-dashboard-") as folder:
        page = Path(folder, "dashboard.html")
        page.touch(0o600)
        page.write_text(_PAGE.format(url=html.escape(url)), encoding="utf-8")
        webbrowser.open(page.as_uri())
        yield
