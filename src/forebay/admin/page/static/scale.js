// From offsets to places on a bar. A gap of a million lost offsets must not squeeze everything
// else to nothing: gaps are drawn narrower than they are, and look it.

const GAP_SHARE = 0.06;
const GAPS_SHARE = 0.3;

export class Scale {
  constructor(start, end, gaps) {
    const lost = gaps.reduce((sum, gap) => sum + gap.end - gap.start, 0);
    const held = Math.max(end - start - lost, 1);
    const most = Math.max(held * Math.min(GAP_SHARE, GAPS_SHARE / Math.max(gaps.length, 1)), 1);
    this.start = start;
    this.end = Math.max(end, start + 1);
    this.pieces = [];
    let place = 0;
    let at = start;
    const add = (from, to, width) => {
      if (to > from) this.pieces.push({ from, to, place, width });
      place += to > from ? width : 0;
    };
    for (const gap of [...gaps].sort((one, other) => one.start - other.start)) {
      if (gap.end <= at) continue;
      const from = Math.max(gap.start, at);
      add(at, from, from - at);
      add(from, gap.end, Math.min(gap.end - from, most));
      at = gap.end;
    }
    add(at, this.end, this.end - at);
    this.total = Math.max(place, 1);
  }

  place(offset) {
    const piece = this.find((each) => offset < each.to);
    return piece.place + ((offset - piece.from) / (piece.to - piece.from)) * piece.width;
  }

  offset(place) {
    const piece = this.find((each) => place < each.place + each.width);
    return piece.from + ((place - piece.place) / piece.width) * (piece.to - piece.from);
  }

  find(before) {
    return this.pieces.find(before) || this.pieces[this.pieces.length - 1];
  }
}
