"""Answers ``GET /metrics`` on a port, for Prometheus: the only thing that a rank offers to whoever can connect.

One thread serves one client after the other. Each has two seconds to send the head of its request, and two to take the
answer, so that no client holds up the others or the end of the job.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import socket
import socketserver
import threading
import time
from collections.abc import Callable

_CLIENT_S = 2.0
_HEAD_NBYTES = 8192
_WAITING_CLIENTS = 8
_POLL_S = 0.1
_PATH = "/metrics"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPort:
    """Serves the text that ``text()`` returns, which is called on the thread of this object, until ``close``.

    Args:
        host: The address to listen on.
        port: The port; 0 for any free one.
        text: Returns the page.

    Raises:
        OSError: Nobody can listen there; the port is in use, for instance.
    """

    def __init__(self, host: str, port: int, text: Callable[[], str]) -> None:
        class Handler(_Handler):
            page = staticmethod(text)

        self._server = _Server((host, port), Handler)
        self.host = host
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="ocomm-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops listening. Waits for the client that is served, four seconds at most."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(http.server.HTTPServer):
    request_queue_size = _WAITING_CLIENTS

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # http.server looks up a name for the address here, which can take long.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing of a client that has gone."""


class _Handler(http.server.BaseHTTPRequestHandler):
    page: Callable[[], str]
    server_version, sys_version = "ocomm", ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BytesIO(_head_of(self.connection))
        self.connection.settimeout(_CLIENT_S)

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != _PATH:
            self.send_error(404, f"only {_PATH} is here")
            return
        body = type(self).page().encode(errors="replace")
        self.send_response(200)
        self.send_header("Content-Type", _TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Says nothing."""


def _head_of(connection: socket.socket) -> bytes:
    """Returns the head of a request, or as much of it as comes within two seconds."""
    head, end_s = b"", time.monotonic() + _CLIENT_S
    with contextlib.suppress(OSError):
        while b"\r\n\r\n" not in head and len(head) < _HEAD_NBYTES and (left := end_s - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (piece := connection.recv(_HEAD_NBYTES - len(head))):
                break
            head += piece
    return head
