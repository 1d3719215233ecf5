"""Weights & Biases: a run with parameters and curves, kept in files if there is no login."""

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import files
from pipeline.core.arrays import AnyArray
from pipeline.tracking import names, run_metadata
from pipeline.tracking.base import Sink
from pipeline.tracking.result import TrainResult
from pipeline.tracking.sinks import TrackedRun

_log = logging.getLogger(__name__)

_PROJECT = "pipeline"
_INIT_TIMEOUT_S = 30
"""Seconds to wait for a server that does not answer; the environments wait too."""
_STEP = "step"
"""The horizontal axis of charts: decisions of the agents."""


class WandbSink(Sink):
    """Writes a run to Weights & Biases; environment variables `WANDB_...` configure the writing.

    The local files are in the folder `wandb` in the run's folder.

    The run of W&B opens when the first behavior appears. A resumed run continues this run of W&B.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._run_info = run
        self._run: Any = None
        self._tried = False
        self._complete = False

    def on_start(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """Open the run once; write a behavior's settings if the configuration does not list it."""
        if not self._tried:
            # Only one attempt is made: a server that does not answer would delay each behavior.
            self._tried = True
            try:
                self._run = self._opened()
            except Exception as error:  # noqa: BLE001  # tracking never stops training
                _log.warning(
                    "The run cannot be written to Weights & Biases (%s: %s). WANDB_MODE=offline "
                    "writes the run into files.",
                    type(error).__name__,
                    str(error).partition("\n")[0],
                )
        if self._run is not None and behavior not in self._run_info.max_steps:
            self._run.config.update(run_metadata.parameters({behavior: settings}, prefix=True))

    def on_summary(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Write a summary."""
        charted = {tag: value for tag, value in values.items() if tag not in names.HIDDEN}
        self._log(behavior, charted, step)

    def on_distribution(self, behavior: str, tag: str, values: Sequence[float], step: int) -> None:
        """Write a histogram."""
        if self._run is not None:
            import wandb

            self._log(behavior, {f"{tag}{names.HISTOGRAM}": wandb.Histogram(list(values))}, step)

    def on_image(self, behavior: str, tag: str, image: AnyArray, step: int) -> None:
        """Write a picture."""
        if self._run is not None:
            import wandb

            self._log(behavior, {tag: wandb.Image(image)}, step)

    def on_end(self, result: TrainResult) -> None:
        """Write the final numbers of the run into its summary."""
        # `close` also runs after an error, and gives exit code 0 only to a complete run.
        self._complete = True
        if self._run is not None:
            flat = run_metadata.flat(result.numbers())
            self._run.summary.update({f"train/{name}": value for name, value in flat.items()})

    def close(self) -> None:
        """Write pending data, and end the run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=0 if self._complete else 1)

    def _log(self, behavior: str, values: Mapping[str, Any], step: int) -> None:
        if self._run is not None:
            start = f"{behavior}/" if self._run_info.prefixed else ""
            self._run.log(
                {_STEP: step, **{f"{start}{tag}": value for tag, value in values.items()}}
            )

    def _opened(self) -> Any:
        import wandb

        tracked, key = self._run_info, self._run_info.key
        # Without a mode or an API key wandb would ask the user, and training would wait.
        chosen = "WANDB_MODE" in os.environ or wandb.login(prompt=False, verify=False)
        patience: dict[str, Any] = {}
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            patience["init_timeout"] = _INIT_TIMEOUT_S
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            dir=tracked.folder,
            id=os.environ.get("WANDB_RUN_ID") or self._id(),
            resume="allow" if tracked.keep_earlier else None,
            name=tracked.folder.name if key is None else key.name,
            group=None if key is None else key.label,
            job_type="train",
            config={} if tracked.row is None else dict(tracked.row.params),
            mode=None if chosen else "offline",
            reinit="create_new",  # leaves an open run of the calling program unchanged
            settings=wandb.Settings(silent=True, console="off", **patience),
        )
        # The charts use the pipeline's steps, because wandb's default step counts calls of `log`,
        # which differ between behaviors.
        run.define_metric("*", step_metric=_STEP)
        if run.offline:
            _log.info("Weights & Biases: offline; `wandb sync %s` uploads the run.", run.sync_dir)
        else:
            _log.info("Weights & Biases: %s", run.url)
        return run

    def _id(self) -> str:
        # The id is stored in the run's folder, so that a resumed run finds it.
        path = self._run_info.folder / "wandb" / "run-id.txt"
        if not (self._run_info.keep_earlier and path.is_file()):
            files.write_whole(path, secrets.token_hex(4))
        return path.read_text(encoding="utf-8")


for_run = WandbSink
