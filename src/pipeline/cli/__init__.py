"""The `pipeline` command, one file for each subcommand; each is imported when it runs."""
