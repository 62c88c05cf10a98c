"""A service that knows nothing of idempotency keys: orders.py [PORT]

POST /orders stores an order, and GET /count returns how many there are. An order of "crash" is stored, and then the
connection breaks.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

orders = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        item = self.rfile.read(int(self.headers["Content-Length"])).decode()
        orders.append(item)
        if item == "crash":
            self.close_connection = True
            return
        self.respond(201, {"order": len(orders), "item": item})

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
