"""The `seqdedupe` command. docs/reference/cli.md describes it.

Begin with `commands`, the list of all commands. Each group of commands has a file `…_command` or `…_commands`. `common`
contains the shared code of commands that call a sidecar. `seqdedupe.command` contains the shared code for command
lines. `record_source` reads the records that `publish` sends.
"""
