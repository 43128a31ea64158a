// Numbers and times as people read them, and a short way to make elements.

const whole = new Intl.NumberFormat("en");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function count(number) {
  return whole.format(Math.round(number));
}

// Of something a second: small ones have a decimal.
export function rate(number) {
  return number < 10 && number % 1 ? number.toFixed(1) : count(number);
}

// For an axis, where there is little room: 2.5 M.
export function short(number) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6]]) {
    if (number >= size) return Number((number / size).toFixed(2)) + " " + unit;
  }
  return number < 10 && number % 1 ? String(Number(number.toFixed(2))) : count(number);
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
  seconds = Math.round(seconds);
  if (seconds < 60) return seconds + " s";
  if (seconds < 3600) return both(seconds, 60, "min", 1, "s");
  return seconds < 86400 ? both(seconds, 3600, "h", 60, "min") : both(seconds, 86400, "d", 3600, "h");
}

function both(seconds, size, unit, smaller, rest) {
  const left = Math.floor((seconds % size) / smaller);
  return Math.floor(seconds / size) + " " + unit + (left ? ` ${left} ${rest}` : "");
}

export function ago(seconds, now) {
  const gone = now - seconds;
  return gone < 2 ? "now" : duration(gone).replace(/ (min|h) .*/, " $1") + " ago";
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
}

export function plural(number, one, many) {
  return count(number) + " " + noun(number, one, many);
}

export function noun(number, one, many) {
  return number === 1 ? one : many || one + "s";
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
