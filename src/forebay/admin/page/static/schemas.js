// The table of the subjects of schemas.

import { count, make, plural, say } from "./words.js";

// Leaves the table alone while it says the same.
export function showSchemas(card, found) {
  card.hidden = !found.total;
  const now = JSON.stringify(found);
  if (card.dataset.shown === now) return;
  card.dataset.shown = now;
  say(card.querySelector(".count"), count(found.total));
  card.querySelector("tbody").replaceChildren(...found.rows.map(row));
  const more = found.total - found.rows.length;
  say(card.querySelector(".soft"), more > 0 ? `and ${plural(more, "more subject")}: forebay schemas list` : "");
}

function row(each) {
  return make("tr", { "data-subject": each.subject }, make("th", { scope: "row" }, each.subject), make("td", null, each.type), make("td", null, each.mode),
    ...[each.latest, each.versions, each.id].map((number) => make("td", { class: "number" }, count(number))));
}
