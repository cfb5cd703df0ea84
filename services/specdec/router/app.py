"""The router's HTTP application."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from specdec.logs import request_id
from specdec.router.loop import speculate
from specdec.router.observed import Observation, Observed
from specdec.router.pairs import Pair, Session
from specdec.router.proxy import ApiError, ClientGone, Proxy, answer_request_id, choose
from specdec.router.settings import RouterSettings
from specdec.router.steps import load_policy
from specdec.telemetry import RouterMetrics, health_routes
from specdec.tracing import Tracing

log = logging.getLogger(__name__)
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]


def create_app(settings: RouterSettings, tracing: Tracing | None = None) -> FastAPI:
    """The application; its lifespan keeps the pairs' streams open. Raises SettingsError for a bad policy."""
    metrics = RouterMetrics()
    policy = load_policy(settings.policy, settings.steps, settings.max_steps, settings.window, metrics)

    async def drive(pair: Pair, session: Session) -> None:
        request_id.set(session.request.id)
        try:
            await speculate(session, pair, policy)
        except Exception:  # a policy may be anybody's code; without orders the session decodes plainly
            log.exception("the loop of session %d of request %s failed", session.id, session.request.id)

    pairs = [Pair(address, lease_ms=settings.lease_ms, metrics=metrics, drive=drive) for address in settings.pairs]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        timeout = httpx.Timeout(settings.read_timeout_s, connect=settings.connect_timeout_s)
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=64,
            keepalive_expiry=2,  # vLLM closes after 5 s: a connection must not be used while it does
        )
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
            app.state.proxy = Proxy(client, metrics, int(settings.max_body_mb * 2**20))
            tasks = [asyncio.create_task(pair.run()) for pair in pairs]
            yield
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if tracing is not None:
            await asyncio.to_thread(tracing.shutdown)

    app = FastAPI(title="specdec", openapi_url=None, lifespan=lifespan)
    app.state.pairs = pairs

    def readiness() -> dict[str, Any]:
        states = [
            {
                "pair": pair.address,
                "ready": pair.ready,
                "loop": pair.connected,
                "draft": {"up": pair.description.draft_up, "detail": pair.description.draft_detail}
                if pair.description
                else None,
            }
            for pair in pairs
        ]
        ready = any(pair.ready for pair in pairs)
        return {"ready": ready, "reasons": [] if ready else ["no pair is ready"], "pairs": states}

    health_routes(app, metrics.registry, readiness)

    @app.api_route("/{path:path}", methods=_METHODS)
    async def forward(http: HttpRequest) -> Response:
        response: Response
        try:
            response = await app.state.proxy.forward(http, choose(pairs))
            return response
        except ApiError as error:
            response = error.response()
            response.headers["x-request-id"] = answer_request_id(http, Observation.of(http.scope).id)
            return response
        except ClientGone:
            return Response(status_code=499)

    @app.exception_handler(HTTPException)
    async def refused(http: HttpRequest, error: HTTPException) -> Response:
        return ApiError(error.status_code, str(error.detail)).response()

    @app.exception_handler(Exception)
    async def failed(http: HttpRequest, error: Exception) -> Response:
        return ApiError(500, "internal error in the router; its log has the cause", "server_error").response()

    tracer = tracing.tracer if tracing else None
    app.add_middleware(Observed, metrics=metrics, tracer=tracer, cycle_every=settings.trace_cycles)  # outermost: last
    return app
