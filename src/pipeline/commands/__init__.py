"""The subcommands of `pipeline`; the module of a command is imported when the command runs."""
