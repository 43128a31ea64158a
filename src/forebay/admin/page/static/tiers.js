// The tiers as cards, from the newest messages to the oldest.

import { paintSwatches } from "./paint.js";
import { bytes, count, make, noun, plural, rate, say } from "./words.js";

function tierCards(found) {
  const sum = found.totals;
  const rates = { appended: topicSum(found, "appended"), uploaded: topicSum(found, "uploaded") };
  const cards = [
    { tier: "memory", name: "Memory", number: sum.memory_messages, flow: `${rate(rates.appended)}/s appended`, text: "the newest messages, at hand for readers" },
    { tier: "segment", name: "Segments", number: sum.segment_messages, flow: "synced", text: `${plural(sum.segments, "file")}, ${bytes(sum.segment_bytes)} on this disk` },
    { tier: "object", name: "Objects", number: sum.object_messages, flow: `${rate(rates.uploaded)}/s uploaded`, text: `${plural(sum.objects, "object")}, ${bytes(sum.object_bytes)} in the object store` },
    { tier: "verified", name: "Verified", number: sum.verified_messages, flow: "read back", text: sum.objects ? `${share(sum.verified_objects, sum.objects)} of the objects were read back` : "objects that were read back" },
  ];
  if (sum.gaps) cards.push({ tier: "gap", name: "Gaps", number: sum.gaps, unit: "range", flow: "", text: gapText(sum) });
  return cards;
}

// Of lost offsets it is not known how many were handed out: they are reserved a block at a time.
function gapText(sum) {
  return [
    sum.lost_offsets ? `${plural(sum.lost_offsets, "offset")} that may have been handed out; messages that were there are gone` : "",
    sum.unknown_offsets ? `${plural(sum.unknown_offsets, "offset")} that may never have been used` : "",
    sum.accepted_offsets ? `${plural(sum.accepted_offsets, "offset")} accepted, which readers jump over` : "",
    sum.missing_offsets ? `${plural(sum.missing_offsets, "offset")} in no tier` : "",
  ].filter(Boolean).join("; ");
}

function topicSum(found, name) {
  return found.topics.reduce((sum, topic) => sum + topic.rates[name], 0);
}

function share(part, whole) {
  return part === whole ? "all" : Math.floor((part / whole) * 100) + " %";
}

export function showTiers(box, found) {
  const cards = found.topics.length ? tierCards(found) : [];
  const names = cards.map((card) => card.tier).join();
  if (box.dataset.cards !== names) {
    box.dataset.cards = names;
    box.replaceChildren(...cards.map((card) => make("div", { class: "tier", "data-tier": card.tier },
      make("span", { class: "flow" }), make("h2", null, make("canvas", { "data-swatch": card.tier, width: "36", height: "20" }), card.name),
      make("p", { class: "number" }, make("b"), make("span", null, " messages")), make("p", { class: "text" }))));
    paintSwatches();
  }
  cards.forEach((card, at) => {
    const place = box.children[at];
    say(place.querySelector(".flow"), card.flow);
    say(place.querySelector("b"), count(card.number));
    say(place.querySelector(".number span"), " " + noun(card.number, card.unit || "message"));
    say(place.querySelector(".text"), card.text);
  });
}
