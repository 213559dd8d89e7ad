// The live board: columns come in as float32, pictures are drawn on canvas. Every word, scale and mark comes with the
// message, so that the still picture shows the same and a new panel needs nothing here. The page applies every message
// and drops only redraws: the next one waits as long as the last one took, so that a slow page lags by one at most.

const LEFT = 50, RIGHT = 12, TOP = 20, BOTTOM = 22;

function node(tag, className, text) {
  const made = document.createElement(tag);
  made.dataset.lmSuppressShortcuts = "";   // its keys are its own: of a notebook's, "d" twice deletes the cell
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
  constructor() { this.columns = new Map(); this.status = {}; this.charts = {}; this.seq = 0; }

  // Applies a message; false where rows are missing and a keyframe is needed.
  apply(content, view) {
    let whole = content.keyframe || content.seq === this.seq + 1;
    if (content.keyframe) { this.columns.clear(); this.charts = {}; }
    this.seq = content.seq;
    Object.assign(this.status, content.status);
    for (const [name, said] of Object.entries(content.charts))
      this.charts[name] = Object.assign(this.charts[name] || {}, said);
    const floats = new Float32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
    let offset = 0;
    for (const part of content.parts) {
      let held = this.columns.get(part.id);
      if (part.start === 0) this.columns.set(part.id, held = Array.from({ length: part.columns }, () => []));
      if (!held || held.length !== part.columns || (held.length && held[0].length !== part.start)) whole = false;
      else held.forEach((column, index) => {
        for (let row = 0; row < part.rows; row++) column.push(floats[offset + index * part.rows + row]);
      });
      offset += part.columns * part.rows;
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
    if (!(x1 > x0)) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    if (y1 === y0) [y0, y1] = [y0 - 0.5, y1 + 0.5];
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
    for (const tick of ticks(x0, x1, 6, chart.x_label === "step" ? 1 : 0)) {
      c.moveTo(this.x(tick), up); c.lineTo(this.x(tick), bottom);
      if (this.x(tick) < room) c.fillText(short(tick, 5), this.x(tick), bottom + 5);
    }
    c.textAlign = "right"; c.fillText(chart.x_label, right, bottom + 5);
    c.stroke();
  }

  line(role, xs, ys, faint) {
    const c = this.context;
    if (xs.length === 1) {
      c.fillStyle = this.roles[role][0]; c.beginPath(); c.arc(this.x(xs[0]), this.y(ys[0]), 3, 0, 7); c.fill();
      return;
    }
    c.strokeStyle = this.roles[role][0]; c.lineWidth = faint ? 1 : 2; c.globalAlpha = faint ? 0.8 : 1;
    c.save(); c.beginPath(); c.rect(LEFT, 0, this.width - RIGHT - LEFT, this.height - BOTTOM + 1); c.clip();
    c.beginPath();
    let pen = false;
    for (let i = 0; i < xs.length; i++) {
      if (!isFinite(ys[i])) { pen = false; continue; }
      if (pen) c.lineTo(this.x(xs[i]), this.y(ys[i])); else c.moveTo(this.x(xs[i]), this.y(ys[i]));
      pen = true;
    }
    c.stroke(); c.restore();
    c.globalAlpha = 1;
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
      const next = (i) => i + 1 < xs.length ? this.x(xs[i + 1]) : edge;
      for (let i = 0; i < xs.length; i++) {
        c.lineTo(this.x(xs[i]), this.y(top[i])); c.lineTo(next(i), this.y(top[i]));
      }
      for (let i = xs.length - 1; i >= 0; i--) {
        c.lineTo(next(i), this.y(floor[i])); c.lineTo(this.x(xs[i]), this.y(floor[i]));
      }
      c.closePath();
      this.fill(role);
      floor = top;
    });
    c.restore();
  }

  fill(role) {
    const c = this.context;
    for (const style of [this.roles[role][0], ...(this.hatched.includes(role) ? [hatch(c)] : [])]) {
      c.fillStyle = style; c.fill();
    }
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

function ticks(low, high, about, least = 0) {
  const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(least, [1, 2, 5, 10].map((nice) => nice * power).find((nice) => nice >= 0.75 * raw));
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9); tick <= high / step + 1e-9; tick++) found.push(tick * step);
  return found;
}

function nearest(xs, x) {
  let best = 0;
  for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
  return best;
}

const at = (chart, x) => chart.x_label === "step" ? `step ${Math.round(x)}` : `${short(x)} ${chart.x_label}`;

// What is under the pointer: parts of a stack and their sum, or the value of every line.
function values(plot, chart, columns) {
  const area = chart.marks.findIndex((mark) => mark.kind === "area"), of = Math.max(area, 0);
  const [xs, ...parts] = columns[of];
  plot.inspect = (pixel) => {
    const x = plot.xInverse(pixel);
    let i = nearest(xs, x);
    if (area >= 0 && i > 0 && xs[i] > x) i--;
    if (area < 0) return `${at(chart, xs[i])}: ` + chart.marks.flatMap((mark, k) => columns[k][0].length < 2 ? []
      : `${plot.roles[mark.role][1]} ${short(columns[k][1][nearest(columns[k][0], x)], 4)}`).join(", ");
    const said = chart.marks[of].roles.map((role, part) => `${plot.roles[role][1]} ${short(parts[part][i])}`);
    const sum = parts.reduce((total, part) => total + part[i], 0);
    return `${at(chart, xs[i])}: ${short(sum)} ${chart.y_label} = ${said.join(" + ")}`;
  };
}

// Bars on named lanes.
function lanes(plot, mark, [lane, row, start, end, kind]) {
  const first = [0];
  for (const rows of mark.rows) first.push(first[first.length - 1] + rows);
  const c = plot.context, height = Math.abs(plot.y(1) - plot.y(0)), boxes = [];
  c.textAlign = "right"; c.textBaseline = "middle"; c.fillStyle = plot.ink;
  let below = -Infinity;   // names that would lie on each other are left out
  mark.names.map((name, at) => [name, plot.y(first[at] + mark.rows[at] / 2)]).forEach(([name, y]) => {
    if (y - below > 10) c.fillText(name, LEFT - 5, below = y);
  });
  for (let i = 0; i < lane.length; i++) {
    const role = mark.roles[kind[i]], thin = role === "waiting" ? 0.5 : 0.84;
    const box = [plot.x(start[i]), plot.y(first[lane[i]] + row[i] + (1 - thin) / 2)];
    box.push(Math.max(1, plot.x(end[i]) - box[0]), height * thin);
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
      if (x >= left - 1 && x <= left + w + 1 && y >= top && y <= top + h) return mark.texts[i];
    }
    return "";
  };
}

function draw(plot, chart, columns, small) {
  const bars = chart.marks.find((mark) => mark.kind === "lanes");
  plot.axes(chart, { rows: bars ? bars.rows.reduce((sum, rows) => sum + rows, 0) : 0, yTicks: small ? 2 : 4 });
  if (!bars) values(plot, chart, columns);
  chart.marks.forEach((mark, i) => {
    if (mark.kind === "line") plot.line(mark.role, columns[i][0], columns[i][1], mark.faint);
    else if (mark.kind === "area") plot.stack(mark.roles, columns[i][0], columns[i].slice(1));
    else lanes(plot, mark, columns[i]);
  });
}

// ---- page ----------------------------------------------------------------------------------------------------------

function menu(label, options, chosen) {
  const made = node("select");
  made.setAttribute("aria-label", label);
  const fill = (all, now) => made.replaceChildren(...all.map(([value, text]) => new Option(text, value, 0, value === now)));
  fill(options);
  made.addEventListener("change", () => chosen(made.value));
  return { root: made, fill };
}

class Panel {
  constructor(key, spec, small, redraw) {
    this.key = key; this.spec = spec; this.small = small; this.choice = "";
    this.root = node("figure", `dplab-panel dplab-${key}${small ? " dplab-small" : ""}`);
    const head = node("header");
    this.title = node("b"); this.value = node("span", "dplab-value");
    this.menu = menu(`${key} shown`, [], (value) => { this.choice = value; redraw(); });
    head.append(this.title, this.menu.root, this.value);
    this.legend = node("div", "dplab-legend");
    this.canvas = node("canvas"); this.canvas.setAttribute("role", "img");
    this.log = node("pre");
    this.caption = node("figcaption");
    this.root.append(head, this.legend, this.canvas, this.log, this.caption);
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

  // The chart of the rank, or of the choice, or the only one.
  chart(store, rank) {
    const of = Object.values(store.charts).filter((one) => one.choice && one.name.startsWith(`${this.key}/`));
    if (of.length && String(of.map((one) => one.choice)) !== this.choices) {
      this.choices = String(of.map((one) => one.choice));
      this.menu.fill(of.map((one) => [one.choice, one.choice]));
      this.choice = of[0].choice;
    }
    this.menu.root.hidden = !of.length;
    return store.charts[`${this.key}/${of.length ? this.choice : rank}`] || store.charts[this.key];
  }

  redraw(store, rank, style) {
    const chart = this.chart(store, rank);
    if (!chart) return;
    [this.title.textContent, this.caption.textContent] = [chart.title, chart.caption];
    this.value.textContent = this.value.title = chart.value;
    this.value.classList.toggle("dplab-alert", chart.alert);
    const log = chart.marks.find((mark) => mark.kind === "log" && mark.lines.length), bars = chart.marks[0].rows;
    this.canvas.hidden = Boolean(log); this.log.hidden = !log;
    if (log) this.print(log.lines);
    else {
      if (this.small && bars) this.canvas.style.height = `${28 + 15 * bars.length}px`;
      this.plot.begin(style);
      if (chart.words) this.plot.words(chart.words);
      else draw(this.plot, chart, chart.marks.map((_, i) => store.columns.get(`${chart.name}#${i}`) || [[]]), this.small);
    }
    this.say(chart.legend);
    this.canvas.setAttribute("aria-label", `${chart.title}: ${chart.note}`);
  }

  print(lines) {
    const text = JSON.stringify(lines);
    if (text === this.printed) return;
    this.printed = text;
    const low = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 30;
    this.log.replaceChildren(...lines.flatMap(([whose, kind, words]) =>
      [node("b", "", `${whose} `), node("span", `dplab-${kind}`, `${words}\n`)]));
    if (low) this.log.scrollTop = this.log.scrollHeight;
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

function button(text, title, clicked) {
  const made = node("button", "", text);
  made.title = title;
  made.addEventListener("click", clicked);
  return made;
}

function header(spec, send, redraw) {
  const root = node("div", "dplab-status"), state = node("span", "dplab-state");
  const facts = node("span", "dplab-facts"), problem = node("span", "dplab-problem");
  const rank = menu("rank shown", Array.from({ length: spec.ranks }, (_, r) => [r, `rank ${r}`]), (chosen) => {
    send({ type: "rank", rank: Number(chosen) }); redraw();
  });
  let asked = "", paused = false, wanted = null;
  const ask = (type, waits, more) => { asked = waits; send({ type, ...more }); redraw(); };
  const hold = button("Pause", "the same as run.pause() and run.resume() in a cell",
    () => ask(paused ? "resume" : "pause", paused ? "resuming …" : "pausing …"));
  const step = button("Step", "the same as run.step() in a cell: one step, then pause", () => ask("step", "one step …"));
  const profile = button("Profile", "the next three steps, as run.profile(steps=(first, last)) in a cell; the log tells where they lie",
    () => ask("profile", "recording …"));
  const snapshot = button("Snapshot", "of CUDA's memory: run.profile(steps, memory=True)", () => ask("snapshot", "recording …"));
  const stop = button("Stop run", "the same as run.stop() in a cell", () => ask("stop", "stopping …"));
  const strategy = menu("strategy to relaunch under", spec.strategies.map((name) => [name, name]), () => {});
  const again = button("Relaunch", "the same as run.relaunch(strategy=...) in a cell: stops this run, starts another",
    () => ask("relaunch", "relaunching …", { strategy: strategy.root.value }));
  const compare = menu("run to compare with", [], (chosen) => send({ type: "compare", run: chosen }));
  const past = node("input"), live = button("Live", "the same as board.follow() in a cell", () => seek(null));
  past.type = "range"; past.min = 1; past.title = "the same as board.seek(step) in a cell";
  past.setAttribute("aria-label", "step shown");
  const seek = (number) => { wanted = number; send({ type: "seek", step: number }); redraw(); };
  past.addEventListener("input", () => seek(Number(past.value)));
  const bar = node("div", "dplab-controls"), said = node("span", "dplab-asked");
  bar.append(hold, step, profile, snapshot, stop, strategy.root, again, compare.root, past, live, said);
  root.append(state, facts, rank.root, problem, bar);
  const update = (status) => {
    Object.assign(state, { textContent: status.state, title: status.path });
    state.style.background = spec.states[status.state] || "";
    facts.replaceChildren(...status.facts.map(([name, value]) => {
      const fact = node("span", "", `${name} `);
      fact.append(node("b", "", value));
      return fact;
    }));
    problem.textContent = status.problem || "";
    if (status.done !== root.done) { root.done = status.done; asked = ""; }
    hold.textContent = (paused = status.state === "paused") ? "Resume" : "Pause";
    const over = spec.final.includes(status.state);
    for (const one of [hold, step, profile, snapshot, stop]) [one.hidden, one.disabled] = [over, Boolean(asked)];
    snapshot.hidden = over || !status.cuda;
    again.disabled = Boolean(asked); again.hidden = strategy.root.hidden = !status.relaunch;
    const beside = status.compared, runs = JSON.stringify([status.others, beside]);
    if (runs !== root.others) { root.others = runs; compare.fill([["", "compare with …"], ...status.others], beside); }
    compare.root.hidden = !status.others.length;
    past.hidden = !(status.last > 1); past.max = status.last || 1;
    if (document.activeElement !== past || wanted === null) past.value = status.shown ?? status.last ?? 1;
    live.hidden = status.shown === null;
    said.textContent = asked || (status.shown === null ? "" : `as after step ${status.shown} of ${status.last}`);
  };
  return { root, update, rank: () => Number(rank.root.value || 0) };
}

function render({ model, el }) {
  const spec = model.get("spec"), store = new Store(), root = node("div", "dplab-board");
  const send = (content) => model.send(content);
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

  const top = header(spec, send, schedule), panels = [];
  root.append(top.root, grid);
  for (const keys of spec.grid) {   // a cell: a panel, or one with a small one below
    const cell = node("div", "dplab-cell"), own = keys.map((key, place) => new Panel(key, spec, place > 0, schedule));
    panels.push(...own); cell.append(...own.map((panel) => panel.root)); grid.append(cell);
  }
  el.append(root);
  const first = model.get("snapshot");
  if (first && first.content) { store.apply(first.content, first.data); sent = first.content.sent; }
  model.on("msg:custom", receive);
  const resized = new ResizeObserver(schedule), themed = new MutationObserver(schedule);
  resized.observe(root); themed.observe(document.body, { attributes: true });
  send({ type: "hello", fresh: true });
  schedule();
  return () => {
    model.off("msg:custom", receive);
    resized.disconnect(); themed.disconnect();
    clearTimeout(scheduled);
  };
}

export default { render };
