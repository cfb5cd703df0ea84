"""What uvicorn answers by itself, in the API's form, and a bound on what it holds of a request's head."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specdec.router.errors import ApiError

_HEAD_BYTES = 1 << 16
_HEAD_S = 30.0  # for a connection's first request to begin and every head to be whole


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 over llhttp, which bounds neither the size of a head nor its time."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_bytes: int | None = 0  # of the head that is coming; None: none is
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Its first request is waited for from here on."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._head_is_whole()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """It is whole."""
        self._head_is_whole()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Also ends what sends a head without an end."""
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES:
                self._end(ApiError("request_too_large", f"the request's head is larger than {_HEAD_BYTES} bytes"))

    def send_400_response(self, msg: str) -> None:
        """Instead of uvicorn's, which is plain text."""
        self._end(ApiError("invalid_request", msg))

    def _await_head(self) -> None:
        self._head_is_whole()
        self._head_bytes = 0
        late = ApiError("request_timeout", f"the request's head did not come within {_HEAD_S:g} s")
        self._head_timer = self.loop.call_later(_HEAD_S, self._end, late)

    def _head_is_whole(self) -> None:
        self._head_bytes = None
        if self._head_timer is not None:
            self._head_timer.cancel()

    def _end(self, error: ApiError) -> None:
        self._head_is_whole()
        if self.transport.is_closing():
            return
        body = error.body()
        head = b"HTTP/1.1 %d Error\r\ncontent-type: application/json\r\nconnection: close\r\n" % error.status
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()
