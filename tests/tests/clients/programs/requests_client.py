"""requests with the retries of urllib3, and a key of the caller: requests_client.py URL"""

import json
import sys
import uuid

import requests
from urllib3.util import Retry

session = requests.Session()
retries = Retry(total=20, allowed_methods=None, status_forcelist=[409, 425, 429, 500, 502, 503, 504], backoff_factor=0.05)
session.mount("http://", requests.adapters.HTTPAdapter(max_retries=retries))


def order(amount, key):
    response = session.post(sys.argv[1] + "/v1/payment_intents", data={"amount": amount}, headers={"Idempotency-Key": key})
    body = response.json().get("id", "") if response.ok else ""
    print(json.dumps({"status": response.status_code, "body": body}), flush=True)


order(7, str(uuid.uuid4()))
order(8, str(uuid.uuid4()))
order(9, "order-9")
order(10, "order-9")
