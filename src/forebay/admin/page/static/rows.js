// One row for each job and each notice.

import { ago, bytes, clock, count, duration, make, noun, plural } from "./words.js";

const MARKS = { queued: "…", running: "▸", done: "✓", failed: "✕", lost: "?", cancelled: "–" };
const OUTCOMES = { queued: "waiting", running: "running", done: "done", failed: "failed", lost: "lost: its driver ended", cancelled: "cancelled" };

const BRIEF_SECONDS = 5;
const DID = { offload: "uploaded", verify: "read back", compact: "written" };

export function jobRow(job, now) {
  const progress = job.progress || { done: 0, total: 0, label: "" };
  const going = job.state === "running" || job.state === "queued";
  const when = job.ended || job.started || job.created;
  const times = job.attempts > 1 ? `${count(job.attempts)} times` : job.runs > 1 ? `${count(job.runs)} runs` : "";
  const took = job.ended && job.started ? ", took " + duration(job.ended - job.started) : "";
  const head = make("div", { class: "row-head" },
    make("span", { class: "mark", "data-state": job.state, "aria-hidden": "true" }, MARKS[job.state] || "·"),
    make("b", null, job.kind), make("span", { class: "soft" }, job.trigger === "interval" ? "by the interval" : "requested"),
    make("span", { class: "outcome", "data-state": job.state }, OUTCOMES[job.state] || job.state),
    times ? make("span", { class: "times", title: "since " + clock(job.since || job.created) }, times) : null,
    make("time", { title: clock(when) }, going && job.started ? "for " + duration(now - job.started) : ago(when, now) + took));
  // A cycle that runs for a moment does not take the place of what the ones before it did.
  const brief = going && job.runs > 0 && now - job.started < BRIEF_SECONDS;
  const told = going && !brief ? progress.label : summary(job);
  const words = job.error || [named(job.topics || []), told].filter(Boolean).join(": ");
  const row = make("li", { class: "row", "data-job-state": job.state, "data-trigger": job.trigger }, head, make("p", { class: job.error ? "wrong" : "soft" }, words));
  if (going && !brief) row.append(meter(job, progress));
  for (const line of (job.details || []).slice(0, 3)) row.append(make("p", { class: "wrong" }, line));
  return row;
}

function named(topics) {
  return topics.slice(0, 3).join(", ") + (topics.length > 3 ? ` and ${count(topics.length - 3)} more` : "");
}

function meter(job, progress) {
  const known = progress.total > 0;
  const bar = make("progress", { "aria-label": `Progress of ${job.kind}`, max: known ? String(progress.total) : null, value: known ? String(progress.done) : null });
  const text = known ? `${count(progress.done)} of ${plural(progress.total, "task")}` : job.state === "queued" ? "waiting for its turn" : "working";
  return make("div", { class: "meter" }, bar, make("span", { class: "soft" }, text));
}

// "1 object with 3 messages (327 B) uploaded; 4 topics looked at".
function summary(job) {
  const { topics, objects, messages, bytes: size, ...others } = job.summary || {};
  const parts = [];
  if (objects) parts.push(plural(objects, "object") + (messages ? " with " + plural(messages, "message") : "") + (size ? ` (${bytes(size)})` : "") + ` ${DID[job.kind] || "done"}`);
  else if (job.state === "done") parts.push("nothing to do");
  for (const [name, value] of Object.entries(others)) {
    if (value) parts.push(name.includes("bytes") ? `${name.replace("bytes", "").replaceAll("_", " ").trim()} ${bytes(value)}` : `${count(value)} ${noun(value, name.replace(/s$/, ""), name).replaceAll("_", " ")}`);
  }
  if (topics && !(job.topics || []).length) parts.push(plural(topics, "topic") + " looked at");
  return parts.join("; ");
}

export function noticeRow(notice, now) {
  const { error, topic, ...others } = notice.fields;
  const more = Object.entries(others).map(([name, value]) => `${name} ${value}`).join(", ");
  const text = notice.text.charAt(0).toUpperCase() + notice.text.slice(1);
  return make("li", { class: "row", "data-level": notice.level },
    make("div", { class: "row-head" },
      make("span", { class: "mark", "data-state": notice.level === "error" ? "failed" : "warning", "aria-label": notice.level }, notice.level === "error" ? "✕" : "!"),
      make("b", null, text), topic ? make("code", null, topic) : null,
      notice.count > 1 ? make("span", { class: "times", title: "since " + clock(notice.first) }, count(notice.count) + " times") : null,
      make("time", { title: clock(notice.last) }, ago(notice.last, now))),
    error || more ? make("p", { class: "soft" }, [error, more].filter(Boolean).join("; ")) : null);
}
