"""The old name of the module `settings.trainer.schema`."""

raise ImportError("pipeline.settings.schema is now pipeline.settings.trainer.schema")
