// Numbers and times as people read them, and a short way to make elements.

const whole = new Intl.NumberFormat("en");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function count(number) {
  return whole.format(Math.round(number));
}

export function short(number) {
  if (number < 100000) return number < 10 && number % 1 ? number.toFixed(1) : count(number);
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (number >= size) return (number / size).toFixed(number >= size * 100 ? 0 : 1) + " " + unit;
  }
  return count(number);
}

export function bytes(number) {
  let at = 0;
  while (number >= 1024 && at < UNITS.length - 1) {
    number /= 1024;
    at += 1;
  }
  return (at && number < 100 ? number.toFixed(1) : String(Math.round(number))) + " " + UNITS[at];
}

export function duration(seconds) {
  if (seconds < 0.95) return seconds <= 0 ? "0 s" : Math.round(seconds * 1000) + " ms";
  if (seconds < 60) return Math.round(seconds) + " s";
  if (seconds < 3600) return Math.floor(seconds / 60) + " min " + Math.round(seconds % 60) + " s";
  if (seconds < 86400) return Math.floor(seconds / 3600) + " h " + Math.floor((seconds % 3600) / 60) + " min";
  return Math.floor(seconds / 86400) + " d " + Math.floor((seconds % 86400) / 3600) + " h";
}

export function ago(seconds, now) {
  const gone = now - seconds;
  return gone < 2 ? "now" : duration(gone).replace(/ (min|h) .*/, " $1") + " ago";
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
}

export function plural(number, one, many) {
  return count(number) + " " + (number === 1 ? one : many || one + "s");
}

// make("p", {class: "x"}, "text", child): an element; text is never read as HTML.
export function make(kind, attributes, ...children) {
  const element = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((each) => each !== null && each !== undefined));
  return element;
}

// Changes what changed, so that a screen reader and a selection are left in peace.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
