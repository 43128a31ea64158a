// What a span is, in words.

import { bytes, clock, count, duration, make, plural } from "./words.js";

let waits = "";

// When what waits is uploaded, from the settings of the server and of the topic.
export function uploadsWhen(server, topic) {
  const own = topic.own_settings;
  const messages = own.max_object_messages || server.max_object_messages;
  const size = own.max_object_bytes === "null" ? "the largest possible object" : own.max_object_bytes || bytes(server.max_object_bytes);
  const object = `${size}${messages && messages !== "null" ? ` or ${plural(Number(messages), "message")}` : ""}`;
  const late = topic.upload_seconds === null ? "" : `, or the oldest has waited for ${duration(topic.upload_seconds)}`;
  waits = topic.uploaded_by ? `uploaded when ${object} wait${late}` : "uploads are off here: run forebay offload";
  return waits;
}

const GAP_TITLES = { lost: "Recorded as lost", unknown: "May never have been used", accepted: "Without messages, accepted", missing: "Missing" };

export function title(span) {
  const many = span.merged || 1;
  switch (span.tier) {
    case "memory": return span.state === "not synced" ? "In memory, not synced yet" : "In memory";
    case "segment": return many > 1 ? plural(many, "segment") + " from " + span.name + " on" : "Segment " + span.name;
    case "gap": return (GAP_TITLES[span.state] || "Gaps") + (many > 1 ? ": " + plural(many, "range") : "");
    default: return objectTitle(span, many);
  }
}

function objectTitle(span, many) {
  if (isLedger(span)) return many > 1 ? plural(many, "ledger") + " from " + span.ledger + " on" : "Ledger " + span.ledger;
  return many > 1 ? plural(many, "object") + " from " + span.name + " on" : "Object " + span.name;
}

// Of objects that were joined, some may be ledgers.
function isLedger(span) {
  return span.ledger !== undefined && span.ledger !== "mixed";
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
    "lost": "may have been handed out before a crash or a lost disk; messages that were there are gone, and readers are told: forebay accept-loss lets them jump over it",
    "unknown": "it is not known whether they were ever handed out; messages that were there are gone, and readers are told: forebay accept-loss lets them jump over it",
    "accepted": "there are no messages, and that was accepted: readers jump over it",
    "missing": "no tier holds these offsets: run forebay verify",
    "mixed": "ranges without messages, of several kinds: zoom in to tell them apart",
  },
};

export function facts(span) {
  const messages = span.end - span.start;
  const found = [["offsets", count(span.start) + " – " + count(span.end - 1) + ", " + plural(messages, span.tier === "gap" ? "offset" : "message")]];
  if (span.bytes !== undefined) found.push(["size", bytes(span.bytes)]);
  if (isLedger(span)) found.push(["ledger of Pulsar", plural(messages, "entry", "entries") + ((span.merged || 1) > 1 ? "" : ", " + span.name)]);
  if (span.codec !== undefined) found.push(["compressed", span.codec + ", " + bytes(span.raw_bytes || 0) + " before"]);
  const state = (STATES[span.tier] || {})[span.state] || span.state;
  found.push(["state", state]);
  if (span.state === "lost") found.push(["how many", "fewer, perhaps none: offsets are reserved in large blocks, and the rest of a block is recorded, too"]);
  if (span.tier === "segment" && span.state === "not uploaded" && waits) found.push(["waits", waits]);
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
