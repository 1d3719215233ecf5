"""The old name of `settings.trainer.schema`."""

raise ImportError("pipeline.settings.schema is now pipeline.settings.trainer.schema")
