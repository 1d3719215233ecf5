"""Take the pictures of docs/how-to/tracking.md with a headless browser.

    pip install -e '.[screenshots]'
    git clone . /tmp/small && cp docs/tools/small.yaml /tmp/small/params.yaml && cd /tmp/small
    pipeline plan && snakemake --cores 2 && snakemake --report snakemake.html
    python <here>/docs/tools/screenshots.py --project . --output <here>/docs/images

It starts `pipeline ui` in the project, looks at each page as a person would, and writes PNGs with
few colors. `--browser` names a Chromium; without it, that of `playwright install chromium` is used.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import requests
from mlflow import MlflowClient
from PIL import Image

from pipeline.cli.ui import addresses

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("screenshots")
_COLORS = 128
_SETTLE_MS = 12_000
_START_S = 300.0
_EYE = "a[iconname=eye]"
"""In Snakemake's report, what opens a figure."""
_MODE = "workflowType=machine_learning"


def main() -> None:
    """Write every picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--project", type=Path, default=Path(), help="where the DAG has run")
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    parser.add_argument("--browser", help="path of a Chromium")
    parser.add_argument("--only", nargs="*", help="names of pictures; default: all")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools, pages(arguments.project) as address:
        options = {"executable_path": arguments.browser} if arguments.browser else {}
        browser = tools.chromium.launch(args=["--no-sandbox", "--disable-gpu"], **options)
        shots = {**mlflow_shots(arguments.project, address), **files(arguments.project)}
        for name, shot in shots.items():
            if not arguments.only or name in arguments.only:
                take(browser, arguments.output / f"{name}.png", **shot)
        browser.close()


def mlflow_shots(project: Path, address: str) -> dict[str, dict[str, Any]]:
    """Addresses of MLflow's pages: table, curves, a run, its model, the registry."""
    client = MlflowClient(tracking_uri=f"sqlite:///{project.resolve() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("pipeline").experiment_id
    runs = client.search_runs(
        [experiment],
        "tags.`pipeline.current` = 'yes'",
        order_by=["metrics.`evaluate/mean_return` DESC"],
    )
    cloned = next(run for run in runs if "bc" in run.info.run_name)
    pages = addresses(experiment)
    base = f"{address}/#/experiments/{experiment}/runs"
    one = f"{base}/{cloned.info.run_id}"
    spread = max(runs, key=lambda run: run.data.metrics["evaluate/std_return"])
    model = client.search_registered_models()[0].name
    alike = [run for run in runs if run.data.params["environment"] == "collector"]
    compared = urlencode(
        {
            "runs": json.dumps([run.info.run_id for run in alike]),
            "experiments": json.dumps([experiment]),
        },
        quote_via=quote,
    )
    logged = client.get_run(cloned.info.run_id).outputs.model_outputs[0].model_id
    return {
        "mlflow-table": {"url": f"{address}{pages['All runs']}", "height": 720},
        "mlflow-curves": {"url": f"{address}{pages['Curves']}"},
        "mlflow-run": {"url": f"{one}?{_MODE}", "height": 1500},
        "mlflow-artifacts": {
            "url": f"{base}/{spread.info.run_id}/artifacts/evaluate/returns.png?{_MODE}",
            "height": 800,
        },
        "mlflow-compare": {
            "url": f"{address}/#/compare-runs?{compared}&{_MODE}",
            "clicks": ["Visualizations", "Show diff only"],
            "height": 1190,
        },
        "mlflow-onnx": {
            "url": f"{address}/#/experiments/{experiment}/models/{logged}/artifacts?{_MODE}",
            "clicks": ["MLmodel"],
        },
        "mlflow-model": {"url": f"{address}/#/models/{model}?{_MODE}", "height": 1280},
    }


def files(project: Path) -> dict[str, dict[str, Any]]:
    """Our report in a wide, light and in a narrow, dark window, and Snakemake's."""
    report = (project / "results/report/report.html").resolve().as_uri()
    snakemake = (project / "snakemake.html").resolve().as_uri()
    return {
        "report-wide": {"url": report, "whole": True, "width": 1100, "settle": 500},
        "report-narrow": {
            "url": report,
            "clicks": ["collector: FoodCollector"],
            "width": 420,
            "settle": 500,
            "scheme": "dark",
        },
        "snakemake-report": {
            "url": snakemake,
            "clicks": ["Comparison", f"{_EYE} >> nth=2"],
            "settle": 3_000,
        },
        "snakemake-evaluation": {
            "url": snakemake,
            "clicks": ["Evaluation", "collector_ppo", f"{_EYE} >> nth=0"],
            "settle": 3_000,
        },
    }


def take(
    browser: Any,
    path: Path,
    *,
    url: str,
    width: int = 1600,
    height: int = 1000,
    scheme: str = "light",
    whole: bool = False,
    settle: int = _SETTLE_MS,
    clicks: list[str] | None = None,
) -> None:
    """Open a page, wait until it is drawn, and write what is seen."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(url)
    page.wait_for_timeout(settle)
    close = page.get_by_role("button", name="Close", exact=True)
    if close.count():  # MLflow's assistant, which opens by itself
        close.first.click()
        page.wait_for_timeout(settle // 3)
    for what in clicks or []:
        found = page.locator(what) if what.startswith(_EYE) else page.get_by_text(what, exact=True)
        found.first.click()
        page.wait_for_timeout(settle // 3)
    with Image.open(io.BytesIO(page.screenshot(full_page=whole))) as picture:
        few = picture.convert("RGB").quantize(_COLORS, dither=Image.Dither.NONE)
    path.parent.mkdir(parents=True, exist_ok=True)
    few.save(path, optimize=True)
    _log.info("%s: %d kB", path, path.stat().st_size // 1000)
    context.close()


@contextlib.contextmanager
def pages(project: Path) -> Iterator[str]:
    """`pipeline ui` in the project, for the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(  # noqa: S603  # our own command
        [sys.executable, "-m", "pipeline.cli.main", "ui", "--port", str(port)],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project.resolve() / "src")},
    )
    address = f"http://127.0.0.1:{port}"
    end = time.monotonic() + _START_S
    try:
        while server.poll() is None and time.monotonic() < end:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{address}/health", timeout=5).ok:
                    break
            time.sleep(0.5)
        yield address
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


if __name__ == "__main__":
    main()
