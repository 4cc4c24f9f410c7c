"""A web server of a test's own, in a thread."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Requests(BaseHTTPRequestHandler):
    """Says nothing of the requests that it answers."""

    def log_message(self, *_: object) -> None:
        pass

    def say(self, data: bytes, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextlib.contextmanager
def web_server(requests: type[Requests], **fields: object) -> Iterator[str]:
    """Its URL, while it runs; a request finds `fields` in its `server`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), requests)
    vars(server).update(fields)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
