// One row for each job and each notice.

import { ago, bytes, clock, count, duration, make, plural } from "./words.js";

const MARKS = { queued: "…", running: "▸", done: "✓", failed: "✕", lost: "?", cancelled: "–" };
const OUTCOMES = { queued: "waiting", running: "running", done: "done", failed: "failed", lost: "lost: its driver ended", cancelled: "cancelled" };

export function jobRow(job, now) {
  const progress = job.progress || { done: 0, total: 0, label: "" };
  const going = job.state === "running" || job.state === "queued";
  const when = job.ended || job.started || job.created;
  const took = job.ended && job.started ? ", took " + duration(job.ended - job.started) : "";
  const head = make("div", { class: "row-head" },
    make("span", { class: "mark", "data-state": job.state, "aria-hidden": "true" }, MARKS[job.state] || "·"),
    make("b", null, job.kind), make("span", { class: "soft" }, job.trigger === "interval" ? "by the interval" : ""),
    make("span", { class: "outcome", "data-state": job.state }, OUTCOMES[job.state] || job.state),
    make("time", { title: clock(when) }, going && job.started ? "for " + duration(now - job.started) : ago(when, now) + took));
  const topics = job.topics && job.topics.length ? job.topics.slice(0, 3).join(", ") + (job.topics.length > 3 ? " and " + plural(job.topics.length - 3, "more", "more") : "") : "all topics";
  const words = job.error || [topics, going ? progress.label : summary(job.summary)].filter(Boolean).join(": ");
  const row = make("li", { class: "row", "data-job-state": job.state }, head, make("p", { class: job.error ? "wrong" : "soft" }, words));
  if (going) row.append(meter(job, progress));
  for (const line of (job.details || []).slice(0, 3)) row.append(make("p", { class: "wrong" }, line));
  return row;
}

function meter(job, progress) {
  const known = progress.total > 0;
  const bar = make("progress", { "aria-label": `Progress of ${job.kind}`, max: known ? String(progress.total) : null, value: known ? String(progress.done) : null });
  const text = known ? `${count(progress.done)} of ${plural(progress.total, "task")}` : job.state === "queued" ? "waiting for its turn" : "working";
  return make("div", { class: "meter" }, bar, make("span", { class: "soft" }, text));
}

function summary(found) {
  const parts = Object.entries(found || {}).filter(([, value]) => value).map(([name, value]) =>
    name.includes("bytes") ? bytes(value) + name.replace("bytes", "").replaceAll("_", " ") : count(value) + " " + (value === 1 ? name.replace(/s$/, "") : name).replaceAll("_", " "));
  return parts.slice(0, 5).join(", ") || "nothing to do";
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
