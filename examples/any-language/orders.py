"""A service that knows nothing of idempotency keys: orders.py [PORT]

POST and PATCH store an order, at /orders and /orders/rush. GET /count returns how many there are. An order of "crash" is
stored, and then the connection breaks.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PATHS = ("/orders", "/orders/rush")
orders = []
lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.split("?")[0] not in PATHS:
            self.respond(404, "unknown path")
            return
        try:
            item = body.decode()
        except UnicodeDecodeError:
            self.respond(400, "expected text")
            return
        # Each request has a thread.
        with lock:
            orders.append(item)
            order = len(orders)
        if item == "crash":
            self.close_connection = True
            return
        self.respond(201, {"order": order, "item": item})

    do_PATCH = do_POST

    def do_GET(self):
        self.respond(200, len(orders))

    def respond(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 3000), Handler)
print(f"listening on 127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
