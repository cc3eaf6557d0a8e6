"""Tables on S3, and on what speaks its protocol: how they are opened, and what it says when it refuses."""

import os
import re
from typing import Final

from seqdedupe.errors import error

SCHEME: Final = "s3://"

_URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_.=+-]+)+")
"""A bucket, and folders whose names nobody has to encode."""

_OPTIONS: Final = {"conditional_put": "etag", "retry_timeout": "30s"}
"""A commit is a PUT that is refused if its version is there (`If-None-Match: *`), whatever the environment says."""

_OTHER_WAYS = ("AWS_COPY_IF_NOT_EXISTS", "AWS_S3_LOCKING_PROVIDER")
"""Of the environment: who commits in another way does not notice those who commit as we do."""

_COLOURS = re.compile(r"\x1b\[\d*m|↳")
_BODY = re.compile(r"<(?:\?xml|Error|!doctype|html)\b.*", re.DOTALL | re.IGNORECASE)
_ANSWER = re.compile(r"(status code[\s:]*\d{3}[^:\n]*|error response)[:\n].*", re.DOTALL)
"""What follows the status is the server's, whatever it is written in."""
_USER = re.compile(r"(?<=://)[^/\s@]+@")
_CODE = re.compile(r"<Code>(\w+)</Code>")


def options_of(uri: str) -> dict[str, str] | None:
    """What a table there is opened with; none for a file of this machine. Keys are not among it: each process has its
    own, from its environment. Raises INVALID_CONFIGURATION if that says to commit in another way."""
    if not uri.startswith(SCHEME):
        return None
    for name in _OTHER_WAYS:
        if os.environ.get(name):
            what = f"{name} is set: tables on S3 are committed to by conditional PUTs, and by nothing else"
            raise error(
                "INVALID_CONFIGURATION", what, hint=f"Take {name} out of the environment of driver and workers."
            )
    return dict(_OPTIONS)


def is_table_url(uri: str) -> bool:
    """Whether it is one of a folder in a bucket, and its only name: not `a/./b`, which is `a/b` to the server."""
    return bool(_URL.fullmatch(uri)) and not {".", ".."} & set(uri.split("/"))


def plain(cause: object) -> str:
    """What went wrong, on one line. Of a server's answer only the code: the rest may have the ID of the key. Of its URL
    not who asks."""
    text = _USER.sub("", _COLOURS.sub(" ", str(cause)))
    code = _CODE.search(text)
    said = code[1] if code else ""
    return " ".join(_BODY.sub(said, _ANSWER.sub(rf"\1 {said}", text)).split())
