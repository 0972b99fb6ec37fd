"""The API key."""

from __future__ import annotations

import hmac

from fastapi import Request

from tokenrouter.openai_api.errors import ApiError


async def authorised(request: Request) -> None:
    """A dependency of every path that asks for the key.

    Raises:
        ApiError: 401.
    """
    wanted = request.app.state.settings.api_key
    if wanted is None:
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), wanted.encode()):
        raise ApiError(401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key")
