"""urllib of the standard library, with a loop: urllib_client.py URL"""

import http.client
import json
import sys
import time
import urllib.error
import urllib.request
import uuid


def order(amount, key):
    for _ in range(100):
        headers = {"Idempotency-Key": key, "Content-Type": "application/x-www-form-urlencoded"}
        request = urllib.request.Request(sys.argv[1] + "/v1/payment_intents", f"amount={amount}".encode(), headers)
        try:
            with urllib.request.urlopen(request) as response:
                status, body = response.status, json.load(response)["id"]
            break
        except urllib.error.HTTPError as error:
            status, body = error.code, ""
            if status != 409:
                break
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.05)
    print(json.dumps({"status": status, "body": body}), flush=True)


order(7, str(uuid.uuid4()))
order(8, str(uuid.uuid4()))
order(9, "order-9")
order(10, "order-9")
