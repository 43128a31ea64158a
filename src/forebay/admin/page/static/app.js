// The page: asks the server once a second what is where, and shows it.

import { Bar } from "./bar.js";
import { Charts } from "./charts.js";
import { forgetPalette, paintSwatches } from "./paint.js";
import { jobRow, noticeRow } from "./rows.js";
import { uploadsWhen } from "./spanwords.js";
import { showSchemas } from "./schemas.js";
import { showSubscriptions, subscriptionTable } from "./subscriptions.js";
import { showTiers } from "./tiers.js";
import { bytes, count, duration, make, plural, rate, say } from "./words.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 10000;
const SLOWEST_MS = 5000;
const ANSWER_MS = 30000;
const ROWS_SHOWN = 6;
const TOKEN = "forebay.token";
const THEME = "forebay.theme";

const $ = (id) => document.getElementById(id);
const topics = new Map();
const charts = new Charts($("charts"));
let after = "";
let latest = null;
let failures = 0;
let heard = 0;
let instance = null;
let asked = false;
let timer = 0;
let busy = false;
let queued = null;
let fading = 0;

// ---- asking the server ------------------------------------------------------------------------

async function request(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = { ...(options.headers || {}), ...(token ? { Authorization: "Bearer " + token } : {}) };
  const stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), PATIENCE_MS);
  try {
    return await fetch(path, { ...options, headers, signal: stop.signal, cache: "no-store" });
  } finally {
    clearTimeout(timer);
  }
}

// One at a time, and none while nobody looks.
async function poll() {
  clearTimeout(timer);
  if (document.hidden || busy) return;
  busy = true;
  const going = await ask();
  busy = false;
  if (going) timer = setTimeout(poll, failures ? Math.min(EVERY_MS * failures, SLOWEST_MS) : EVERY_MS);
}

async function ask() {
  try {
    const query = new URLSearchParams({ since: charts.last });
    if (after) query.set("after", after);
    const answer = await request("/v1/overview?" + query);
    if (answer.status === 401) {
      askToken();
      return false;
    }
    if (!answer.ok) throw new Error(await reason(answer));
    const found = await answer.json();
    failures = 0;
    heard = Date.now();
    show(found);
  } catch (error) {
    failures += 1;
    away(error);
  }
  return true;
}

async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return "it answered " + answer.status;
  }
}

async function askSpans(topic, start, end) {
  try {
    const answer = await request("/v1/overview/spans?" + new URLSearchParams({ topic, start, end }));
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

function askToken() {
  setState("locked", "waiting for the token");
  say($("token-wrong"), asked ? "The server does not take this token." : "");
  asked = true;
  if (!$("token").open) $("token").showModal();
  $("token-input").focus();
}

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, $("token-input").value);
  $("token-input").value = "";
  $("token").close();
  poll();
});

$("token").addEventListener("cancel", (event) => event.preventDefault());

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});

// ---- the state of things ----------------------------------------------------------------------

function setState(state, text) {
  $("state").dataset.state = state;
  say($("state-text"), text);
}

function away(error) {
  const told = error.name === "AbortError" || error instanceof TypeError ? "" : " It said: " + error.message + ".";
  const old = heard ? ` What is below is from ${duration((Date.now() - heard) / 1000)} ago.` : "";
  setState("away", "no answer, trying again");
  document.body.classList.add("stale");
  showAlerts([{ kind: "server", level: "error", text: "The server does not answer, trying again." + told + old }]);
}

function showAlerts(found) {
  const box = $("alerts");
  const now = JSON.stringify(found);
  if (box.dataset.shown === now) return;
  box.dataset.shown = now;
  box.replaceChildren(...found.map((each) => make("p", { class: "alert", "data-level": each.level, "data-kind": each.kind },
    make("b", null, { error: "Error", warning: "Warning", info: "Note" }[each.level]), " ", each.text)));
}

function show(found) {
  latest = found;
  asked = false;
  if (instance !== found.server.instance) {
    // Another run of the server counts from the beginning.
    if (instance) charts.clear();
    instance = found.server.instance;
  }
  document.body.classList.remove("stale");
  const trouble = found.alerts.some((each) => each.level !== "info");
  setState(found.server.unready ? "starting" : trouble ? "trouble" : "live", found.server.unready ? "starting" : "live");
  showAlerts(found.alerts);
  showFacts(found);
  showTiers($("tiers"), found);
  showTopics(found);
  showSchemas($("schemas"), found.schemas);
  showJobs(found);
  showNotices(found);
  const empty = found.topics_total === 0;
  $("begin").hidden = !empty;
  $("topics").hidden = $("tiers").hidden = empty;
  $("charts").hidden = empty;
  if (empty) showBeginning();
  charts.add(found.history);
  charts.notes(chartNotes(found));
}

function chartNotes(found) {
  const sum = found.totals, asks = found.requests;
  const waiting = found.topics.reduce((bytes, topic) => bytes + topic.lag.bytes, 0);
  return [
    plural(sum.messages || 0, "message is here", "messages are here"),
    `${bytes(sum.segment_bytes || 0)} on this disk, ${bytes(sum.object_bytes || 0)} in objects`,
    sum.lag_messages ? `${plural(sum.lag_messages, "message")}, ${bytes(waiting)} to upload` : "nothing waits for its upload",
    "by all readers, from whichever tier",
    operations(asks.by_operation),
    `${bytes(asks.bytes_up)} up, ${bytes(asks.bytes_down)} down since the start`,
  ];
}

const OPERATIONS = { get_range: ["read"], put: ["write"], head: ["check"], list: ["listing"], delete: ["deletion"], copy: ["copy", "copies"] };

function operations(list) {
  const sums = new Map();
  for (const each of list) {
    sums.set(each.operation, (sums.get(each.operation) || 0) + each.count);
  }
  return [...sums].sort((one, other) => other[1] - one[1]).slice(0, 4).map(([name, number]) => plural(number, ...(OPERATIONS[name] || [name, name]))).join(", ") || "no requests";
}

function showFacts(found) {
  const server = found.server, store = found.objects;
  const facts = [
    ["data", server.data || "in memory", "wide"],
    ["objects", store.root || store.backend, "wide"],
    ["catalog", server.catalog, ""],
    ["uploads", server.runner ? (server.runner === "spark" ? "Spark" : "inline") : "off", ""],
    ["up", duration(server.up_seconds).replace(/(min|h|d) .*/, "$1"), ""],
  ];
  const list = $("facts");
  if (list.children.length !== facts.length) {
    list.replaceChildren(...facts.map(([name, , kind]) => make("div", { class: kind }, make("dt", null, name), make("dd"))));
  }
  facts.forEach(([, value], at) => {
    const place = list.children[at].lastChild;
    say(place, value);
    place.title = value;
  });
  say($("foot"), `Forebay ${server.version} at ${server.url}` + (server.disk ? `; ${bytes(server.disk.free)} of the disk are free` : ""));
}

// ---- topics -----------------------------------------------------------------------------------

function addTopic(name) {
  const bar = new Bar(name, askSpans);
  const button = (label, text, act) => {
    const made = make("button", { type: "button", class: "quiet", "aria-label": `${label} ${name}`, title: label }, text);
    made.addEventListener("click", act);
    return made;
  };
  const all = button("Show all of", "All", () => bar.fit());
  all.disabled = true;
  bar.onzoom = (zoomed) => {
    all.disabled = !zoomed;
    root.classList.toggle("is-zoomed", zoomed);
  };
  const numbers = make("dl", { class: "numbers" });
  for (const label of ["messages", "appended", "uploaded", "waiting", "uploads"]) numbers.append(make("div", null, make("dt", null, label), make("dd")));
  const lanes = make("div", { class: "lanes", "aria-hidden": "true" }, make("span", null, "memory"), make("span", null, "segments"), make("span", null, "objects"));
  const root = make("article", { class: "topic", "data-topic": name, "aria-label": "Topic " + name },
    make("div", { class: "topic-head" }, make("h3", null, name), numbers,
      make("div", { class: "zoom", role: "group", "aria-label": "Zoom of " + name },
        button("Zoom out of", "−", () => bar.zoom(1 / 2)), button("Zoom into", "+", () => bar.zoom(2)), all)),
    make("p", { class: "trouble", hidden: "" }),
    make("div", { class: "bar-row" }, lanes, bar.canvas), bar.detail, subscriptionTable(name));
  return { bar, root, numbers, subscriptions: root.lastChild };
}

function showTopics(found) {
  const list = $("topic-list");
  const shown = new Set(found.topics.map((topic) => topic.name));
  for (const [name, view] of topics) {
    if (!shown.has(name)) {
      view.root.remove();
      topics.delete(name);
    }
  }
  found.topics.forEach((topic, at) => {
    if (!topics.has(topic.name)) topics.set(topic.name, addTopic(topic.name));
    const view = topics.get(topic.name);
    if (list.children[at] !== view.root) list.insertBefore(view.root, list.children[at] || null);
    showTopic(view, topic);
  });
  say($("topics-count"), found.topics_total > found.topics.length ? `${found.topics.length} of ${count(found.topics_total)}` : count(found.topics_total));
  $("paging").hidden = !found.next && !after;
  $("page-first").disabled = !after;
  $("page-next").disabled = !found.next;
}

const UPLOADED_BY = { owner: "by owner", spark: "on Spark" };

function showTopic(view, topic) {
  const lag = topic.lag;
  const values = [
    count(topic.sizes.messages), rate(topic.rates.appended) + "/s", rate(topic.rates.uploaded) + "/s",
    lag.messages ? `${count(lag.messages)}, ${bytes(lag.bytes)}, ${duration(lag.seconds)}` : "nothing",
    UPLOADED_BY[topic.uploaded_by] || "off",
  ];
  values.forEach((value, at) => say(view.numbers.children[at].lastChild, value));
  const when = uploadsWhen(latest.server, topic);
  view.numbers.children[3].title = lag.messages ? when : "";
  const own = Object.entries(topic.own_settings).map(([key, value]) => `${key}: ${value}`);
  view.numbers.lastChild.title = own.length ? `its own settings: ${own.join(", ")}` : "no settings of its own";
  const trouble = view.root.querySelector(".trouble");
  trouble.hidden = !topic.trouble;
  say(trouble, topic.trouble || "");
  view.root.classList.toggle("closed", !topic.open);
  showSubscriptions(view.subscriptions, topic);
  view.bar.update(topic);
}

$("page-first").addEventListener("click", () => turnTo(""));
$("page-next").addEventListener("click", () => latest && latest.next && turnTo(latest.next));

function turnTo(name) {
  after = name;
  $("topics").focus();
  poll();
}

// ---- jobs and notices -------------------------------------------------------------------------

function showJobs(found) {
  $("jobs").hidden = false;
  $("job-buttons").hidden = !found.server.jobs;
  const driver = found.server.spark;
  say($("driver"), driver ? `${driver.state}, ${driver.master}` + (driver.restarts ? `, ${plural(driver.restarts, "restart")}` : "") : "");
  const rows = found.jobs.length ? found.jobs.map((job) => jobRow(job, found.at)) : [make("li", { class: "none" },
    found.server.jobs ? "No job has run yet." : "This server runs no Spark; forebay up does.")];
  keep($("job-list"), rows);
  if (queued && found.jobs.some((job) => job.id === queued && job.state !== "queued")) answerJob("");
}

// What became of a click. It goes when the job moves on, and in any case after a while.
function answerJob(text, id = null) {
  clearTimeout(fading);
  queued = id;
  say($("job-answer"), text);
  if (text) fading = setTimeout(() => answerJob(""), ANSWER_MS);
}

function showNotices(found) {
  $("notices").hidden = false;
  say($("notices-count"), found.notices.length ? count(found.notices.length) : "");
  const rows = found.notices.length ? found.notices.map((notice) => noticeRow(notice, found.at)) : [make("li", { class: "none" }, "None since the server started.")];
  keep($("notice-list"), rows);
  $("notices").parentElement.classList.toggle("calm", !found.notices.length);
}

// Leaves rows that say the same alone: a selection or a reader in them is not disturbed. The first
// few are shown, whole, and a button shows the others.
function keep(list, rows) {
  const more = document.querySelector(`[aria-controls="${list.id}"]`);
  const open = more.getAttribute("aria-expanded") === "true";
  more.hidden = rows.length <= ROWS_SHOWN;
  say(more, open ? "Show fewer" : `Show ${count(rows.length - ROWS_SHOWN)} more`);
  rows.forEach((row, at) => {
    row.hidden = !open && at >= ROWS_SHOWN;
    const there = list.children[at];
    if (!there) list.append(row);
    else if (there.outerHTML !== row.outerHTML) there.replaceWith(row);
  });
  while (list.children.length > rows.length) list.lastChild.remove();
}

for (const button of document.querySelectorAll(".more")) {
  button.addEventListener("click", () => {
    button.setAttribute("aria-expanded", String(button.getAttribute("aria-expanded") !== "true"));
    showJobs(latest);
    showNotices(latest);
  });
}

for (const button of document.querySelectorAll("[data-job]")) {
  button.addEventListener("click", async () => {
    button.disabled = true;
    const kind = button.dataset.job;
    try {
      const answer = await request("/v1/jobs", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ kind, topics: [] }) });
      if (answer.ok) answerJob(`The ${kind} job is queued.`, (await answer.json()).id);
      else answerJob(`The ${kind} job was not taken: ${await reason(answer)}.`);
    } catch {
      answerJob(`The ${kind} job was not started: the server does not answer.`);
    }
    button.disabled = false;
  });
}

// ---- how to begin, and colours ----------------------------------------------------------------

function showBeginning() {
  const token = sessionStorage.getItem(TOKEN) ? "-H \"Authorization: Bearer $FOREBAY_TOKEN\" " : "";
  say($("begin-curl"), `curl ${token}--data-binary 'hello' ${location.origin}/v1/topics/default/greetings/messages`);
  say($("begin-cli"), `echo hello | forebay produce greetings --url ${location.origin}`);
}

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText($(button.dataset.copy).textContent);
      say(button, "Copied");
    } catch {
      getSelection().selectAllChildren($(button.dataset.copy));
      say(button, "Selected");
    }
    setTimeout(() => say(button, "Copy"), 1500);
  });
}

const THEMES = { auto: "as the system has them", light: "light", dark: "dark" };

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  say($("theme-text"), name);
  $("theme").setAttribute("aria-label", "Colours: " + THEMES[name]);
  repaint();
}

function repaint() {
  forgetPalette();
  paintSwatches();
  charts.repaint();
  for (const { bar } of topics.values()) bar.draw();
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(localStorage.getItem(THEME) || "auto") + 1) % names.length];
  localStorage.setItem(THEME, next);
  setTheme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

setTheme(THEMES[localStorage.getItem(THEME)] ? localStorage.getItem(THEME) : "auto");
poll();
