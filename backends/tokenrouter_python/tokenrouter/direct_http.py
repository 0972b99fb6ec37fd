"""HTTP to a server on this machine."""

from http import HTTPStatus
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

http_open = build_opener(ProxyHandler({})).open
"""Like `urllib.request.urlopen`, whatever proxy the environment names."""


def is_ok(url: str, timeout_s: float) -> bool:
    """Whether a GET is answered with 200; False if nobody answers."""
    try:
        with http_open(url, timeout=timeout_s) as response:
            return int(response.status) == HTTPStatus.OK
    except HTTPError as exc:
        exc.close()
        return False
    except OSError:
        return False
