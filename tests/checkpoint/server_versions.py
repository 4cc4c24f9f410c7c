"""When a server's table is to be read again."""

from collections.abc import Iterable
from datetime import date

from packaging.version import Version

from swa_jax.checkpoint.servers.common import Server

MOST_DAYS = 90


def outdated(server: Server, had: Iterable[str], today: date) -> str | None:
    """Why, in a sentence, if the version that was read is older than that and a newer one of those `had` is there.

    A version that came out since is no reason by itself, and neither is time.
    """
    age = (today - date.fromisoformat(server.released)).days
    newest = max(map(Version, had), default=None)
    if age <= MOST_DAYS or newest is None or newest <= Version(server.version):
        return None
    return f"{server.package} {server.version} was read, which came out {age} days ago; {newest} can be had: read it"
