"""The page at `/`: a handful of static files of this package, served under a policy that lets in nothing else.

The browser may load scripts and styles from here alone, talk to here alone, and nobody may frame the page. The admin
key that a person types into it therefore has nowhere else to go.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Response

from serving.gateway.errors import ApiError

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    # After an upgrade of the gateway, its own page and no mixture of two.
    "cache-control": "no-cache",
}


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    folder = files("serving.gateway.live") / "page"
    found = {file.name: file for file in folder.iterdir()}
    found |= {f"vendor/{file.name}": file for file in (folder / "vendor").iterdir()}
    # Whatever else lies there, such as a licence or what an editor left, is not of the page.
    contents = {
        name: (file.read_bytes(), _TYPES[ending])
        for name, file in found.items()
        if (ending := name.rpartition(".")[2]) in _TYPES
    }

    # Its addresses are relative to where it is, which a proxy may put anywhere.
    index, _ = contents.pop("index.html")

    @router.get("/")
    async def page() -> Response:
        return Response(index, media_type="text/html", headers=_HEADERS)

    @router.get("/page/{name:path}")
    async def page_file(name: str) -> Response:
        if name not in contents:
            raise ApiError(404, "There is no such file.", code="not_found")
        content, kind = contents[name]
        return Response(content, media_type=kind, headers=_HEADERS)

    return router
