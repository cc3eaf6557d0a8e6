"""`seqdedupe profiles`: the sidecars whose connection options a file has by name."""

import os

import click

from seqdedupe import profiles as of_user
from seqdedupe.cli.common import as_json_option
from seqdedupe.command import print_json, print_table


@click.command()
@as_json_option
def profiles(as_json: bool) -> None:
    """List the profiles of this user: the addresses of sidecars and the names of files.

    SEQDEDUPE_PROFILE or --profile of a command chooses a profile. The command shows no content of the files.
    """
    chosen = os.environ.get(of_user.VARIABLE)
    found = of_user.read_all()
    if as_json:
        print_json(
            [
                {"name": name, **{key: profile.get(key) for key in of_user.KEYS}, "is_chosen": name == chosen}
                for name, profile in found.items()
            ]
        )
        return
    print_table(
        ("PROFILE", *(key.replace("_", " ").upper() for key in of_user.KEYS), "CHOSEN"),
        [
            (name, *(profile.get(key, "-") for key in of_user.KEYS), "yes" if name == chosen else "-")
            for name, profile in found.items()
        ],
    )
