// Scenarios in headless Chromium: node scenarios.mjs NAME URL..
import assert from "node:assert/strict";
import { mkdtempSync, rmSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";

const { chromium } = createRequire(`${process.env.BROWSER_TOOLS}/`)("playwright-core");
const [name, ...urls] = process.argv.slice(2);
const profile = mkdtempSync(join(tmpdir(), "chromium-"));
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM || "/usr/bin/chromium",
  args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync"],
  env: { ...process.env, HOME: profile, XDG_CONFIG_HOME: profile, XDG_CACHE_HOME: profile },
});
const TIMEOUT = 60_000;
const screenshots = process.env.SCREENSHOTS;

// Opens a page whose errors fail the scenario. `expected` is a part of the errors that are expected.
const open = async (options = {}, expected = null) => {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, reducedMotion: "reduce", ...options });
  context.setDefaultTimeout(TIMEOUT);
  const page = await context.newPage();
  page.errors = [];
  const note = (text) => { if (!expected || !text.includes(expected)) page.errors.push(text); };
  page.on("console", (message) => { if (["error", "warning"].includes(message.type())) note(message.text()); });
  page.on("pageerror", (error) => note(String(error)));
  page.on("dialog", (dialog) => { note(`dialog: ${dialog.message()}`); dialog.dismiss(); });
  return page;
};
const close = async (page) => {
  assert.deepEqual(page.errors, [], "errors in the browser's console");
  await page.context().close();
};
const shot = async (page, file, height = 800) => {
  if (!screenshots) return;
  await page.setViewportSize({ width: 1280, height });
  await page.screenshot({ path: join(screenshots, file) });
};

// Fails if a control has no name in the accessibility tree.
const checkNames = async (page) => {
  const session = await page.context().newCDPSession(page);
  const { nodes } = await session.send("Accessibility.getFullAXTree");
  const roles = ["button", "link", "textbox", "checkbox", "combobox", "searchbox", "table", "region", "navigation", "form", "image", "img"];
  const controls = nodes.filter((node) => !node.ignored && roles.includes(node.role?.value));
  assert.ok(controls.length > 4, "the tree has controls");
  for (const node of controls) assert.ok(node.name?.value?.trim(), `${node.role.value} without a name at ${page.url()}`);
  await session.detach();
};

// Fails if a text has less contrast than 4.5 against its background.
const checkContrast = async (page) => {
  // Without its styles a page has other colours.
  await page.waitForLoadState("load");
  const low = await page.evaluate(() => {
    const parse = (color) => (color.match(/[\d.]+/g) || []).map(Number);
    const luminance = ([r, g, b]) => {
      const part = (value) => { const v = value / 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
      return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
    };
    const behind = (element) => {
      for (let it = element; it; it = it.parentElement) {
        const color = parse(getComputedStyle(it).backgroundColor);
        if (color.length === 3 || color[3] > 0.99) return color;
      }
      return [255, 255, 255];
    };
    const found = [];
    for (const element of document.querySelectorAll("body *")) {
      const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
      if (!hasText || !element.checkVisibility() || element.closest("noscript")) continue;
      const style = getComputedStyle(element);
      const text = parse(element.closest("svg") ? style.fill : style.color);
      const [a, b] = [luminance(text), luminance(behind(element))].sort((x, y) => y - x);
      const ratio = (a + 0.05) / (b + 0.05);
      if (ratio < 4.5) found.push(`${element.tagName} ${element.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
    }
    return found;
  });
  assert.deepEqual(low, [], `contrast at ${page.url()}`);
};

const tabTo = async (page, matches) => {
  for (let presses = 0; presses < 80; presses += 1) {
    await page.keyboard.press("Tab");
    const focus = await page.evaluate(() => {
      const it = document.activeElement;
      const style = getComputedStyle(it);
      const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
      return { text: (it.textContent || "").trim(), id: it.id, label: it.getAttribute("aria-label") || "", ring };
    });
    assert.ok(focus.ring, `focus is visible at ${JSON.stringify(focus)}`);
    if (matches(focus)) return;
  }
  assert.fail(`no such control at ${page.url()}`);
};

const scenarios = {
  async pages() {
    const [root, entry] = urls;
    const bad = await open({}, "status of 40");
    await bad.goto(`${root}/entries?state=nonsense`);
    await checkContrast(bad);
    await checkNames(bad);
    assert.match(await bad.textContent("main"), /400/);
    await close(bad);
    for (const colorScheme of ["light", "dark"]) {
      for (const javaScriptEnabled of [true, false]) {
        for (const width of [1280, 390]) {
          const page = await open({ colorScheme, javaScriptEnabled, viewport: { width, height: 800 } });
          for (const url of [root, `${root}/entries?state=orphaned`, `${root}/entries?state=completed`, entry,
            `${entry}/resolve?how=delete-record`, `${root}/find`, `${root}/audit`]) {
            // Event streams never end, so the page is loaded when its document is.
            const response = await page.goto(url, { waitUntil: "domcontentloaded" });
            assert.equal(response.status(), 200, url);
            await checkContrast(page);
            await checkNames(page);
            const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
            assert.ok(wide <= 0, `${url} is wider than ${width}`);
          }
          const dark = await page.evaluate(() => getComputedStyle(document.documentElement).backgroundColor);
          assert.equal(dark === "rgb(18, 22, 28)", colorScheme === "dark");
          await close(page);
        }
      }
    }
  },

  async keyboard() {
    const page = await open();
    await page.goto(urls[0], { waitUntil: "domcontentloaded" });
    await page.keyboard.press("Tab");
    assert.match(await page.evaluate(() => document.activeElement.textContent), /Skip/);
    await page.keyboard.press("Enter");
    await tabTo(page, ({ text }) => text.includes("needs attention"));
    await page.keyboard.press("Enter");
    await page.waitForURL(/state=needs-attention/);
    await tabTo(page, ({ text }) => /^[0-9a-f]{8}$/.test(text));
    await page.keyboard.press("Enter");
    await page.waitForURL(/entries\/[0-9a-f]{64}/);
    await tabTo(page, ({ text }) => text === "Free the key…");
    await page.keyboard.press("Enter");
    await page.waitForURL(/how=free/);
    await tabTo(page, ({ id }) => id === "reason");
    await page.keyboard.type("by keyboard");
    await tabTo(page, ({ id }) => id === "confirm");
    await page.keyboard.press("Space");
    await tabTo(page, ({ text }) => text === "Free the key");
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { name: "Done: Free the key" }).waitFor();
    await tabTo(page, ({ text }) => text === "Back to the list");
    await page.keyboard.press("Enter");
    await page.waitForURL(/state=needs-attention/);
    await page.getByText("No entry has the state needs attention").waitFor();
    await close(page);
  },

  async "no-scripts"() {
    const page = await open({ javaScriptEnabled: false });
    await page.goto(urls[0]);
    await page.getByRole("link", { name: /Reload every/ }).click();
    assert.equal(await page.locator("meta[http-equiv=refresh]").count(), 1);
    await page.goto(`${urls[0]}/entries?state=needs-attention`);
    await page.locator("tbody a").first().click();
    await page.getByRole("link", { name: "Free the key" }).click();
    await page.getByLabel("Reason, for the audit log").fill("without scripts");
    await page.getByLabel("I have read what happens afterwards.").check();
    await page.getByRole("button", { name: "Free the key" }).click();
    await page.getByRole("heading", { name: "Done: Free the key" }).waitFor();
    await page.goto(`${urls[0]}/entries?state=orphaned&operation=POST+%2Forders%2F`);
    for (const box of await page.getByRole("checkbox").all()) await box.check();
    await page.getByLabel("For ticked entries").selectOption("retry");
    await page.getByRole("button", { name: "Review" }).click();
    await page.getByRole("heading", { name: "Allow one retry: 3 entries" }).waitFor();
    await page.getByLabel("Reason, for the audit log").fill("without scripts");
    await page.getByRole("button", { name: "Allow one retry: 3" }).click();
    await page.getByRole("heading", { name: "3 of 3 done" }).waitFor();
    await page.getByRole("link", { name: "Back to the list" }).click();
    assert.match(page.url(), /state=orphaned&operation=POST/, "the filter is kept");
    assert.equal(await page.getByText("retry allowed").count(), 3);
    await close(page);
  },

  async "two-operators"() {
    const first = await open({ extraHTTPHeaders: { "x-actor": "resolve:first" } });
    const second = await open({ extraHTTPHeaders: { "x-actor": "resolve:second" } }, "status of 409");
    for (const page of [first, second]) {
      await page.goto(`${urls[0]}/resolve?how=retry`);
      await page.getByLabel("Reason, for the audit log").fill("two operators");
    }
    await first.getByRole("button", { name: "Allow one retry" }).click();
    await first.getByRole("heading", { name: "Done: Allow one retry" }).waitFor();
    await second.getByRole("button", { name: "Allow one retry" }).click();
    await second.getByRole("heading", { name: "Conflict: the entry has changed" }).waitFor();
    await second.getByRole("row", { name: /As you saw it/ }).waitFor();
    await second.getByRole("row", { name: /Now/ }).waitFor();
    await checkNames(second);
    await checkContrast(second);
    await close(first);
    await close(second);
  },

  async prefixes() {
    for (const url of urls) {
      const page = await open();
      await page.goto(url, { waitUntil: "domcontentloaded" });
      const prefix = url.replace(/\/$/, "");
      const styled = await page.evaluate(() => getComputedStyle(document.body).margin);
      assert.equal(styled, "0px", "the style sheet is loaded");
      await page.getByRole("button", { name: "Pause updates" }).waitFor();
      await page.getByText("Live", { exact: true }).waitFor();
      for (const [link, path] of [["Entries", "entries"], ["Find", "find"], ["Audit", "audit"], ["Overview", "overview"]]) {
        await page.getByRole("navigation", { name: "Console" }).getByRole("link", { name: link }).click();
        await page.waitForURL(`${prefix}/${path}`);
        await page.getByRole("heading", { level: 1 }).waitFor();
      }
      await page.getByRole("link", { name: /orphaned/ }).click();
      await page.locator("tbody a").first().click();
      await page.getByRole("link", { name: "Allow one retry" }).click();
      await page.getByRole("link", { name: "Cancel" }).click();
      await page.getByRole("heading", { name: /Entry/ }).waitFor();
      await close(page);
    }
  },

  async "client-scripts"() {
    const page = await open();
    for (const url of urls) {
      if (url.endsWith("/body")) {
        const download = page.waitForEvent("download");
        await page.goto(url).catch(() => {});
        assert.match((await download).suggestedFilename(), /^body-[0-9a-f]{8}\.txt$/);
        continue;
      }
      await page.goto(url, { waitUntil: "domcontentloaded" });
      assert.equal(await page.locator("script").count(), 1, url);
      assert.equal(await page.locator("img").count(), 0, url);
      assert.equal(await page.evaluate(() => window.ran), undefined, url);
      assert.ok(url === urls[0] || (await page.textContent("main")).includes("window.ran="), url);
    }
    await close(page);
  },

  async live() {
    const [root, id] = urls;
    const page = await open();
    await page.goto(root, { waitUntil: "domcontentloaded" });
    const count = page.locator("a[href$='state=needs-attention'] strong");
    assert.equal(await count.textContent(), "1");
    await page.getByText("Live", { exact: true }).waitFor();
    await page.getByRole("button", { name: "Pause updates" }).click();
    await page.getByText("Paused", { exact: true }).waitFor();
    const stamp = (of) => of.locator("time").first().textContent();
    const paused = await stamp(page);
    const other = await open();
    await other.goto(root, { waitUntil: "domcontentloaded" });
    await other.getByText("Live", { exact: true }).waitFor();
    const entry = await (await fetch(`${root}/api/v1/entries/${id}`)).json();
    const freed = await fetch(`${root}/api/v1/entries/${id}/resolve`, {
      method: "POST", headers: { "content-type": "application/json" },
      body: JSON.stringify({ seen: entry.seen, how: "free", reason: "live" }),
    });
    assert.equal(freed.status, 200);
    const showsNone = () => document.querySelector("a[href$='state=needs-attention'] strong").textContent === "0";
    const isLater = (before) => document.querySelector("time").textContent !== before;
    // The server sends each event to both pages. The next event follows the one with the new count.
    await other.waitForFunction(showsNone, null, { polling: 50 });
    await other.waitForFunction(isLater, await stamp(other), { polling: 50 });
    await close(other);
    assert.equal(await count.textContent(), "1", "a paused page does not change");
    assert.equal(await stamp(page), paused);
    await page.getByRole("button", { name: "Pause updates" }).click();
    await page.waitForFunction(showsNone, null, { polling: 50 });
    // A link of the counts keeps the focus, so the counts stay.
    await page.locator("a[href$='state=needs-attention']").focus();
    await page.getByText("Waiting: a link of the counts has the focus", { exact: true }).waitFor();
    await page.getByRole("button", { name: "Pause updates" }).focus();
    await page.getByText("Live", { exact: true }).waitFor();
    await close(page);
  },

  async "rejected-stream"() {
    const page = await open({}, "status of 503");
    let streams = 0;
    let release;
    const released = new Promise((resolve) => { release = resolve; });
    await page.route("**/events*", async (route) => {
      streams += 1;
      if (streams === 1) return route.fulfill({ status: 503, body: "" });
      await released;
      return route.continue();
    });
    await page.goto(urls[0], { waitUntil: "domcontentloaded" });
    await page.getByText("Not live: the console does not reply.").waitFor();
    // The second stream would change the text.
    release();
    await page.getByText("Live", { exact: true }).waitFor();
    assert.equal(streams, 2);
    await close(page);
  },

  async "other-origin"() {
    const [url, seen] = urls;
    const form = `<form method="post" action="${url}"><input name="seen" value="${seen}"><input name="how" value="retry">
      <input name="reason" value="x"><button>Go</button></form>`;
    const server = createServer((_, response) => { response.setHeader("content-type", "text/html"); response.end(form); });
    await new Promise((done) => server.listen(0, "127.0.0.1", done));
    const page = await open({}, "status of 40");
    for (const host of ["127.0.0.1", "localhost"]) {
      await page.goto(`http://${host}:${server.address().port}/`);
      const responded = page.waitForResponse((response) => response.url() === url);
      await page.getByRole("button", { name: "Go" }).click();
      assert.equal((await responded).status(), 403);
    }
    server.close();
    await close(page);
  },

  async "key-of-other-origin"() {
    const [shop, described, unexposed, unlisted] = urls;
    const page = await open({}, "blocked by CORS policy");
    await page.goto(shop, { waitUntil: "domcontentloaded" });
    const pay = (url) => page.evaluate(async (it) => {
      const headers = { "content-type": "application/json", "idempotency-key": '"order-1"' };
      const response = await fetch(it, { method: "POST", body: "{}", headers }).catch(() => null);
      return response && [response.status, await response.text(), response.headers.get("idempotent-replayed")];
    }, url);
    assert.deepEqual(await pay(described), [200, "1", null]);
    assert.deepEqual(await pay(described), [200, "1", "true"]);
    assert.deepEqual(await pay(unexposed), [200, "1", null], "the marker is hidden");
    assert.deepEqual(page.errors, []);
    assert.equal(await pay(unlisted), null, "the preflight fails");
    await page.context().close();
  },

  async playground() {
    const page = await open({ viewport: { width: 1280, height: 860 } }, "status of 4");
    await page.goto(urls[0]);
    const responses = page.locator("#responses tr");
    const statusLine = page.getByRole("status");
    const press = async (button, rows, text) => {
      await page.getByRole("button", { name: button }).click();
      await page.waitForFunction((count) => document.querySelectorAll("#responses tr").length === count, rows);
      await statusLine.getByText(text).waitFor();
    };
    const newest = () => responses.first().locator("td").allTextContents();
    const effects = () => page.locator("#effects").textContent();
    await press("Send a request", 1, "Now send it again");
    assert.deepEqual((await newest()).slice(0, 4), ["201", "no", "number 1", "1"]);
    await press("Send it again", 2, "replayed from the record");
    assert.deepEqual((await newest()).slice(0, 4), ["201", "yes", "number 1", "1"]);
    await page.locator("#entries").getByText("✓ completed").first().waitFor();
    assert.doesNotMatch(await page.textContent("#entries-note"), /lists no/);
    await press("Change the body", 3, "belongs to another request");
    assert.deepEqual((await newest()).slice(0, 4), ["422", "no", "none", "1"]);
    await press("Send ten at once", 13, "had 1 effect");
    assert.equal(await effects(), "2");
    let rows = 13;
    let total = 2;
    const end = Date.now() + TIMEOUT;
    // If the browser or the playground stalls for half a second, the playground does not execute the request.
    while (total === 2) {
      assert.ok(Date.now() < end, "a request that was hung up executes");
      rows += 1;
      await press("Hang up", rows, "You hung up");
      // A request that the playground has read is executed within 10 s.
      for (let polls = 0; polls < 100 && total === 2; polls += 1) {
        await page.waitForTimeout(100);
        total = await page.evaluate(async () => (await (await fetch("executions", { cache: "no-store" })).json()).total);
      }
    }
    // The handler ends after three seconds, and the retry is then replayed.
    for (let tries = 0; tries < 60; tries += 1) {
      rows += 1;
      await page.getByRole("button", { name: "Send it again" }).click();
      await page.waitForFunction((count) => document.querySelectorAll("#responses tr").length === count, rows);
      if ((await newest())[1] === "yes") break;
      await page.waitForTimeout(1000);
    }
    assert.deepEqual((await newest()).slice(0, 4), ["201", "yes", `number ${total}`, String(total)]);
    await checkNames(page);
    await checkContrast(page);
    await shot(page, "playground.png", 760);
    await page.locator("#entries a").first().click();
    await page.getByRole("heading", { name: /Entry/ }).waitFor();
    await close(page);
    const dark = await open({ colorScheme: "dark", viewport: { width: 390, height: 800 } });
    await dark.goto(urls[0]);
    await checkContrast(dark);
    const wide = await dark.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    assert.ok(wide <= 0, "the playground fits a telephone");
    await close(dark);
  },

  // A query of the completed entries would be an error in the browser's console.
  async "playground-without-completed"() {
    const [root] = urls;
    const page = await open();
    await page.goto(root);
    await page.getByText("This store lists no completed entries.").waitFor();
    const statusLine = page.getByRole("status");
    await page.getByRole("button", { name: "Send a request" }).click();
    await statusLine.getByText("Now send it again").waitFor();
    await page.getByRole("button", { name: "Send it again" }).click();
    await statusLine.getByText("replayed from the record").waitFor();
    fetch(`${root}slow/60000`, { method: "POST", body: "tea", headers: { "idempotency-key": '"slow"' } }).catch(() => {});
    await page.locator("#entries").getByText("▶ in progress").waitFor();
    assert.equal(await page.locator("#entries tr").count(), 1, "the completed entry is not listed");
    await checkContrast(page);
    await close(page);
  },
};

// Not a test: writes the images of the documents to the directory SCREENSHOTS, from a running playground.
scenarios.screenshots = async () => {
  const [root] = urls;
  const post = (path, key) => fetch(`${root}${path}`, { method: "POST", body: "tea", headers: { "idempotency-key": `"${key}"` } });
  const end = Date.now() + 150_000;
  for (let n = 0; Date.now() < end; n += 1) {
    await post("orders", `o-${n}`);
    if (n % 2) await post("orders", `o-${n}`);
    if (n % 5 === 0) await post("orders", `o-${n - 1}`);
    if (n % 9 === 0) await Promise.all([post("slow/400", `s-${n}`), post("slow/400", `s-${n}`)]);
    if (n % 150 === 100) await post("attention", `a-${n}`);
    await new Promise((done) => setTimeout(done, 150 + 250 * Math.abs(Math.sin(n / 40))));
  }
  post("slow/60000", "slow-1").catch(() => {});
  const page = await open();
  await page.goto(`${root}console/entries?state=needs-attention`, { waitUntil: "domcontentloaded" });
  await page.locator("tbody a").last().click();
  await page.getByRole("link", { name: "Allow one retry" }).click();
  await page.getByLabel("Reason, for the audit log").fill("ticket 17: the refund was not sent");
  await page.getByRole("button", { name: "Allow one retry" }).click();
  await page.goto(`${root}console/overview`, { waitUntil: "domcontentloaded" });
  await page.waitForTimeout(3000);
  await shot(page, "overview.png", 700);
  await page.goto(`${root}console/entries?state=needs-attention`, { waitUntil: "domcontentloaded" });
  await page.locator("tbody a").first().click();
  await page.getByRole("heading", { name: /Entry/ }).waitFor();
  await shot(page, "entry.png", 640);
  await close(page);
};

let status = 0;
try {
  await scenarios[name]();
} catch (error) {
  console.error(error);
  status = 1;
}
await browser.close();
rmSync(profile, { recursive: true, force: true });
process.exit(status);
