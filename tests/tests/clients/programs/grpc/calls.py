"""Unary calls of grpcio with the retry policy of a service config: calls.py ADDRESS calls COUNT | calls.py ADDRESS refusals

Messages are bytes, so nothing is generated. Each line of the output is the outcome of one call.
"""

import concurrent.futures
import itertools
import json
import re
import sys
import threading
import time

import grpc

WORKERS = 8
SERVICE = "/payments.v1.Payments/"
# The policy retries more codes than it should. The pushback of an error that is final prevents these retries.
POLICY = {
    "maxAttempts": 5,
    "initialBackoff": "0.02s",
    "maxBackoff": "0.5s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "FAILED_PRECONDITION", "INVALID_ARGUMENT"],
}
CONFIG = {"methodConfig": [{"name": [{"service": "payments.v1.Payments"}], "retryPolicy": POLICY}]}

channel = grpc.insecure_channel(
    sys.argv[1],
    options=[
        ("grpc.service_config", json.dumps(CONFIG)),
        ("grpc.initial_reconnect_backoff_ms", 20),
        ("grpc.min_reconnect_backoff_ms", 20),
        ("grpc.max_reconnect_backoff_ms", 100),
        ("grpc.enable_http_proxy", 0),
    ],
)
unary = channel.unary_unary(SERVICE + "Pay")
output = threading.Lock()


def report(name, code, body):
    with output:
        print(json.dumps({"name": name, "status": code, "body": body}), flush=True)


def payment(account, amount):
    return bytes([0x0A, len(account), *account.encode(), 0x10, amount])


def pay(key, message):
    metadata = [("idempotency-key", key)] if key else []
    try:
        return 0, unary(message, metadata=metadata, wait_for_ready=True, timeout=60).hex()
    except grpc.RpcError as error:
        details = dict(error.trailing_metadata()).get("grpc-status-details-bin", b"")
        reason = re.search(rb"IDEMPOTENCY_[A-Z_]+", details)
        return error.code().value[0], reason[0].decode() if reason else error.details()


def calls(count):
    """A call whose attempts are used up is made again with its key, as an application would."""
    again = itertools.count()

    def one(call):
        name = f"call-{call}"
        code, body = pay(name, payment(name, 5))
        while code == grpc.StatusCode.UNAVAILABLE.value[0]:
            next(again)
            code, body = pay(name, payment(name, 5))
        report(name, code, body)

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(one, range(1, count + 1)))
    report("again", next(again), "")


def stream(name, method, messages):
    replies, code = "", 0
    try:
        for reply in channel.stream_stream(SERVICE + method)(iter(messages), metadata=[("idempotency-key", name)]):
            replies += reply.hex() + ";"
    except grpc.RpcError as error:
        code = error.code().value[0]
    report(name, code, replies)


def refusals():
    report("definite", *pay("definite", payment("definite", 5)))
    report("first", *pay("reused", payment("reused", 5)))
    report("reused", *pay("reused", payment("reused", 6)))
    report("missing", *pay(None, payment("missing", 5)))
    first = threading.Thread(target=lambda: report("slow", *pay("slow", payment("slow", 5))))
    first.start()
    time.sleep(0.2)
    report("slow", *pay("slow", payment("slow", 5)))
    first.join()
    stream("watch", "Watch", [b"\x0a\x01w"])
    stream("pay-all", "PayAll", [payment("stream", 5), payment("stream", 6)])


if sys.argv[2] == "refusals":
    refusals()
else:
    calls(int(sys.argv[3]))
