// fetch of Node, with a loop: fetch.mjs URL

import { randomUUID } from "node:crypto";

async function order(amount, key) {
  let status = 0;
  let body = "";
  for (let attempt = 0; attempt < 100; attempt += 1) {
    try {
      const response = await fetch(`${process.argv[2]}/v1/payment_intents`, {
        method: "POST",
        headers: { "Idempotency-Key": key },
        body: new URLSearchParams({ amount }),
      });
      status = response.status;
      body = response.ok ? (await response.json()).id : "";
      if (status !== 409) break;
    } catch {
      // The connection broke.
    }
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  console.log(JSON.stringify({ status, body }));
}

await order("7", randomUUID());
await order("8", randomUUID());
await order("9", "order-9");
await order("10", "order-9");
