"""The router's HTTP applications: the public API, and beside it the admin port's health and metrics."""

import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from specdec.control_auth import ControlAuth
from specdec.errors import SettingsError
from specdec.logs import request_id
from specdec.router import openapi, routes
from specdec.router.admission import Admission
from specdec.router.errors import ApiError, of_status
from specdec.router.fleet import Fleet
from specdec.router.keys import ApiKeys, bearer
from specdec.router.limits import ClientGone, Limits
from specdec.router.loop import speculate
from specdec.router.observed import Observation, Observed
from specdec.router.pairs import Pair, Session
from specdec.router.protocol import Connections
from specdec.router.proxy import Proxy, answer_request_id
from specdec.router.relay import look_after
from specdec.router.settings import RouterSettings
from specdec.router.steps import load_policy
from specdec.router.upstream import Upstream
from specdec.telemetry import RouterMetrics, health_app, health_routes
from specdec.tracing import Tracing

log = logging.getLogger(__name__)
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]
_ENDING = "the router is ending"


class Router:
    """What the applications share."""

    def __init__(self, settings: RouterSettings, tracing: Tracing | None) -> None:
        """Raises SettingsError for a bad policy, for keys or secrets that cannot be read, and where the API would be
        open to others than this machine without anybody having said so."""
        if settings.api_keys_file is None and not settings.on_loopback and settings.auth:
            raise SettingsError(
                f"--host {settings.host}: others could use the API; give --api-keys-file, or say --no-auth"
            )
        self._settings, self._tracing = settings, tracing
        self.metrics = RouterMetrics()
        self._policy = load_policy(settings.policy, settings.steps, settings.max_steps, settings.window, self.metrics)
        self._auth = ControlAuth(
            settings.control_secret_file,
            settings.control_tls_cert,
            settings.control_tls_key,
            settings.control_tls_ca,
        )
        self.keys = None if settings.api_keys_file is None else ApiKeys(settings.api_keys_file, self.metrics)
        self.admission = Admission(
            self._capacity,
            self.metrics,
            max_waiting=settings.max_waiting,
            max_waiting_tokens=settings.max_waiting_tokens,
            max_held_bytes=int(settings.max_waiting_mb * 2**20),
            timeout_s=settings.queue_timeout_s,
        )
        self.fleet = Fleet(settings.pairs, self._pair, self.admission.wake)
        self.proxy: Proxy
        self.connections = Connections()  # of the public port
        self.draining = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Its connections to the pairs are open inside."""
        s = self._settings
        bounds = Limits(
            int(s.max_body_mb * 2**20), s.body_timeout_s, s.max_prompt_tokens, s.max_choices, s.max_logprobs
        )
        upstream = Upstream(s.connect_timeout_s, s.read_timeout_s)
        self.proxy = Proxy(upstream, self.fleet, self.admission, bounds, self.metrics, own_keys=self.keys is not None)
        work = [self.fleet.run(), look_after(self.proxy.relays, self.metrics, s.keepalive_s, s.write_timeout_s)]
        if self.keys is not None:
            work.append(self.keys.follow())
        tasks = [asyncio.create_task(one) for one in work]
        for task in tasks:
            task.add_done_callback(_ended)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.proxy.close()
        await upstream.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.shutdown)

    async def drain(self, grace_s: float) -> None:
        """From now on new requests are refused, readiness says so, and no connection is kept for a next request, which
        would be refused here and answered elsewhere. Returns once none runs; those that still do after `grace_s` are
        cut off with an error."""
        self.draining = True
        self.connections.end()
        log.info("draining: %d requests run", self.proxy.running)
        try:
            async with asyncio.timeout(grace_s):
                while self.proxy.running:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("%d requests are cut off after %g s", self.proxy.running, grace_s)
            for watch in list(self.proxy.watches):
                watch.cut(ApiError("draining", _ENDING))
            await asyncio.sleep(0.1)  # for their last event

    def readiness(self) -> dict[str, Any]:
        """As /readyz says it."""
        states = [
            {
                "pair": pair.address,
                "ready": pair.ready,
                "loop": pair.connected,
                "draft": {"up": pair.description.draft_up, "detail": pair.description.draft_detail}
                if pair.description
                else None,
            }
            for pair in self.fleet.pairs
        ]
        reasons = [] if any(pair.ready for pair in self.fleet.pairs) else ["no pair is ready"]
        if self.draining:
            reasons.append(_ENDING)
        return {"ready": not reasons, "reasons": reasons, "pairs": states}

    def public_readiness(self) -> dict[str, Any]:
        """The same without the pairs' addresses where others than this machine may ask."""
        state = self.readiness()
        return state if self._settings.on_loopback else {"ready": state["ready"], "reasons": state["reasons"]}

    async def answer(self, http: HttpRequest) -> Response:
        """One request's answer. Raises ApiError and ClientGone."""
        if self.draining:
            raise ApiError("draining", _ENDING)
        if self.keys is not None and not _preflight(http):
            self.keys.check(bearer(http.headers.get("authorization"), http.headers.get("x-api-key")))
        path = http.scope["path"]
        if path == "/openapi.json":
            return await self._document()
        if not routes.public(path):
            raise ApiError("not_found", "there is no such route")
        return await self.proxy.forward(http)

    async def _document(self) -> Response:
        answer = await self.proxy.get(b"/openapi.json")
        try:
            return JSONResponse(openapi.document(json.loads(answer), keys=self.keys is not None))
        except (ValueError, AttributeError) as error:
            raise ApiError("engine_unavailable", "the engine does not give its document") from error

    def _capacity(self) -> int:
        ready = [pair.description for pair in self.fleet.pairs if pair.ready and pair.description]
        return self._settings.max_sessions or sum(one.max_sessions for one in ready) or 1 << 16

    def _pair(self, address: str, name: str) -> Pair:
        return Pair(
            address,
            lease_ms=self._settings.lease_ms,
            metrics=self.metrics,
            drive=self._drive,
            auth=self._auth,
            name=name,
            max_step_age_s=self._settings.max_step_age_s,
            gone=getattr(self._policy, "forget", None),
        )

    async def _drive(self, pair: Pair, session: Session) -> None:
        request_id.set(session.request.id)
        try:
            await speculate(session, pair, self._policy)
        except Exception:  # a policy may be anybody's code; without orders the session decodes plainly
            log.exception("the loop of session %d of request %s failed", session.id, session.request.id)


def create_app(settings: RouterSettings, tracing: Tracing | None = None) -> FastAPI:
    """The public application; its lifespan keeps the pairs' streams open. `state.admin` is the admin port's. Raises
    SettingsError."""
    router = Router(settings, tracing)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with router.running():
            yield {"connections": router.connections}

    app = FastAPI(title="specdec", openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.router, app.state.pairs = router, router.fleet.pairs
    app.state.admin = health_app(router.metrics.registry, router.readiness)
    health_routes(app, None, router.public_readiness)

    async def forward(http: HttpRequest) -> Response:
        try:
            return await router.answer(http)
        except ApiError as error:
            router.metrics.rejected.labels(error.code).inc()
            answer = _with_id(error, http)
            # the frames it came through hold the request's body, and some hold it: both would stay until Python looks
            # for cycles
            error.__traceback__ = error.__cause__ = error.__context__ = None
            return answer
        except ClientGone:
            return Response(status_code=499)

    app.add_route("/{path:path}", forward, methods=_METHODS)

    @app.exception_handler(HTTPException)
    async def refused(http: HttpRequest, error: HTTPException) -> Response:
        return _with_id(of_status(error.status_code, str(error.detail)), http)

    @app.exception_handler(Exception)
    async def failed(http: HttpRequest, error: Exception) -> Response:
        return _with_id(ApiError("internal_error", "internal error in the router; its log has the cause"), http)

    tracer = tracing.tracer if tracing else None
    app.add_middleware(Observed, metrics=router.metrics, tracer=tracer, cycle_every=settings.trace_cycles)  # outermost
    return app


def _preflight(http: HttpRequest) -> bool:
    """Whether it is a browser's question before a request of another origin, which cannot have a key, and no body."""
    headers = http.headers
    asks = http.method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers
    return asks and headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers


def _ended(task: "asyncio.Task[None]") -> None:
    """What works in the background works until it is cancelled. Without it the router would serve on and be wrong, so
    the process ends, as by SIGTERM from outside: running answers may end."""
    if not task.cancelled():
        log.critical("a background task has failed; the router ends", exc_info=task.exception())
        signal.raise_signal(signal.SIGTERM)


def _with_id(error: ApiError, http: HttpRequest) -> Response:
    response = error.response()
    response.headers["x-request-id"] = answer_request_id(http, Observation.of(http.scope).id)
    return response
