// The table of a topic's subscriptions.

import { bytes, count, duration, make, plural, say } from "./words.js";

const HEADS = ["subscription", "type", "consumers", "position", "lag", "outstanding", "redelivered", "dead letters"];

export function subscriptionTable(name) {
  const head = make("tr", null, ...HEADS.map((each, at) => make("th", { scope: "col", class: at > 2 ? "number" : "" }, each)));
  const table = make("table", null, make("caption", { class: "hidden" }, "Subscriptions of " + name), make("thead", null, head), make("tbody"));
  return make("div", { class: "subscriptions", hidden: "" }, table, make("p", { class: "soft" }));
}

// Leaves the table alone while it says the same.
export function showSubscriptions(box, topic) {
  const found = topic.subscriptions || [];
  box.hidden = !found.length;
  const now = JSON.stringify(found);
  if (box.dataset.shown === now) return;
  box.dataset.shown = now;
  box.querySelector("tbody").replaceChildren(...found.flatMap(rows));
  const more = topic.subscriptions_total - found.length;
  say(box.lastChild, more > 0 ? `and ${plural(more, "more subscription")}: forebay subscriptions list ${topic.name}` : "");
}

function rows(each) {
  const numbers = [count(each.position), lag(each), count(each.outstanding), count(each.redelivered), count(each.dead_letters)];
  const row = make("tr", { "data-subscription": each.name, "data-state": each.problem ? "failing" : each.connected ? "used" : "idle" },
    make("th", { scope: "row" }, each.name), make("td", null, each.type), make("td", null, consumers(each)),
    ...numbers.map((text) => make("td", { class: "number" }, text)));
  if (!each.problem) return [row];
  return [row, make("tr", { class: "problem" }, make("td", { colspan: String(HEADS.length), class: "wrong" }, each.problem))];
}

function lag(each) {
  if (!each.lag) return "none";
  const age = each.lag_seconds === null ? "" : ", " + duration(each.lag_seconds);
  return `${count(each.lag)}, ${bytes(each.lag_bytes)}${age}`;
}

function consumers(each) {
  if (!each.connected) return "none";
  const more = each.connected - each.consumers.length;
  return each.consumers.join(", ") + (more > 0 ? ` and ${count(more)} more` : "");
}
