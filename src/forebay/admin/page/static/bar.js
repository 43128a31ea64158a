// One topic's bar: three lanes from its first to its last offset, newest tier on top. A canvas, as
// there may be hundreds of spans; what it shows is also said in words, to be read aloud or tested.

import { box, kindOf, palette } from "./paint.js";
import { Scale } from "./scale.js";
import { describe } from "./spanwords.js";
import { count, make, plural, say } from "./words.js";

const LANES = { memory: 0, segment: 1, object: 2, verified: 2 };
const GAP_LABELS = { lost: "lost", unknown: "unknown", accepted: "accepted" };
const NORMAL = [10, 12, 14];
const TALL = [20, 22, 24];
const LANE_GAP = 2;
const AXIS = 19;
const MAP = 5;
const MESSAGES_MIN = 3;
const STEP = 1.6;

export class Bar {
  constructor(name, ask) {
    this.name = name;
    this.ask = ask;
    this.topic = null;
    this.view = null;
    this.closer = null;
    this.chosen = null;
    this.pointers = new Map();
    this.canvas = make("canvas", {
      class: "bar", tabindex: "0", role: "application", "aria-roledescription": "zoomable bar",
      "aria-describedby": "bar-help",
    });
    this.detail = make("div", { class: "detail", "aria-live": "polite", hidden: "" });
    this.context = this.canvas.getContext("2d");
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  // -- what is shown ----------------------------------------------------------------------------

  update(topic) {
    const end = this.topic ? this.topic.appended : 0;
    this.topic = topic;
    this.scale = new Scale(topic.start, topic.appended, topic.spans.filter((each) => each.tier === "gap"));
    if (this.view && this.view.to >= end && topic.appended > end) {
      const grown = topic.appended - end;
      this.view = { from: this.view.from + grown, to: this.view.to + grown };
    }
    say(this.canvas, this.summary());
    this.canvas.setAttribute("aria-label", this.summary());
    if (this.view) this.fetchCloser();
    if (this.chosen) this.choose(this.same(this.chosen));
    this.draw();
  }

  summary() {
    const topic = this.topic, sizes = topic.sizes;
    const parts = [
      topic.appended > topic.start ? `offsets ${count(topic.start)} to ${count(topic.appended - 1)}` : "no messages",
      plural(sizes.memory_messages, "message") + " in memory",
      plural(sizes.segments, "segment"),
      `${plural(sizes.objects, "object")}, ${count(sizes.verified_objects)} verified`,
    ];
    if (sizes.lost_offsets) parts.push(plural(sizes.lost_offsets, "offset") + " recorded as lost");
    if (sizes.unknown_offsets) parts.push(plural(sizes.unknown_offsets, "offset") + " that may never have been used");
    if (sizes.accepted_offsets) parts.push(plural(sizes.accepted_offsets, "offset") + " without messages, accepted");
    if (sizes.missing_offsets) parts.push(plural(sizes.missing_offsets, "offset") + " in no tier");
    if (this.view) parts.push(`zoomed to ${count(this.view.from)} to ${count(this.view.to)}`);
    return `${this.name}: ${parts.join("; ")}`;
  }

  spans() {
    const closer = this.closer, view = this.view;
    if (view && closer && closer.start <= view.from && closer.end >= Math.min(view.to, this.topic.appended)) return closer.spans;
    return this.topic.spans;
  }

  same(span) {
    const found = this.spans().filter((each) => LANES[each.tier] === LANES[span.tier]);
    return found.find((each) => each.name === span.name && each.start === span.start && each.name !== undefined)
      || found.find((each) => each.start <= span.start && each.end > span.start) || null;
  }

  async fetchCloser() {
    const view = this.view;
    if (!view || this.fetching) {
      this.again = Boolean(view);
      return;
    }
    this.fetching = true;
    const width = view.to - view.from;
    const start = Math.max(Math.floor(view.from - width / 2), this.topic.start, 0);
    const end = Math.max(Math.ceil(Math.min(view.to + width / 2, this.topic.appended)), start + 1);
    const found = await this.ask(this.name, start, end);
    this.fetching = false;
    if (found && this.view) {
      this.closer = found;
      this.draw();
    }
    if (this.again) {
      this.again = false;
      if (this.view && this.view !== view) this.fetchCloser();
    }
  }

  // -- zoom -------------------------------------------------------------------------------------

  window() {
    const scale = this.scale;
    if (!this.view) return { from: 0, width: scale.total };
    const from = scale.place(this.view.from);
    return { from, width: Math.max(scale.place(this.view.to) - from, 1e-6) };
  }

  show(from, width) {
    const scale = this.scale;
    width = Math.max(width, Math.min(MESSAGES_MIN, scale.total));
    if (width >= scale.total * 0.999) {
      this.fit();
      return;
    }
    from = Math.min(Math.max(from, 0), scale.total - width);
    this.view = { from: scale.offset(from), to: scale.offset(from + width) };
    this.changed();
  }

  fit() {
    this.view = null;
    this.closer = null;
    this.changed();
  }

  changed() {
    this.canvas.classList.toggle("zoomed", Boolean(this.view));
    this.canvas.setAttribute("aria-label", this.summary());
    if (this.view) this.fetchCloser();
    if (this.onzoom) this.onzoom(Boolean(this.view));
    this.hideTip();
    this.draw();
  }

  zoom(factor, share = 0.5) {
    const { from, width } = this.window();
    this.show(from + width * share * (1 - 1 / factor), width / factor);
  }

  zoomTo(span) {
    const from = this.scale.place(span.start), to = this.scale.place(span.end);
    const room = (to - from) * 0.08;
    this.show(from - room, to - from + 2 * room);
  }

  pan(share) {
    const { from, width } = this.window();
    if (this.view) this.show(from + width * share, width);
  }

  // -- drawing ----------------------------------------------------------------------------------

  heights() {
    return this.view ? TALL : NORMAL;
  }

  tops() {
    const heights = this.heights();
    return heights.map((_, at) => heights.slice(0, at).reduce((sum, each) => sum + each + LANE_GAP, 0));
  }

  draw() {
    if (!this.topic) return;
    const canvas = this.canvas, context = this.context, colours = palette();
    const heights = this.heights(), tops = this.tops();
    const lanes = tops[2] + heights[2];
    const height = lanes + AXIS + (this.view ? MAP : 0);
    const width = canvas.clientWidth;
    const ratio = window.devicePixelRatio || 1;
    if (!width) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = height + "px";
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.fillStyle = colours.track;
    heights.forEach((each, at) => {
      context.beginPath();
      context.roundRect(0, tops[at], width, each, 2.5);
      context.fill();
    });
    this.drawSpans(width, lanes);
    this.drawMarks(width, lanes);
    if (this.view) this.drawMap(width, height);
  }

  across(offset, width) {
    const window = this.window();
    return ((this.scale.place(offset) - window.from) / window.width) * width;
  }

  sides(span, width) {
    const least = span.tier === "memory" ? 4 : 2;
    let left = this.across(span.start, width), right = this.across(span.end, width);
    if (right - left < least) left = Math.max(right - least, 0), right = left + least;
    return [left, right];
  }

  drawSpans(width, lanes) {
    const heights = this.heights(), tops = this.tops();
    const gapsLast = [...this.spans()].sort((one, other) => (one.tier === "gap") - (other.tier === "gap"));
    for (const span of gapsLast) {
      let [left, right] = this.sides(span, width);
      if (right < 0 || left > width) continue;
      left = Math.max(left, -4);
      right = Math.min(right, width + 4);
      const lane = LANES[span.tier];
      const top = lane === undefined ? 0 : tops[lane];
      const high = lane === undefined ? lanes : heights[lane];
      // A hair of space tells one file or object from the next.
      const room = right - left > 4 && span.tier !== "memory" ? 1 : 0;
      const style = box(this.context, left, top, right - left - room, high, kindOf(span));
      if (span.tier === "segment" && span.start < this.topic.uploaded && span.end > this.topic.uploaded) {
        // The segment that is half uploaded: pale as far as objects hold it, too.
        const border = Math.min(this.across(this.topic.uploaded, width), right - room);
        if (border - left > 3) box(this.context, left, top, border - left, high, "copied");
      }
      if (this.chosen && this.isChosen(span)) this.ring(left, top, right - left - room, high);
      if (lane === undefined) this.write(GAP_LABELS[span.state] || "gap", left, right, lanes / 2, style.ink, true);
      else if (this.view && high > 18) this.write(this.label(span), left, right, top + high / 2, style.ink, span.tier === "object");
    }
  }

  isChosen(span) {
    return LANES[span.tier] === LANES[this.chosen.tier] && span.start === this.chosen.start && span.end === this.chosen.end;
  }

  ring(x, y, width, height) {
    this.context.strokeStyle = palette().ink;
    this.context.lineWidth = 2;
    this.context.strokeRect(x + 1, y + 1, Math.max(width - 2, 1), height - 2);
  }

  label(span) {
    if (span.tier === "memory") return span.state === "not synced" ? "not synced" : "memory";
    return (span.merged || 1) > 1 ? plural(span.merged, span.tier === "segment" ? "segment" : "object") : span.name;
  }

  write(text, left, right, middle, ink, plate) {
    const context = this.context, colours = palette();
    left = Math.max(left, 0);
    right = Math.min(right, this.canvas.clientWidth);
    context.font = `11px ${colours.font}`;
    context.textBaseline = "middle";
    const long = context.measureText(text).width;
    if (long + 12 > right - left) return;
    const at = (left + right - long) / 2;
    if (plate) {
      context.fillStyle = colours.card;
      context.beginPath();
      context.roundRect(at - 4, middle - 7, long + 8, 14, 3);
      context.fill();
    }
    context.fillStyle = ink;
    context.textAlign = "left";
    context.fillText(text, at, middle + 0.5);
  }

  marks() {
    const topic = this.topic;
    const named = [["appended", topic.appended], ["synced", topic.synced], ["uploaded", topic.uploaded], ["verified", topic.verified]];
    const places = new Map();
    for (const [name, offset] of named) {
      if (offset > topic.start) places.set(offset, [...(places.get(offset) || []), name]);
    }
    return [...places].sort((one, other) => other[0] - one[0]);
  }

  drawMarks(width, lanes) {
    const context = this.context, colours = palette();
    context.font = `10.5px ${colours.font}`;
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    const base = lanes + 14;
    const first = count(this.view ? this.view.from : this.topic.start);
    const begun = context.measureText(first).width;
    context.fillStyle = colours.soft;
    context.fillText(first, 0, base);
    let free = width;
    if (this.view) {
      const last = count(this.view.to);
      free -= context.measureText(last).width;
      context.fillText(last, free, base);
      free -= 12;
    }
    const end = this.across(this.topic.appended, width);
    for (const [offset, names] of this.marks()) {
      const x = this.across(offset, width);
      // What is synced is nearly all that is appended: two lines side by side say nothing.
      if (x < -1 || x > width + 1 || (names[0] === "synced" && end - x < 8)) continue;
      // Appended and synced are the end of nearly every log: one word says it.
      const shown = names.includes("appended") && names.length > 1 ? names.filter((each) => each !== "synced") : names;
      const text = shown.join(" = ") + " " + count(offset);
      const long = context.measureText(text).width;
      const edge = Math.min(Math.max(x, 0.5), width - 0.5);
      context.fillStyle = colours.ink;
      context.fillRect(edge - 0.5, 0, 1, lanes + 3);
      context.beginPath();
      context.moveTo(edge - 3, lanes + 5);
      context.lineTo(edge + 3, lanes + 5);
      context.lineTo(edge, lanes + 1);
      context.fill();
      const left = Math.min(Math.max(x - long / 2, 0), free - long);
      if (left < begun + 12 || x - (left + long) > 160) continue;
      context.fillStyle = colours.soft;
      context.fillText(text, left, base);
      free = left - 12;
    }
  }

  drawMap(width, height) {
    const context = this.context, colours = palette();
    const window = this.window();
    context.fillStyle = colours.track;
    context.fillRect(0, height - 3, width, 3);
    context.fillStyle = colours.soft;
    const left = (window.from / this.scale.total) * width;
    context.fillRect(Math.min(left, width - 6), height - 3, Math.max((window.width / this.scale.total) * width, 6), 3);
  }

  // -- pointing and choosing --------------------------------------------------------------------

  at(x, y) {
    const width = this.canvas.clientWidth, tops = this.tops(), heights = this.heights();
    const lane = y < tops[1] ? 0 : y < tops[2] ? 1 : 2;
    if (y > tops[2] + heights[2] + 4) return null;
    let best = null, distance = 5;
    for (const span of this.spans()) {
      const own = LANES[span.tier];
      if (own !== undefined && own !== lane) continue;
      const [left, right] = this.sides(span, width);
      const away = Math.max(left - x, x - right, 0);
      if (away < distance || (own === undefined && away === 0)) {
        best = span;
        distance = away;
        if (own === undefined && away === 0) break;
      }
    }
    return best;
  }

  choose(span) {
    this.chosen = span;
    this.detail.hidden = !span;
    const words = span ? describe(span) : [];
    const now = words.map((each) => each.textContent).join();
    if (now !== this.said) this.detail.replaceChildren(...words);
    this.said = now;
    this.draw();
  }

  step(direction, lanes) {
    const spans = this.spans();
    const own = (span) => LANES[span.tier];
    if (lanes) {
      const from = this.chosen && own(this.chosen) !== undefined ? own(this.chosen) : 2;
      const place = this.chosen ? this.chosen.start : this.topic.appended;
      for (let lane = from + lanes; lane >= 0 && lane <= 2; lane += lanes) {
        const there = spans.filter((each) => own(each) === lane);
        if (there.length) {
          this.choose(there.find((each) => each.end > place) || there[there.length - 1]);
          return;
        }
      }
      return;
    }
    const lane = this.chosen ? own(this.chosen) : 2;
    let there = spans.filter((each) => own(each) === lane || own(each) === undefined);
    if (!there.length) there = spans;
    if (!there.length) return;
    const current = this.chosen ? there.findIndex((each) => each.start === this.chosen.start && each.end === this.chosen.end) : -1;
    const next = current < 0 ? (direction > 0 ? 0 : there.length - 1) : Math.min(Math.max(current + direction, 0), there.length - 1);
    this.choose(there[next]);
    const { from, width } = this.window();
    const middle = (this.scale.place(there[next].start) + this.scale.place(there[next].end)) / 2;
    if (this.view && (middle < from || middle > from + width)) this.show(middle - width / 2, width);
  }

  key(event) {
    const keys = {
      "+": () => this.zoom(STEP), "=": () => this.zoom(STEP), "-": () => this.zoom(1 / STEP),
      "0": () => this.fit(), "Escape": () => (this.view ? this.fit() : this.choose(null)),
      "ArrowRight": () => (event.shiftKey ? this.pan(0.25) : this.step(1)),
      "ArrowLeft": () => (event.shiftKey ? this.pan(-0.25) : this.step(-1)),
      "ArrowUp": () => this.step(0, -1), "ArrowDown": () => this.step(0, 1),
      "Home": () => this.view && this.show(0, this.window().width),
      "End": () => this.view && this.show(this.scale.total, this.window().width),
      "Enter": () => this.chosen && this.zoomTo(this.chosen),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointercancel", (event) => this.pointers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => this.hideTip());
    canvas.addEventListener("dblclick", (event) => {
      const span = this.at(event.offsetX, event.offsetY);
      if (span) this.zoomTo(span);
    });
  }

  wheel(event) {
    // The wheel scrolls the page, unless this bar was chosen or it is a pinch.
    const mine = event.ctrlKey || document.activeElement === this.canvas;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) && this.view) {
      event.preventDefault();
      this.pan(event.deltaX / this.canvas.clientWidth);
    } else if (mine) {
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0025)), event.offsetX / this.canvas.clientWidth);
    }
  }

  press(event) {
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    this.canvas.setPointerCapture(event.pointerId);
    this.moved = this.pointers.size > 1;
    this.held = { window: this.window(), x: this.middle(), apart: this.apart() };
  }

  middle() {
    const places = [...this.pointers.values()];
    return places.reduce((sum, each) => sum + each.x, 0) / places.length;
  }

  apart() {
    const places = [...this.pointers.values()].map((each) => each.x);
    return places.length > 1 ? Math.max(Math.abs(places[0] - places[1]), 10) : 0;
  }

  move(event) {
    if (!this.pointers.has(event.pointerId)) {
      this.point(event);
      return;
    }
    const before = this.pointers.get(event.pointerId);
    if (Math.abs(event.offsetX - this.held.x) > 4) this.moved = true;
    before.x = event.offsetX;
    const { window, x, apart } = this.held;
    const across = this.canvas.clientWidth;
    if (this.pointers.size > 1) {
      const width = window.width * (apart / this.apart());
      const fixed = window.from + (x / across) * window.width;
      this.show(fixed - (this.middle() / across) * width, width);
    } else if (this.moved && this.view) {
      this.show(window.from - ((event.offsetX - x) / across) * window.width, window.width);
    }
  }

  release(event) {
    this.pointers.delete(event.pointerId);
    if (!this.moved && !this.pointers.size) {
      const span = this.at(event.offsetX, event.offsetY);
      const again = span && this.chosen && this.isChosen(span);
      this.choose(again ? null : span);
      this.hideTip();
    }
    if (this.pointers.size) this.held = { window: this.window(), x: this.middle(), apart: this.apart() };
  }

  point(event) {
    const span = event.pointerType === "mouse" && this.at(event.offsetX, event.offsetY);
    if (!span) {
      this.hideTip();
      return;
    }
    const tip = document.getElementById("tip");
    tip.replaceChildren(...describe(span));
    tip.hidden = false;
    const box = tip.getBoundingClientRect(), here = this.canvas.getBoundingClientRect();
    const left = Math.min(Math.max(event.clientX - box.width / 2, 8), innerWidth - box.width - 8);
    const below = here.bottom + 6;
    tip.style.left = left + "px";
    tip.style.top = (below + box.height < innerHeight ? below : here.top - box.height - 8) + "px";
  }

  hideTip() {
    document.getElementById("tip").hidden = true;
  }
}
