"use strict";
// Live counts. Every page works without this script.
(() => {
  const live = document.getElementById("live");
  const watched = document.getElementById("watch");
  const status = document.getElementById("status");
  const source = live || watched;
  if (!source || !window.EventSource) return;
  const setStatus = (text) => { if (status && status.textContent !== text) status.textContent = text; };
  let paused = false;
  let latest = "";
  let before = null;
  // A replaced link would lose the focus of the keyboard.
  const hasFocus = () => live.contains(document.activeElement);
  let hasChanged = false;
  const statusText = () => {
    if (!live) return hasChanged ? "The number of these entries has changed. Reload the page to see them." : "";
    if (paused) return "Paused";
    return latest && hasFocus() ? "Waiting: a link of the counts has the focus" : "Live";
  };
  const show = () => {
    if (paused || !latest) return;
    if (!hasFocus()) {
      live.innerHTML = latest;
      latest = "";
    }
    setStatus(statusText());
  };
  const count = (html) => {
    const part = document.createElement("template");
    part.innerHTML = html;
    const card = part.content.querySelector(`a[href$="state=${source.dataset.state}"] strong`);
    return card && card.textContent;
  };
  const receive = (event) => {
    if (live) {
      latest = event.data;
      show();
      return;
    }
    const now = count(event.data);
    if (before === null) before = now;
    else if (now !== before) hasChanged = true;
    setStatus(statusText());
  };
  const RETRY_MS = 5000;
  let events = null;
  const close = () => {
    if (events) events.close();
    events = null;
  };
  // A browser has few connections to a host. A hidden page uses none of them.
  const follow = () => {
    if (document.hidden) close();
    if (document.hidden || events) return;
    const stream = new EventSource(source.dataset.events);
    events = stream;
    events.addEventListener("counts", receive);
    // The server ends each stream after some minutes, and the browser opens the next one.
    events.addEventListener("open", () => setStatus(statusText()));
    events.addEventListener("error", () => {
      setStatus("Not live: the console does not reply.");
      // After a response with another status, such as 503, the browser does not connect again.
      if (stream.readyState !== EventSource.CLOSED || events !== stream) return;
      close();
      setTimeout(follow, RETRY_MS);
    });
  };
  document.addEventListener("visibilitychange", follow);
  addEventListener("pagehide", close);
  addEventListener("pageshow", follow);
  follow();
  if (!live) return;
  live.addEventListener("focusout", () => setTimeout(show));
  const button = document.getElementById("pause");
  button.hidden = false;
  button.addEventListener("click", () => {
    paused = !paused;
    button.setAttribute("aria-pressed", String(paused));
    setStatus(statusText());
    show();
  });
})();
