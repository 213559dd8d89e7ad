// The live board: columns come in as float32, five pictures are drawn on canvas. Every word and every scale comes with
// the message, so that the still picture says the same. The page applies every message and drops only redraws: the next
// one waits as long as the last one took, so that a slow page lags by one redraw at most.

const LEFT = 50, RIGHT = 12, TOP = 20, BOTTOM = 22;

function node(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function short(value, digits = 3) {
  if (!isFinite(value)) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

// ---- data ----------------------------------------------------------------------------------------------------------

class Store {
  constructor() { this.series = new Map(); this.status = {}; this.charts = {}; this.sync = null; this.seq = 0; }

  // Applies a message; false where rows are missing and a keyframe is needed.
  apply(content, view) {
    let whole = content.keyframe || content.seq === this.seq + 1;
    if (content.keyframe) this.series.clear();
    this.seq = content.seq;
    Object.assign(this.status, content.status);
    for (const [name, said] of Object.entries(content.charts))
      this.charts[name] = Object.assign(this.charts[name] || {}, said);
    if (content.sync) this.sync = content.sync;
    const floats = new Float32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
    let offset = 0;
    for (const part of content.parts) {
      const width = part.columns.length, end = offset + part.rows * width;
      let held = this.series.get(part.id);
      if (part.start === 0) {
        held = { generation: part.generation, rows: 0 };
        for (const column of part.columns) held[column] = [];
        this.series.set(part.id, held);
      }
      if (!held || held.generation !== part.generation || held.rows !== part.start) whole = false;
      else {
        for (let at = offset; at < end; at += width)
          part.columns.forEach((column, index) => held[column].push(floats[at + index]));
        held.rows += part.rows;
      }
      offset = end;
    }
    return whole;
  }
}

// ---- drawing -------------------------------------------------------------------------------------------------------

// A canvas that knows its axes. Colours come from JupyterLab's CSS variables, read anew at every redraw.
class Plot {
  constructor(canvas, roles, hatched) {
    this.canvas = canvas; this.roles = roles; this.hatched = hatched;
    this.context = canvas.getContext("2d");
  }

  begin(style) {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth; this.height = this.canvas.clientHeight;
    const [w, h] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (this.canvas.width !== w || this.canvas.height !== h) { this.canvas.width = w; this.canvas.height = h; }
    const c = this.context;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, this.width, this.height);
    c.font = "11px " + style.font; c.lineJoin = "round";
    this.ink = style.ink; this.grid = style.grid; this.ground = style.ground;
    this.inspect = null;
    return c;
  }

  axes(chart, { yTicks = 4, rows = 0 } = {}) {
    let [x0, x1] = chart.x, [y0, y1] = rows ? [rows, 0] : chart.y;
    if (!(x1 > x0)) { x0 -= 0.5; x1 += 0.5; }
    if (y1 === y0) { y0 -= 0.5; y1 += 0.5; }
    const right = this.width - RIGHT, bottom = this.height - BOTTOM, up = rows ? 6 : TOP;
    this.x = (value) => LEFT + (value - x0) / (x1 - x0) * (right - LEFT);
    this.y = (value) => bottom - (value - y0) / (y1 - y0) * (bottom - up);
    this.xInverse = (pixel) => x0 + (pixel - LEFT) / (right - LEFT) * (x1 - x0);
    const c = this.context;
    c.strokeStyle = this.grid; c.fillStyle = this.ink; c.lineWidth = 1; c.beginPath();
    c.textAlign = "right"; c.textBaseline = "middle";
    if (!rows) for (const tick of ticks(y0, y1, yTicks)) {
      c.moveTo(LEFT, this.y(tick)); c.lineTo(right, this.y(tick));
      c.fillText(short(tick), LEFT - 5, this.y(tick));
    }
    c.textBaseline = "alphabetic"; c.fillText(chart.y_label, LEFT - 5, TOP - 10);
    c.textAlign = "center"; c.textBaseline = "top";
    const room = right - c.measureText(chart.x_label).width - 20;
    for (const tick of ticks(x0, x1, 6)) {
      c.moveTo(this.x(tick), up); c.lineTo(this.x(tick), bottom);
      if (this.x(tick) < room) c.fillText(short(tick, 5), this.x(tick), bottom + 5);
    }
    c.textAlign = "right"; c.fillText(chart.x_label, right, bottom + 5);
    c.stroke();
  }

  line(role, xs, ys, faint) {
    const c = this.context;
    c.strokeStyle = this.roles[role][0]; c.lineWidth = faint ? 1 : 2; c.globalAlpha = faint ? 0.8 : 1;
    c.beginPath();
    let pen = false;
    for (let i = 0; i < xs.length; i++) {
      if (!isFinite(ys[i])) { pen = false; continue; }
      if (pen) c.lineTo(this.x(xs[i]), this.y(ys[i])); else c.moveTo(this.x(xs[i]), this.y(ys[i]));
      pen = true;
    }
    c.stroke();
    c.globalAlpha = 1;
    if (xs.length === 1) { c.fillStyle = this.roles[role][0]; c.fillRect(this.x(xs[0]) - 2, this.y(ys[0]) - 2, 4, 4); }
  }

  // Parts stacked; every value holds until the next x.
  stack(roles, xs, parts) {
    const c = this.context, edge = this.width - RIGHT;
    c.save(); c.beginPath(); c.rect(LEFT, TOP, edge - LEFT, this.height - TOP - BOTTOM); c.clip();
    let floor = new Float64Array(xs.length);
    roles.forEach((role, index) => {
      const top = floor.map((value, i) => value + parts[index][i]);
      c.beginPath();
      c.moveTo(this.x(xs[0]), this.y(floor[0]));
      for (let i = 0; i < xs.length; i++) {
        const next = i + 1 < xs.length ? this.x(xs[i + 1]) : edge;
        c.lineTo(this.x(xs[i]), this.y(top[i])); c.lineTo(next, this.y(top[i]));
      }
      for (let i = xs.length - 1; i >= 0; i--) {
        const next = i + 1 < xs.length ? this.x(xs[i + 1]) : edge;
        c.lineTo(next, this.y(floor[i])); c.lineTo(this.x(xs[i]), this.y(floor[i]));
      }
      c.closePath();
      this.fill(role);
      floor = top;
    });
    c.restore();
  }

  fill(role) {
    const c = this.context;
    c.fillStyle = this.roles[role][0]; c.fill();
    if (!this.hatched.includes(role)) return;
    c.fillStyle = hatch(c); c.fill();
  }

  words(text) {
    const c = this.context;
    c.fillStyle = this.ink; c.textAlign = "center"; c.textBaseline = "middle";
    c.fillText(text, this.width / 2, this.height / 2);
  }
}

let hatchTile = null;
function hatch(context) {
  if (!hatchTile) {
    hatchTile = node("canvas"); hatchTile.width = hatchTile.height = 6;
    const c = hatchTile.getContext("2d");
    c.strokeStyle = "rgba(255,255,255,.7)"; c.lineWidth = 1.5;
    for (const shift of [-6, 0, 6]) { c.moveTo(shift, 6); c.lineTo(shift + 6, 0); }
    c.stroke();
  }
  return context.createPattern(hatchTile, "repeat");
}

function ticks(low, high, about) {
  const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((nice) => nice * power).find((nice) => nice >= 0.75 * raw);
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9); tick <= high / step + 1e-9; tick++) found.push(tick * step);
  return found;
}

function nearest(xs, x) {
  let best = 0;
  for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
  return best;
}

// Parts of a whole over time; the legend's roles are the columns.
function stacked(say) {
  return (plot, chart, held) => {
    const roles = chart.legend.map(([role]) => role), x = held.step || held.seconds;
    plot.axes(chart);
    plot.stack(roles, x, roles.map((role) => held[role]));
    plot.inspect = (pixel) => {
      let i = nearest(x, plot.xInverse(pixel));
      if (i > 0 && x[i] > plot.xInverse(pixel)) i--;
      const parts = roles.map((role) => `${plot.roles[role][1]} ${short(held[role][i])}`);
      return `${say(x[i])}: ${short(held.total[i])} ${chart.y_label} = ${parts.join(" + ")}`;
    };
  };
}

// Bars on named lanes: `held` has their columns, names, rows, roles and texts.
function lanes(plot, chart, held) {
  const first = [0];
  for (const rows of held.rows) first.push(first[first.length - 1] + rows);
  plot.axes(chart, { rows: first[first.length - 1] });
  const c = plot.context, height = Math.abs(plot.y(1) - plot.y(0)), boxes = [];
  c.textAlign = "right"; c.textBaseline = "middle"; c.fillStyle = plot.ink;
  held.names.forEach((name, lane) => c.fillText(name, LEFT - 5, plot.y(first[lane] + held.rows[lane] / 2)));
  for (let i = 0; i < held.count; i++) {
    const role = held.roles[held.kind[i]], thin = role === "waiting" ? 0.5 : 0.84;
    const box = [plot.x(held.start[i]), plot.y(first[held.lane[i]] + held.row[i] + (1 - thin) / 2)];
    box.push(Math.max(1, plot.x(held.end[i]) - box[0]), height * thin);
    c.beginPath(); c.rect(...box);
    plot.fill(role);
    if (role === "reduce" || role === "gather") {
      c.strokeStyle = plot.ground; c.lineWidth = 1; c.stroke();
    }
    boxes.push(box);
  }
  plot.inspect = (x, y) => {
    for (let i = boxes.length - 1; i >= 0; i--) {
      const [left, top, w, h] = boxes[i];
      if (x >= left - 1 && x <= left + w + 1 && y >= top && y <= top + h) return held.texts[i];
    }
    return "";
  };
}

const PANELS = {
  loss(plot, chart, held) {
    plot.axes(chart);
    plot.line("loss", held.step, held.loss, true);
    plot.line("loss_smooth", held.step, held.smooth);
    plot.inspect = (x) => {
      const i = nearest(held.step, plot.xInverse(x));
      return `step ${held.step[i]}: loss ${short(held.loss[i], 4)}, smoothed ${short(held.smooth[i], 4)}`;
    };
  },
  steps: stacked((step) => `step ${step}`),
  sync: (plot, chart, held, sync) => lanes(plot, chart, { ...sync, ...held, count: held.rows, rows: sync.rows }),
  wire: (plot, chart) => lanes(plot, chart, { ...chart.lanes, count: chart.lanes.lane.length }),
  memory: stacked((second) => `${short(second)} s`),
  utilization(plot, chart, held) {
    plot.axes(chart, { yTicks: 2 });
    for (const [name] of chart.legend) plot.line(name, held.seconds, held[name]);
    plot.inspect = (x) => {
      const i = nearest(held.seconds, plot.xInverse(x));
      return `${short(held.seconds[i])} s: `
        + chart.legend.map(([name, text]) => `${text.split(",")[0]} ${short(held[name][i])} %`).join(", ");
    };
  },
};
const OF_A_RANK = ["steps", "wire", "memory", "utilization"];

// ---- page ----------------------------------------------------------------------------------------------------------

class Panel {
  constructor(key, spec) {
    this.key = key; this.spec = spec; this.draw = PANELS[key];
    this.root = node("figure", `dplab-panel dplab-${key}`);
    const head = node("header");
    this.title = node("b"); this.value = node("span", "dplab-value");
    head.append(this.title, this.value);
    this.legend = node("div", "dplab-legend");
    this.canvas = node("canvas"); this.canvas.setAttribute("role", "img");
    this.caption = node("figcaption");
    this.root.append(head, this.legend, this.canvas, this.caption);
    this.plot = new Plot(this.canvas, spec.roles, spec.hatched);
    this.tip = node("div", "dplab-tip"); this.root.append(this.tip);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.style.display = "none"; });
  }

  point(event) {
    const text = this.plot.inspect ? this.plot.inspect(event.offsetX, event.offsetY) : "";
    this.tip.textContent = text;
    this.tip.style.display = text ? "block" : "none";
    this.tip.style.left = `${Math.min(event.offsetX + 12, this.root.clientWidth - this.tip.offsetWidth - 4)}px`;
    this.tip.style.top = `${this.canvas.offsetTop + Math.max(0, event.offsetY - 30)}px`;
  }

  redraw(store, rank, style) {
    const name = OF_A_RANK.includes(this.key) ? `${this.key}/${rank}` : this.key, chart = store.charts[name];
    if (!chart) return;
    this.title.textContent = chart.title;
    this.value.textContent = this.value.title = chart.value;
    this.caption.textContent = chart.caption;
    this.plot.begin(style);
    const held = store.series.get(name);
    if (chart.words || !(chart.lanes || (held && held.rows))) this.plot.words(chart.words || "");
    else this.draw(this.plot, chart, held, store.sync);
    this.say(chart.legend);
    this.canvas.setAttribute("aria-label", `${chart.title}: ${chart.note}`);
  }

  say(legend) {
    const text = JSON.stringify(legend);
    if (text === this.said) return;
    this.said = text;
    this.legend.replaceChildren(...legend.map(([role, words]) => {
      const color = this.spec.roles[role][0], entry = node("span", "", words), swatch = node("i");
      swatch.style.background = this.spec.hatched.includes(role)
        ? `repeating-linear-gradient(135deg, ${color} 0 2px, rgba(255,255,255,.75) 2px 3.5px)` : color;
      entry.prepend(swatch);
      return entry;
    }));
  }
}

function header(spec, send, redraw) {
  const root = node("div", "dplab-status"), state = node("span", "dplab-state");
  const facts = node("span", "dplab-facts"), problem = node("span", "dplab-problem");
  const rank = node("select");
  rank.setAttribute("aria-label", "rank shown");
  for (let r = 0; r < spec.ranks; r++) rank.append(new Option(`rank ${r}`, r));
  rank.addEventListener("change", () => { send({ type: "rank", rank: Number(rank.value) }); redraw(); });
  const stop = node("button", "", "Stop run");
  stop.title = "the same as run.stop() in a cell";
  stop.addEventListener("click", () => {
    send({ type: "stop" });
    stop.textContent = "stopping …"; stop.disabled = true;
  });
  root.append(state, facts, problem, rank, stop);
  const update = (status) => {
    state.textContent = status.state;
    state.style.background = spec.states[status.state] || "";
    facts.replaceChildren(...status.facts.map(([name, value]) => {
      const fact = node("span", "", `${name} `);
      fact.append(node("b", "", value));
      return fact;
    }));
    problem.textContent = status.problem || "";
    if (spec.final.includes(status.state)) stop.hidden = true;
  };
  return { root, update, rank: () => Number(rank.value || 0) };
}

function render({ model, el }) {
  const spec = model.get("spec"), store = new Store(), root = node("div", "dplab-board");
  const send = (content) => model.send(content);
  const panels = Object.keys(PANELS).map((key) => new Panel(key, spec));
  const grid = node("div", "dplab-grid");
  let scheduled = 0, nextAt = 0, sent = 0, redraws = 0, askedAt = 0, ackedAt = 0;

  const redraw = () => {
    scheduled = 0;
    if (!root.clientWidth) return;
    const began = performance.now(), css = getComputedStyle(root), rank = top.rank();
    const style = { ink: css.color, grid: css.getPropertyValue("--dplab-grid"), ground: css.backgroundColor,
      font: css.fontFamily };
    top.update(store.status);
    for (const panel of panels) panel.redraw(store, rank, style);
    const ended = performance.now();
    nextAt = ended + (ended - began);
    Object.assign(root.dataset, { seq: store.seq, redraws: ++redraws, step: store.status.steps ?? "",
      state: store.status.state, drawMs: (ended - began).toFixed(2), lagMs: Math.round(Date.now() - sent) });
  };
  const schedule = () => {
    if (!scheduled) scheduled = setTimeout(() => requestAnimationFrame(redraw), Math.max(0, nextAt - performance.now()));
  };
  const receive = (content, buffers) => {
    const now = Date.now();
    sent = content.sent;
    if (!store.apply(content, buffers[0]) && now - askedAt > 1000) { askedAt = now; send({ type: "hello" }); }
    if (now - ackedAt > 1000) { ackedAt = now; send({ type: "ack", seq: content.seq }); }
    schedule();
  };

  const top = header(spec, send, schedule);
  root.append(top.root, grid);
  const [loss, steps, sync, wire, memory, utilization] = panels.map((panel) => panel.root);
  grid.append(loss, steps, sync, memory);
  // the small second halves: bytes below the buckets, utilization on the time axis of memory
  sync.append(wire); memory.append(utilization);
  el.append(root);
  const first = model.get("snapshot");
  if (first && first.content) { store.apply(first.content, first.data); sent = first.content.sent; }
  model.on("msg:custom", receive);
  const resized = new ResizeObserver(schedule);
  resized.observe(root);
  const themed = new MutationObserver(schedule);
  themed.observe(document.body, { attributes: true });
  send({ type: "hello", fresh: true });
  schedule();
  return () => {
    model.off("msg:custom", receive);
    resized.disconnect(); themed.disconnect();
    clearTimeout(scheduled);
  };
}

export default { render };
