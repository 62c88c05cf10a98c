"""The SDK of Stripe, whose retries are its own: stripe_sdk.py URL"""

import json
import sys

import stripe

url = sys.argv[1]
client = stripe.StripeClient("sk_test_1", base_addresses={"api": url}, max_network_retries=5)
stripe.max_network_retries = 5
stripe.enable_telemetry = False
for amount in (7, 8):
    intent = client.v1.payment_intents.create({"amount": amount, "currency": "eur"})
    print(json.dumps({"status": intent.last_response.code, "body": intent.id}), flush=True)
# A key of the caller, with another body.
try:
    options = {"idempotency_key": "order-9"}
    client.v1.payment_intents.create({"amount": 9, "currency": "eur"}, options)
    client.v1.payment_intents.create({"amount": 10, "currency": "eur"}, options)
except stripe.StripeError as error:
    print(json.dumps({"status": error.http_status, "body": type(error).__name__}), flush=True)
