"""Archives as `tar -czf` makes them."""

import io
import tarfile
from collections.abc import Mapping


def tarred(members: Mapping[str, str | bytes]) -> bytes:
    """A .tar.gz with these files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in members.items():
            content = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()
