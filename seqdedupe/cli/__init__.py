"""The `seqdedupe` command. docs/reference/cli.md describes it.

Begin with `commands`, the list of all commands. Each group of commands has a file `…_command` or `…_commands`. `common`
contains the code for a sidecar that all commands share, and `seqdedupe.command` the shared code for command lines.
`record_source` reads what `publish` sends.
"""
