"use strict";
const byId = (id) => document.getElementById(id);
const marks = { "in-progress": "▶ in progress", orphaned: "◆ orphaned", "needs-attention": "▲ needs attention", completed: "✓ completed", unreadable: "? unreadable" };
let last = null;
let number = 0;

const newKey = () => {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return `order-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
};

const cell = (text, name) => {
  const element = document.createElement(name || "td");
  element.textContent = text;
  if (name === "th") element.scope = "row";
  return element;
};

const effects = async () => (await (await fetch("executions", { cache: "no-store" })).json()).total;

const add = async (label, answer) => {
  const row = document.createElement("tr");
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  summary.textContent = answer.headers.length ? `${answer.headers.length} headers` : "none";
  const text = document.createElement("pre");
  text.textContent = `${answer.headers.map(([name, value]) => `${name}: ${value}`).join("\n")}\n\n${answer.body}`;
  details.append(summary, text);
  const shown = document.createElement("td");
  shown.append(details);
  const total = await effects();
  byId("effects").textContent = total;
  row.append(cell(label, "th"), cell(answer.status), cell(answer.replayed ? "yes" : "no"),
    cell(answer.execution ? `number ${answer.execution}` : "none"), cell(total), shown);
  byId("responses").prepend(row);
  return total;
};

const send = async (request, signal) => {
  const response = await fetch(request.path, {
    method: "POST", body: request.body, signal, cache: "no-store",
    headers: { "idempotency-key": `"${request.key}"`, "content-type": "text/plain" },
  });
  return {
    status: String(response.status),
    replayed: response.headers.get("idempotent-replayed") === "true",
    execution: response.headers.get("x-execution"),
    headers: [...response.headers],
    body: await response.text(),
  };
};

const say = (text) => { byId("said").textContent = text; };

const begin = (path) => {
  number += 1;
  last = { number, path, key: newKey(), body: byId("body").value };
  byId("key").value = last.key;
  byId("again").disabled = false;
  byId("change").disabled = false;
  return last;
};

const note = byId("entries-note").textContent;

// Returns the states that the store lists. The others have no count, and the browser logs an error for each query of them.
const listedStates = async () => {
  const response = await fetch("console/api/v1/summary", { cache: "no-store" });
  if (!response.ok) throw new Error(`the summary has status ${response.status}`);
  const counts = (await response.json()).states;
  const states = ["in-progress", "orphaned", "needs-attention", "completed"];
  const unlisted = new Intl.ListFormat("en", { type: "disjunction" }).format(states.filter((state) => counts[state] === null));
  byId("entries-note").textContent = unlisted ? `${note} This store lists no ${unlisted} entries.` : note;
  return states.filter((state) => counts[state] !== null);
};

const entries = async () => {
  const rows = [];
  for (const state of await listedStates()) {
    const response = await fetch(`console/api/v1/entries?state=${state}&limit=20`, { cache: "no-store" });
    if (!response.ok) continue;
    for (const entry of (await response.json()).entries) rows.push(entry);
  }
  const body = document.createDocumentFragment();
  for (const entry of rows) {
    const row = document.createElement("tr");
    const id = document.createElement("th");
    const link = document.createElement("a");
    link.href = `console/entries/${entry.id}`;
    link.textContent = entry.id.slice(0, 8);
    id.scope = "row";
    id.append(link);
    row.append(id, cell(marks[entry.state]), cell(`${Math.round(entry.age_ms / 1000)} s`), cell(entry.operation || "–"));
    body.append(row);
  }
  if (byId("entries").contains(document.activeElement)) return;
  byId("entries").replaceChildren(body);
};

const act = (id, run) => {
  byId(id).addEventListener("click", async () => {
    try {
      await run();
    } catch (error) {
      say(`The request failed: ${error.message}`);
    }
    await entries().catch(() => {});
  });
};

act("send", async () => {
  const request = begin("orders");
  const answer = await send(request);
  const total = await add(`order ${request.number}`, answer);
  say(`Status ${answer.status}. The handler ran: ${total} effects so far. Now send it again.`);
});

act("again", async () => {
  const answer = await send(last);
  const total = await add(`order ${last.number}, again`, answer);
  say(answer.replayed
    ? `Status ${answer.status}, replayed from the record. No new effect: still ${total}.`
    : `Status ${answer.status}, not replayed. ${total} effects so far.`);
});

act("ten", async () => {
  const request = begin("slow/300");
  const before = await effects();
  const answers = await Promise.all(Array.from({ length: 10 }, () => send(request)));
  let total = before;
  for (const [at, answer] of answers.entries()) total = await add(`order ${request.number}, ${at + 1} of 10`, answer);
  say(`Ten requests at once had ${total - before} effect. The others were replayed, or got 409 with Retry-After.`);
});

act("hang-up", async () => {
  const request = begin("slow/3000");
  const stop = new AbortController();
  setTimeout(() => stop.abort(), 500);
  await send(request, stop.signal).catch(() => {});
  await add(`order ${request.number}, hung up`, { status: "none", replayed: false, execution: null, headers: [], body: "" });
  say("You hung up after half a second. The handler goes on: send it again, now and in three seconds.");
});

act("change", async () => {
  const answer = await send({ ...last, body: `${last.body}, and a cake` });
  const total = await add(`order ${last.number}, another body`, answer);
  say(`Status ${answer.status}: the key belongs to another request. No new effect: still ${total}.`);
});

byId("order").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("send").click();
});
const refresh = async () => {
  await entries().catch(() => {});
  setTimeout(refresh, 2000);
};
effects().then((total) => { byId("effects").textContent = total; }, () => {});
refresh();
