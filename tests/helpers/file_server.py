"""HTTP server on this machine that serves one file for download."""

import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer(ThreadingHTTPServer):
    """Serves one file under every path. Attributes, which tests set, make it misbehave; `requests` records paths."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = b""
        self.says_length = True
        self.chunked = False
        self.cut_after: list[int] = []  # number of body bytes that each of the next connections sends before it breaks
        self.errors: dict[str, int] = {}  # path -> status
        self.redirects: dict[str, str] = {}  # path -> address
        self.delay_s = 0.0
        self.requests: list[str] = []  # paths

    def address(self, path: str = "file.zip") -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer

    def do_GET(self) -> None:
        server, path = self.server, self.path[1:]
        server.requests.append(path)
        time.sleep(server.delay_s)
        if path in server.redirects:
            self.answer(302, b"", {"Location": server.redirects[path]})
        elif path in server.errors:
            self.answer(server.errors[path], b"no", {})
        else:
            self.answer(200, server.content, {})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.close_connection = True
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.server.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif self.server.says_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if status < 300 and self.server.cut_after:
            body = body[: self.server.cut_after.pop(0)]
            end = b""
        else:
            end = b"0\r\n\r\n"
        self.wfile.write(b"%x\r\n%b\r\n%b" % (len(body), body, end) if self.server.chunked else body)

    def log_message(self, format: str, *args: object) -> None:
        pass
