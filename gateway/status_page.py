"""What `--status-page` serves: /status, a page for browsers, and /v1/cluster, whose answers it shows.

The page's files have no data, so they need no key. The page asks for an operator's key and sends it with each request.
"""

import time
from functools import partial
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import Counter

from gateway.cluster_status import ClusterStatus
from gateway.errors import ApiError
from gateway.keys import ApiKeys

_FILES = Path(__file__).parent / "page"
_PAGE = {"/status": ("status.html", "text/html"), "/status.css": ("status.css", "text/css")}
_PAGE["/status.js"] = ("status.js", "text/javascript")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def status_page_router(cluster: ClusterStatus, keys: ApiKeys | None, refused: Counter) -> APIRouter:
    """keys: None lets everyone see /v1/cluster. refused: counts refusals by reason."""
    router = APIRouter()

    async def file(answer: Response) -> Response:
        return answer

    for path, (name, media_type) in _PAGE.items():
        answer = Response((_FILES / name).read_bytes(), media_type=media_type, headers=_HEADERS)
        router.add_api_route(path, partial(file, answer), methods=["GET"])

    @router.get("/v1/cluster")
    async def report(request: Request) -> Response:
        if keys is not None:
            _check_operator(keys, request, refused)
        return JSONResponse(cluster.report(time.monotonic()), headers={"Cache-Control": "no-store"})

    return router


def _check_operator(keys: ApiKeys, request: Request, refused: Counter) -> None:
    """Raises ApiError (401, 403) for whoever has no operator's key."""
    client = keys.find(request.headers.get("authorization", "").encode("latin-1"))
    if client is None:
        refused.labels(reason="api_key").inc()
        text = "expected an operator's key of this server in the header 'Authorization: Bearer KEY'"
        raise ApiError(401, text, code="invalid_api_key")
    request.scope["access"].client = client.name
    if not client.operates:
        refused.labels(reason="operator").inc()
        text = "only operators see the state of the service: their keys are in --operator-key-file of the gateway"
        raise ApiError(403, text, code="operator_key_required")
