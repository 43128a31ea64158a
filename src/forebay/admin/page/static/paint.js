// Colours and patterns of the tiers, from the style sheet, so that themes are in one place.
// No tier is told by its colour alone: each has its lane, and hatching says what is not safe yet.

let known = null;

export function palette() {
  if (known) return known;
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue("--" + name).trim();
  known = {
    memory: colour("memory"), segment: colour("segment"), copied: colour("copied"),
    object: colour("object"), verified: colour("verified"), gap: colour("gap"),
    track: colour("track"), ink: colour("ink"), soft: colour("soft"), card: colour("card"),
    line: colour("line"), focus: colour("focus"), onTier: colour("on-tier"), onPale: colour("ink"),
    font: style.getPropertyValue("--font").trim(),
  };
  return known;
}

export function forgetPalette() {
  known = null;
}

const hatches = new Map();

function hatch(context, colour, paper, cross) {
  const key = colour + paper + cross;
  if (!hatches.has(key)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 12;
    const draw = tile.getContext("2d");
    draw.fillStyle = paper;
    draw.fillRect(0, 0, 12, 12);
    draw.strokeStyle = colour;
    draw.lineWidth = cross ? 2 : 4.2;
    draw.lineCap = "square";
    draw.beginPath();
    for (const [x, y] of [[-6, 6], [0, 12], [6, 18]]) {
      draw.moveTo(x, y);
      draw.lineTo(x + 12, y - 12);
    }
    if (cross) {
      for (const [x, y] of [[-6, 6], [0, 0], [6, -6]]) {
        draw.moveTo(x, y);
        draw.lineTo(x + 12, y + 12);
      }
    }
    draw.stroke();
    hatches.set(key, tile);
  }
  const pattern = context.createPattern(hatches.get(key), "repeat");
  pattern.setTransform(new DOMMatrix().scale(0.5));
  return pattern;
}

// What a span is filled with: {fill, edge, ink}.
export function look(context, kind) {
  const colours = palette();
  switch (kind) {
    case "memory": return { fill: colours.memory, ink: colours.onTier };
    case "unsynced": return { fill: hatch(context, colours.memory, colours.card, false), edge: colours.memory, ink: colours.ink };
    case "segment": return { fill: colours.segment, ink: colours.onTier };
    case "copied": return { fill: colours.copied, edge: colours.segment, ink: colours.onPale };
    case "object": return { fill: hatch(context, colours.object, colours.card, false), edge: colours.object, ink: colours.ink };
    case "verified": return { fill: colours.verified, ink: colours.onTier };
    default: return { fill: hatch(context, colours.gap, colours.card, true), edge: colours.gap, ink: colours.ink };
  }
}

export function kindOf(span) {
  if (span.tier === "memory") return span.state === "not synced" ? "unsynced" : "memory";
  if (span.tier === "segment") return span.state === "not uploaded" ? "segment" : "copied";
  return span.tier;
}

export function box(context, x, y, width, height, kind) {
  const style = look(context, kind);
  const radius = Math.min(2.5, width / 2, height / 2);
  context.beginPath();
  context.roundRect(x, y, width, height, radius);
  context.fillStyle = style.fill;
  context.fill();
  if (style.edge && width > 3) {
    context.beginPath();
    context.roundRect(x + 0.5, y + 0.5, width - 1, height - 1, Math.max(radius - 0.5, 0));
    context.strokeStyle = style.edge;
    context.lineWidth = 1;
    context.stroke();
  }
  return style;
}

export function paintSwatches() {
  for (const canvas of document.querySelectorAll("canvas[data-swatch]")) {
    const context = canvas.getContext("2d");
    context.setTransform(2, 0, 0, 2, 0, 0);
    context.clearRect(0, 0, 18, 10);
    box(context, 0, 0, 18, 10, canvas.dataset.swatch);
  }
}
