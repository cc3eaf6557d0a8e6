"""The `seqdedupe` command. docs/reference/cli.md describes it.

Begin with `commands`, the list of all of them; each group has a file `…_command` or `…_commands`. What they share of a
sidecar is in `common`, and of command lines at all in `seqdedupe.command`. `record_source` reads what `publish` sends.
"""
