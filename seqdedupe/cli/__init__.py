"""The `seqdedupe` command. docs/cli.md describes it."""
