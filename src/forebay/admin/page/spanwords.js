// What a span is, in words.

import { bytes, clock, count, make, plural } from "./words.js";

export function title(span) {
  const many = span.merged || 1;
  switch (span.tier) {
    case "memory": return span.state === "not synced" ? "In memory, not synced yet" : "In memory";
    case "segment": return many > 1 ? plural(many, "segment") + " from " + span.name + " on" : "Segment " + span.name;
    case "gap": return (span.state === "lost" ? "Lost" : "Missing") + (many > 1 ? ": " + plural(many, "range") : "");
    default: return many > 1 ? plural(many, "object") + " from " + span.name + " on" : "Object " + span.name;
  }
}

const STATES = {
  memory: {
    "synced": "also synced to a segment; kept here for readers at the end of the log",
    "not synced": "a crash now would lose them; the next sync writes them to a segment",
  },
  segment: {
    "not uploaded": "synced; only on this disk until it is uploaded",
    "uploaded": "synced and uploaded; its objects are not verified yet",
    "verified": "synced, uploaded and verified",
    "mixed": "synced; some of it is uploaded",
  },
  object: {
    "not yet read back": "committed; not yet read back and compared",
  },
  verified: {
    "verified": "committed, read back and compared",
  },
  gap: {
    "lost": "these offsets were given out and their messages are gone; readers are told",
    "missing": "no tier holds these offsets: run forebay verify",
  },
};

export function facts(span) {
  const messages = span.end - span.start;
  const found = [["offsets", count(span.start) + " – " + count(span.end - 1) + ", " + plural(messages, span.tier === "gap" ? "offset" : "message")]];
  if (span.bytes !== undefined) found.push(["size", bytes(span.bytes)]);
  const state = (STATES[span.tier] || {})[span.state] || span.state;
  found.push(["state", state]);
  if (span.tier === "segment") {
    found.push(["deletable", deletable(span)]);
  }
  if (span.created) found.push([span.tier === "segment" ? "last written" : "made", clock(span.created)]);
  if ((span.merged || 1) > 1) found.push(["shown", "as one, too narrow to be told apart: zoom in"]);
  return found;
}

function deletable(span) {
  if (span.kept_because === undefined) return "yes, by the next retention pass";
  return span.kept_because === "mixed" ? "some of them" : "no: " + span.kept_because;
}

export function describe(span) {
  const list = make("dl");
  for (const [name, value] of facts(span)) {
    list.append(make("div", null, make("dt", null, name), make("dd", null, value)));
  }
  return [make("strong", { "data-tier": span.tier }, title(span)), list];
}
