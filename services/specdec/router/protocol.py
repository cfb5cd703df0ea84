"""What uvicorn answers by itself, in the API's form."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specdec.router.errors import ApiError


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 over llhttp; what is no HTTP gets the router's 400."""

    def send_400_response(self, msg: str) -> None:
        """Instead of uvicorn's, which is plain text."""
        body = ApiError("invalid_request", msg).body()
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()
