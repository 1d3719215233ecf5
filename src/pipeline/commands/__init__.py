"""What the subcommands of `pipeline` do; each module is imported when its command runs."""
