"""grpcio with the retry policy of a service config, which retries without the caller: grpcio_client.py URL"""

import json
import re
import sys
import uuid

import grpc

POLICY = {
    "maxAttempts": 5,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
CONFIG = {"methodConfig": [{"name": [{"service": "payments.v1.Payments"}], "retryPolicy": POLICY}]}

channel = grpc.insecure_channel(
    sys.argv[1].removeprefix("http://"),
    # The channel connects again at once. By default it waits for a second.
    options=[
        ("grpc.service_config", json.dumps(CONFIG)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 100),
        ("grpc.enable_http_proxy", 0),
    ],
)
# Without serializers, messages are bytes.
pay = channel.unary_unary("/payments.v1.Payments/Pay")


def order(amount, key):
    metadata = [("idempotency-key", key)] if key else []
    try:
        code, body = 0, pay(f"amount={amount}".encode(), metadata=metadata, wait_for_ready=True, timeout=60).decode()
    except grpc.RpcError as error:
        code = error.code().value[0]
        details = dict(error.trailing_metadata()).get("grpc-status-details-bin", b"")
        reason = re.search(rb"IDEMPOTENCY_[A-Z_]+", details)
        body = reason[0].decode() if reason else error.details()
    print(json.dumps({"status": code, "body": body}), flush=True)


order(7, str(uuid.uuid4()))
order(8, str(uuid.uuid4()))
order(9, "order-9")
order(10, "order-9")
order(11, None)
