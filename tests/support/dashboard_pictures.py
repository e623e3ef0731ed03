"""Pictures of the dashboard for README and docs, from real runs of examples/digits.

    PYTHONPATH=tests python -m support.dashboard_pictures

It trains three local runs, which takes a few minutes, and needs Chromium and playwright (`make test-all`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from support.jobs import EXAMPLES, REPOSITORY, command

FOLDER = REPOSITORY / "docs" / "how-to"
RATES = ("2.0e-3", "5.0e-4", "1.0e-2")


def main() -> None:
    """Write docs/how-to/dashboard-run.png and docs/how-to/dashboard-comparison.png."""
    chromium = shutil.which("chromium") or sys.exit("Chromium is not installed")
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "CLOUDTRAIN_HOME": f"{folder}/home", "HOME": folder}
        job = str(EXAMPLES / "digits" / "job.yaml")
        every_step = ("--set", "code.env.CLOUDTRAIN_LOG_EVERY_STEPS=2")
        for rate in RATES:
            options = (
                "--local",
                "--instances",
                "2",
                "--follow",
                "--set",
                f"train.learning_rate={rate}",
                *every_step,
            )
            argv = [str(command()), "submit", job, *options]
            subprocess.run(argv, env=environ, stdout=subprocess.DEVNULL, check=True)
        runs = sorted(each.name for each in (Path(folder) / "home" / "runs").iterdir())
        with sync_playwright() as driver:
            browser = driver.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
            )
            for name, shown in (("dashboard-run", runs[:1]), ("dashboard-comparison", runs)):
                report = Path(folder) / f"{name}.html"
                subprocess.run(
                    [str(command()), "report", *shown, "-o", str(report)], env=environ, check=True
                )
                page = browser.new_page(viewport={"width": 1280, "height": 800})
                page.goto(report.as_uri())
                page.wait_for_selector("figure.chart")
                page.screenshot(path=str(FOLDER / f"{name}.png"))
            browser.close()


if __name__ == "__main__":
    main()
