"""What a client may read of an error: nothing of where things lie on the server."""

from __future__ import annotations

import re
from pathlib import Path

# At least two folders deep, and no part of a URL, of a relative path or of a fraction.
_ABSOLUTE = re.compile(r"(?<![\w:/.-])/(?:[^\s/'\":,;()\[\]]+/)+([^\s/'\":,;()\[\]]*)")


def without_paths(text: str, root: Path) -> str:
    """The text with paths in `root` relative to it, and of all other absolute paths the last part only."""
    return _ABSOLUTE.sub(lambda match: match[1], text.replace(f"{root}/", "").replace(str(root), "the repository"))
