"""A document as the JSON body of a response."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


def reply(document: object) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")
