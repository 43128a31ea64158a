// The last minutes as small charts that share one cursor. Lines differ in dash as well as colour.

import { bytes, duration, make, rate, say, short } from "./words.js";

const ROWS_MAX = 450;
const SPAN_MIN = 120;
const MEAN_ROWS = 10;
const HEIGHT = 122;
const AXIS_MIN = 30;

const DASHED = [6, 3];
const DOTTED = [2, 2.5];

const TIMES = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400];
const POWERS = [...Array(45).keys()].map((power) => 2 ** power);

// Reads have a chart of their own: many readers read a message, so that next to them what is
// appended and uploaded would be a line on the axis.
const CHARTS = [
  {
    title: "Messages", mean: true, words: rate, axis: short,
    lines: [
      { field: "appended", label: "appended", colour: "memory", fill: true },
      { field: "uploaded", label: "uploaded", colour: "verified", dash: DASHED },
    ],
  },
  {
    title: "Bytes", mean: true, words: bytes, axis: bytes, least: 1024, marks: POWERS,
    lines: [
      { field: "appended_bytes", label: "appended", colour: "memory", fill: true },
      { field: "uploaded_bytes", label: "uploaded", colour: "verified", dash: DASHED },
    ],
  },
  {
    title: "Way to the cloud", words: duration, axis: duration, marks: TIMES,
    lines: [
      { field: "lag_seconds", label: "oldest waiting", colour: "gap", fill: true },
      { field: "time_to_cloud", label: "time to cloud", colour: "verified", dash: DASHED, hold: true },
    ],
  },
  {
    title: "Messages read", mean: true, words: rate, axis: short,
    lines: [{ field: "read", label: "read", colour: "segment", fill: true }],
    also: { field: "read_bytes", label: "that is", words: bytes },
  },
  {
    title: "Object store requests", mean: true, words: rate, axis: short,
    lines: [
      { field: "requests", label: "requests", colour: "object", fill: true },
      { field: "failed_requests", label: "failed", colour: "gap", dash: DOTTED },
    ],
  },
  {
    title: "Object store bytes", mean: true, words: bytes, axis: bytes, least: 1024, marks: POWERS,
    lines: [
      { field: "store_up", label: "up", colour: "object", fill: true },
      { field: "store_down", label: "down", colour: "segment", dash: DASHED },
    ],
  },
];

// The line as the chart draws it, for its key.
function sample(line) {
  const name = "http://www.w3.org/2000/svg";
  const picture = document.createElementNS(name, "svg"), stroke = document.createElementNS(name, "line");
  for (const [key, value] of Object.entries({ class: "key", width: 22, height: 8, "data-colour": line.colour, "aria-hidden": "true" })) picture.setAttribute(key, value);
  for (const [key, value] of Object.entries({ x1: 0, x2: 22, y1: 4, y2: 4, "stroke-width": 2, "stroke-dasharray": (line.dash || []).join(" ") })) stroke.setAttribute(key, value);
  picture.append(stroke);
  return picture;
}

// As wide as the longest number on the axis.
function room(plot, values, font, gap) {
  plot.ctx.save();
  plot.ctx.font = font;
  const widths = (values || []).map((each) => plot.ctx.measureText(each).width);
  plot.ctx.restore();
  return Math.ceil(Math.max(...widths, AXIS_MIN) + gap + 2);
}

export class Charts {
  constructor(root) {
    this.root = root;
    this.fields = [];
    this.rows = [];
    this.charts = CHARTS.map((chart) => this.build(chart));
    new ResizeObserver(() => this.resize()).observe(root);
  }

  get last() {
    return this.rows.length ? this.rows[this.rows.length - 1][0] : 0;
  }

  clear() {
    this.rows = [];
  }

  add(history) {
    this.fields = history.fields;
    const newer = history.rows.filter((row) => row[0] > this.last);
    this.rows = [...this.rows, ...newer].slice(-ROWS_MAX);
    if (newer.length || !this.drawn) this.draw();
  }

  // One line below each chart, in their order.
  notes(texts) {
    this.charts.forEach((chart, at) => say(chart.note, texts[at]));
  }

  build(chart) {
    const told = [...chart.lines, ...(chart.also ? [chart.also] : [])];
    const values = told.map(() => make("b", null, "–"));
    const keys = make("ul", { class: "keys" }, ...told.map((line, at) => make("li", null, line.colour ? sample(line) : null, line.label + " ", values[at])));
    const place = make("div", { class: "plot", "aria-hidden": "true" });
    const note = make("p", { class: "plot-note" });
    this.root.append(make("figure", { class: "card chart" }, make("figcaption", null, make("h2", null, chart.title, make("span", { class: "count" }, chart.mean ? " a second, 20 s mean" : "")), keys), place, note));
    return { ...chart, told, place, values, plot: null, note };
  }

  colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  }

  options(chart) {
    const soft = this.colour("soft"), line = this.colour("line"), font = `10px ${this.colour("font")}`;
    const stepped = uPlot.paths.stepped({ align: 1 });
    const ratio = window.devicePixelRatio || 1;
    return {
      width: Math.max(chart.place.clientWidth, 50), height: HEIGHT, padding: [8, 26, 0, 0],
      legend: { show: false }, cursor: { sync: { key: "forebay" }, y: false, points: { size: 5 }, drag: { x: false, y: false } },
      scales: { x: { time: true, range: () => this.range() }, y: { range: (_, low, high) => [0, Math.max(high * 1.12, chart.least || 1)] } },
      axes: [
        { stroke: soft, font, size: 24, gap: 6, grid: { show: false }, ticks: { show: false }, space: 60, values: (_, marks) => marks.map((at) => new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: marks.length > 1 && marks[1] - marks[0] < 60 ? "2-digit" : undefined })) },
        { stroke: soft, font, size: (plot, values, axis) => room(plot, values, font, plot.axes[axis].gap), gap: 5, grid: { stroke: line, width: 1 }, ticks: { show: false }, space: 34, incrs: chart.marks, values: (_, marks) => marks.map((each) => (each === 0 ? "0" : chart.axis(each))) },
      ],
      series: [{}, ...chart.lines.map((each) => ({
        label: each.label, stroke: this.colour(each.colour), width: 1.6, dash: each.dash && each.dash.map((part) => part * ratio), points: { show: false },
        paths: each.hold ? stepped : undefined, fill: each.fill ? this.colour(each.colour + "-wash") : undefined,
      }))],
      hooks: { setCursor: [(plot) => this.tell(chart, plot.cursor.idx)] },
    };
  }

  range() {
    const last = this.last || Date.now() / 1000;
    const first = this.rows.length ? this.rows[0][0] : last;
    return [last - Math.max(last - first, SPAN_MIN), last];
  }

  // Uploads come in bursts: the mean over a few rows is what compares to appends.
  column(chart, line) {
    const at = this.fields.indexOf(line.field);
    if (chart.mean) {
      return this.rows.map((_, row) => {
        const some = this.rows.slice(Math.max(row - MEAN_ROWS + 1, 0), row + 1);
        return some.reduce((sum, each) => sum + each[at], 0) / some.length;
      });
    }
    let held = null;
    return this.rows.map((row) => {
      if (row[at] !== null) held = row[at];
      return line.hold ? held : row[at];
    });
  }

  draw() {
    for (const chart of this.charts) {
      if (!chart.place.clientWidth) return;
      const times = this.rows.map((row) => row[0]);
      chart.data = [times, ...chart.lines.map((line) => this.column(chart, line))];
      chart.columns = [...chart.data.slice(1), ...(chart.also ? [this.column(chart, chart.also)] : [])];
      if (chart.plot) chart.plot.setData(chart.data);
      else chart.plot = new uPlot(this.options(chart), chart.data, chart.place);
      this.tell(chart, chart.plot.cursor.idx);
    }
    this.drawn = true;
  }

  tell(chart, at) {
    if (!chart.data) return;
    const rows = chart.data[0].length;
    const pointed = at !== null && at !== undefined && at < rows ? at : rows - 1;
    chart.told.forEach((line, number) => {
      const value = pointed < 0 ? null : chart.columns[number][pointed];
      say(chart.values[number], value === null || value === undefined ? "–" : (line.words || chart.words)(value));
    });
  }

  resize() {
    for (const chart of this.charts) {
      const width = chart.place.clientWidth;
      if (chart.plot && width && chart.plot.width !== width) chart.plot.setSize({ width, height: HEIGHT });
    }
    if (!this.drawn && this.fields.length) this.draw();
  }

  repaint() {
    for (const chart of this.charts) {
      if (chart.plot) chart.plot.destroy();
      chart.plot = null;
    }
    if (this.fields.length) this.draw();
  }
}
