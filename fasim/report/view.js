// Draws the plan: views linked by one time, the clock of one head. What a frame costs is bounded by what
// happens at that time, never by the length of the head.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const MODEL = makeModel(DATA.constants, DATA.gpus), EVENTS = makeEvents(MODEL);
const VERSIONS = ["v1", "v2", "v3"], ALGOS = ["standard", ...VERSIONS];
const MOST_STEPS = 1 << 18, MOST_CELLS = 128;
const still = window.matchMedia("(prefers-reduced-motion: reduce)");
const $ = (selector) => document.querySelector(selector);

const state = {
  language: DATA.language, kitchen: false, version: DATA.entry.algo, side: false, time: 0, playing: false, speed: "4",
  problem: MODEL.problemOf(DATA.problem), gpu: DATA.gpus[DATA.gpu], ask: null, entries: {}, sims: {}, illegal: null, curves: null,
};

// ---- words and numbers ----

const words = () => WORDS[state.language];
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function bytesText(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; ++i) n /= 1024;
  return `${i ? n.toFixed(n < 10 ? 2 : 1) : n} ${units[i]}`;
}

function secondsText(s) {
  const [unit, scale] = s < 1e-3 ? ["µs", 1e6] : s < 1 ? ["ms", 1e3] : ["s", 1];
  return `${(s * scale).toPrecision(4)} ${unit}`;
}

const countText = (n) => Math.round(n).toLocaleString("en-US");
const flopsText = (n) => `${(n / 1e12).toPrecision(4)} TFLOP`;

function escaped(text) {
  return String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
}

// ---- what is planned ----

function wholeTile(tile) {
  return { m: tile.block_q, n: tile.block_kv, warps: tile.warps, stages: tile.stages, step: tile.step_kv || tile.block_kv };
}

const sameTile = (a, b) => ["m", "n", "warps", "stages", "step"].every((name) => a[name] === b[name]);

// Plans all versions anew; where the asked tile is illegal the last legal plan stays on show.
function recompute() {
  const { problem, gpu, ask } = state, options = { reserve: DATA.reserve };
  const entries = Object.fromEntries(ALGOS.map((algo) => [algo, MODEL.plan(problem, gpu, algo, { ...options, ask: algo === state.version ? ask : null })]));
  const chosen = entries[state.version], last = state.entries[state.version];
  state.illegal = chosen.available === false ? chosen.reason : chosen.illegal || null;
  const still = state.illegal && last && last.time && last.problem === problem && last.gpu === gpu;
  state.entries = still ? { ...entries, [state.version]: last } : entries;
  state.sims = {};
  state.curves = null;
  cells = null;
  state.time = Math.min(state.time, duration());
  writeControls();
  drawStatic();
  draw();
  window.setTimeout(drawCurves, 0);
}

const entryOf = (version) => {
  const entry = state.entries[version];
  return entry && entry.time ? entry : null;
};

function simOf(version) {
  const entry = entryOf(version);
  if (!entry || !entry.t) return null;
  if (!(version in state.sims)) {
    const visits = MODEL.tileVisits(entry.problem, entry.variant, entry.t, entry.t.step);
    state.sims[version] = visits.steps > MOST_STEPS ? null : EVENTS.simulate(entry);
  }
  return state.sims[version];
}

const shownVersions = () => (state.side ? VERSIONS : [state.version]).filter(simOf);
const duration = () => Math.max(0, ...shownVersions().map((version) => simOf(version).duration));

// The first turn that is not over at a time.
function turnAt(sim, time) {
  let low = 0, high = sim.turns;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sim.end[middle] > time) high = middle; else low = middle + 1;
  }
  return low;
}

// Events of the turns that are under way between two times.
function eventsBetween(sim, from, to) {
  const found = [];
  for (let i = Math.max(0, turnAt(sim, from)); i < sim.turns && sim.start[i] <= to; ++i) {
    for (const e of sim.turn(i)) if (e.end >= from && e.start <= to) found.push(e);
  }
  return found;
}

// Bytes, of all heads, and steps of one that are done at a time.
function doneAt(sim, time) {
  const first = turnAt(sim, time), done = { read: sim.read[first], write: sim.write[first], steps: sim.steps[first], inFlight: [] };
  for (let i = first; i < sim.turns && sim.start[i] <= time; ++i) {
    for (const e of sim.turn(i)) {
      if (e.end <= time) {
        if (e.kind === "load") done.read += EVENTS.ofAll(sim, e);
        if (e.kind === "store") done.write += EVENTS.ofAll(sim, e);
        if (e.what === "s") done.steps += 1;
      }
    }
  }
  return done;
}

// The next moment at which something starts or ends, in a direction.
function momentFrom(sim, time, direction) {
  const around = turnAt(sim, time);
  let best = direction > 0 ? sim.duration : 0;
  for (let i = Math.max(0, around - 2); i < Math.min(sim.turns, around + 3); ++i) {
    for (const e of sim.turn(i)) {
      for (const moment of [e.start, e.end]) {
        if (direction > 0 ? moment > time + 1e-9 && moment < best : moment < time - 1e-9 && moment > best) best = moment;
      }
    }
  }
  return best;
}

// ---- (a) the matrix ----

let cells = null;  // the still part of the matrix, and where its cells are

function canvasContext(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth || canvas.parentNode.clientWidth;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

// full, partial or skipped: one cell of keys [k0, k1) against queries [q0, q1).
function kindOf(p, group, q0, q1, k0, k1) {
  const rows = p.seq * group, last = Math.min(q1, rows) - 1;
  const first = MODEL.seen(p, q0, 1, group), final = MODEL.seen(p, last, 1, group);
  const end = Math.min(k1, p.seq_kv);
  if (k0 >= final[1] || end <= first[0]) return "skip";
  const ragged = q0 < 0 || q1 > rows || k1 > p.seq_kv;
  return k0 >= final[0] && end <= first[1] && !ragged ? "full" : "partial";
}

function matrixCells(entry) {
  const p = entry.problem, group = MODEL.packs(entry.variant) ? p.group : 1, t = entry.t;
  const rows = Math.max(1, Math.ceil((p.seq * group) / t.m)), columns = Math.max(1, Math.ceil(p.seq_kv / t.n));
  const perRow = Math.ceil(rows / MOST_CELLS), perColumn = Math.ceil(columns / MOST_CELLS);
  const before = MODEL.rowsBefore(p, entry.variant, t.m);
  const made = { rows, columns, perRow, perColumn, before, kinds: [], counts: countKinds(p, group, t, rows, columns, before), group };
  for (let i = 0; i * perRow < rows; ++i) {
    const line = [];
    for (let j = 0; j * perColumn < columns; ++j) {
      const q0 = i * perRow * t.m - before, k0 = j * perColumn * t.n;
      line.push(kindOf(p, group, q0, q0 + perRow * t.m, k0, k0 + perColumn * t.n));
    }
    made.kinds.push(line);
  }
  return made;
}

// Exact counts of tiles, a row of them at a time.
function countKinds(p, group, t, rows, columns, before) {
  const counts = { full: 0, partial: 0, skip: 0 };
  for (let i = 0; i < rows; ++i) {
    const q0 = i * t.m - before, own = Math.min(t.m, p.seq * group - q0) + Math.min(q0, 0);
    const [start, stop] = MODEL.seen(p, q0, t.m, group), visited = stop > start ? Math.ceil(stop / t.n) - Math.floor(start / t.n) : 0;
    const from = MODEL.seen(p, q0 + own - 1, 1, group)[0], to = MODEL.seen(p, q0, 1, group)[1];
    const whole = own === t.m ? Math.max(0, Math.floor(to / t.n) - Math.ceil(from / t.n)) : 0;
    counts.full += visited ? whole : 0;
    counts.partial += visited - (visited ? whole : 0);
    counts.skip += columns - visited;
  }
  return counts;
}

function matrixGeometry(width, made) {
  const size = Math.min(width, 460), across = made.kinds[0].length, down = made.kinds.length;
  const height = Math.min(size, Math.max(60, (size * down) / across)), left = (width - size) / 2;
  return { left, size, height, cellX: size / across, cellY: height / down };
}

// The matrix as it stands and, in another colour, as it is when all visited tiles are done.
function stillMatrix(entry, width) {
  const made = matrixCells(entry), g = matrixGeometry(width, made);
  const still = paintCells(made, g, width, (kind) => color(kind));
  const done = paintCells(made, g, width, (kind) => (kind === "skip" ? null : color("done")));
  return { ...made, g, still, done, width };
}

function paintCells(made, g, width, hue) {
  const canvas = document.createElement("canvas"), scale = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(g.height * scale));
  const context = canvas.getContext("2d"), gap = g.cellX > 5 && g.cellY > 5 ? 1 : 0;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  made.kinds.forEach((line, i) => line.forEach((kind, j) => {
    const fill = hue(kind);
    if (!fill) return;
    context.fillStyle = fill;
    context.fillRect(g.left + j * g.cellX, i * g.cellY, g.cellX - gap, g.cellY - gap);
  }));
  return canvas;
}

function drawMatrix(active) {
  const canvas = $("#matrix canvas"), entry = entryOf(state.version), sim = simOf(state.version);
  if (!entry) return;
  const wide = canvas.parentNode.clientWidth - 26;
  if (!cells || cells.width !== wide) cells = stillMatrix(entry, wide);
  const { g } = cells, [context] = canvasContext(canvas, g.height + 2);
  context.drawImage(cells.still, 0, 0, wide, g.height);
  if (!sim) return;
  const t = entry.t, place = (query, key) => [g.left + (key / t.n / cells.perColumn) * g.cellX, ((startOf(query, entry) + cells.before) / t.m / cells.perRow) * g.cellY];
  drawDone(context, entry, sim, place);
  const height = Math.max(g.cellY / cells.perRow, 3), width = Math.max((g.cellX / cells.perColumn) * (t.step / t.n), 3);
  for (const e of active) {
    if (!AT_WORK.has(e.what)) continue;
    const [x, y] = place(e.query, Math.min(e.key, cells.columns * t.n - t.step));
    context.fillStyle = color(HUE[e.what] || e.what);
    context.fillRect(x, y, width, height);
    context.strokeStyle = color("lit");
    context.lineWidth = 2;
    context.strokeRect(x, y, width, height);
  }
  const now = active.find((e) => e.what === "s") || active.find((e) => AT_WORK.has(e.what));
  canvas.setAttribute("aria-label", `${words().matrix}. ${legendCounts()}${now ? ` ${words().lit}: ${tileText(now, entry)}` : ""}`);
}

// Turns of the main kernel that are over: their rows, in V1 their columns, of the tiles visited.
function drawDone(context, entry, sim, place) {
  const { g } = cells, t = entry.t, first = Math.max(0, turnAt(sim, state.time) - sim.before);
  if (entry.variant === "v1") return paste(context, g.left, 0, place(0, Math.min(first, cells.columns) * t.n)[0] - g.left, g.height);
  const finished = Math.min(first, cells.rows), causal = entry.variant === "v2" && entry.problem.mask === "causal";
  if (!causal && !MODEL.isV3(entry.variant)) return paste(context, g.left, 0, g.size, (finished / cells.perRow) * g.cellY);
  const y = ((cells.rows - finished) / cells.perRow) * g.cellY;
  return paste(context, g.left, y, g.size, g.height - y);
}

// A part of the matrix as it is when all is done.
function paste(context, x, y, width, height) {
  if (width <= 0 || height <= 0) return;
  const scale = cells.done.width / cells.width;
  context.drawImage(cells.done, x * scale, y * scale, width * scale, height * scale, x, y, width, height);
}

const startOf = (query, entry) => MODEL.tileStart(entry.problem, entry.variant, entry.t, query);
const tileText = (e, entry) => `Q ${e.query}–${Math.min(startOf(e.query, entry) + entry.t.m, entry.problem.seq * cellsGroup(entry)) - 1} × K ${e.key}–${e.key + entry.t.step - 1}`;
const cellsGroup = (entry) => (MODEL.packs(entry.variant) ? entry.problem.group : 1);

function legendCounts() {
  const w = words(), n = cells ? cells.counts : { full: 0, partial: 0, skip: 0 };
  return `${countText(n.full)} ${w.full}, ${countText(n.partial)} ${w.partial}, ${countText(n.skip)} ${w.skipped}.`;
}

const swatch = (name, text, under = "") => `<span class="key"><span class="swatch" style="background:linear-gradient(var(--${name}), var(--${name}))${under}"></span>${escaped(text)}</span>`;

function writeMatrixLegend() {
  const w = words(), n = cells ? cells.counts : { full: 0, partial: 0, skip: 0 };
  $("#matrix-legend").innerHTML = swatch("full", `${countText(n.full)} ${w.full}`) + swatch("partial", `${countText(n.partial)} ${w.partial}`)
    + swatch("skip", `${countText(n.skip)} ${w.skipped}`) + swatch("done", w.done, ", var(--full)") + swatch("s", w.s) + swatch("p", w.p) + swatch("pv", w.pv);
}

// ---- (b) the memory ----

const COLUMNS = { hbm: 70, l2: 250, smem: 430, registers: 610 }, SLOTS = 16;

function stillMemory() {
  const w = words(), entry = entryOf(state.version), bar = (name, y) => {
    const x = COLUMNS[name];
    return `<text x="${x}" y="18" text-anchor="middle">${escaped(w[name])}</text>
      <rect x="${x - 50}" y="28" width="100" height="120" rx="6" fill="none" stroke="var(--line)"/>
      <rect data-bar="${name}" x="${x - 50}" y="${y}" width="100" height="0" fill="var(--full)"/>
      <text class="small" x="${x}" y="164" text-anchor="middle" data-label="${name}"></text>
      <text class="small" x="${x}" y="178" text-anchor="middle" data-capacity="${name}"></text>`;
  };
  const arrows = [["hbm", "l2"], ["l2", "smem"], ["smem", "registers"]].map(([a, b]) => `<line x1="${COLUMNS[a] + 54}" x2="${COLUMNS[b] - 54}" y1="88" y2="88" stroke="var(--line)" stroke-width="2"/>`).join("");
  const movers = Array.from({ length: SLOTS }, (_, i) => `<g data-mover="${i}" visibility="hidden"><rect x="-13" y="-9" width="26" height="18" rx="3"/><text class="mover" y="4" text-anchor="middle" style="fill:var(--paper);font-size:10px"></text></g>`).join("");
  const title = `${w.memory}: ${entry ? entry.t.m : ""}×${entry ? entry.t.n : ""}`;
  $("#memory .drawing").innerHTML = `<svg viewBox="0 0 680 186" role="img" aria-label="${escaped(title)}">${arrows}${Object.keys(COLUMNS).map((name) => bar(name, 148)).join("")}${movers}</svg>`;
}

const SHORT = { s: "S", pv: "PV", k: "K", v: "V", vt: "Vᵀ", q: "Q", o: "O", lse: "LSE", o_acc: "O", bias: "B", o_part: "O", q_scale: "qₛ", k_scale: "kₛ", v_scale: "vₛ" };
const HUE = { k: "k", v: "v", vt: "v", q: "q", o: "o", lse: "o", o_acc: "o", m: "o", l: "o", bias: "p", slopes: "p", o_part: "o", m_part: "o", l_part: "o",
  q_scale: "q", k_scale: "k", v_scale: "v", cu_seqlens_q: "q", cu_seqlens_k: "k" };
const TILES = new Set(["q", "k", "v", "vt"]), AT_WORK = new Set(["s", "p", "pv"]);

// Loads come from HBM, tiles to shared memory, unless they are only laid out anew, and the rest to
// registers; stores go back; a product of what lies in shared memory lands in registers.
const isShared = (e) => e.kind === "load" && TILES.has(e.what) && e.role !== "transposer";

function pathOf(e) {
  if (e.kind === "product") return [COLUMNS.smem, COLUMNS.registers];
  if (e.kind === "store") return [COLUMNS.registers, COLUMNS.hbm];
  return [COLUMNS.hbm, isShared(e) ? COLUMNS.smem : COLUMNS.registers];
}

function drawMemory(active, sim, done) {
  const entry = entryOf(state.version);
  if (!entry || !sim) return;
  const movers = document.querySelectorAll("#memory [data-mover]");
  const moving = active.filter((e) => (e.bytes || e.kind === "product") && e.end > state.time);
  movers.forEach((mover, i) => {
    const e = moving[i];
    mover.setAttribute("visibility", e ? "visible" : "hidden");
    if (!e) return;
    const share = still.matches ? 1 : (state.time - e.start) / (e.end - e.start || 1);
    const [from, to] = pathOf(e), x = from + (to - from) * share;
    mover.setAttribute("transform", `translate(${x.toFixed(1)} ${44 + (i % 5) * 22})`);
    mover.firstElementChild.setAttribute("fill", `var(--${HUE[e.what] || e.what})`);
    mover.lastElementChild.textContent = SHORT[e.what] || e.what.slice(0, 3);
  });
  drawBars(entry, sim, done);
}

// Bytes of tiles that lie in shared memory at a time: come, and not yet done with.
function residentBytes(sim, entry) {
  let bytes = 0;
  const around = turnAt(sim, state.time);
  for (let i = Math.max(0, around - 1); i < Math.min(sim.turns, around + 2); ++i) {
    for (const e of sim.turn(i)) {
      if (isShared(e) && e.end <= state.time && (e.until === undefined ? i >= around : e.until > state.time)) bytes += e.bytes;
    }
  }
  return Math.min(bytes, entry.smem);
}

function drawBars(entry, sim, done) {
  const w = words(), { gpu } = entry, p = entry.problem, resident = residentBytes(sim, entry), begun = state.time >= sim.begun;
  const registers = !begun ? 0 : entry.blocks * entry.threads * (MODEL.isV3(entry.variant) ? entry.launchRegisters : entry.t.registers);
  const laidOut = MODEL.transposes(entry.variant, p) ? entry.hbm.workspace : 0;
  const distinct = Math.min(MODEL.tensors(p).q + MODEL.tensors(p).kv + laidOut, done.read + (sim.before ? Math.min(done.write, laidOut) : 0));
  const levels = {
    hbm: [entry.hbm.total, gpu.hbm_bytes, ""],
    l2: [Math.min(distinct, gpu.l2_bytes), gpu.l2_bytes, distinct > gpu.l2_bytes ? "" : "≤ "],
    smem: [resident, entry.smem, ""],
    registers: [registers * 4, gpu.registers_per_sm * 4, ""],
  };
  for (const [name, [held, capacity, sign]] of Object.entries(levels)) {
    const height = 120 * Math.min(1, held / capacity), bar = $(`#memory [data-bar="${name}"]`);
    bar.setAttribute("height", height.toFixed(1));
    bar.setAttribute("y", (148 - height).toFixed(1));
    $(`#memory [data-label="${name}"]`).textContent = sign + bytesText(held);
    $(`#memory [data-capacity="${name}"]`).textContent = `${w.of} ${bytesText(capacity)}`;
  }
}

function writeCounters(done, sim) {
  const w = words(), entry = entryOf(state.version);
  if (!entry || !sim) {
    $("#counters").innerHTML = "";
    return;
  }
  const standard = entryOf("standard");
  const rows = [
    ["read", w.read, done.read, `${bytesText(done.read)} ${w.of} ${bytesText(entry.issued.read)}`],
    ["written", w.written, done.write, `${bytesText(done.write)} ${w.of} ${bytesText(entry.issued.write)}`],
    ["hbm", w.fromHbm, entry.dram.read + entry.dram.write, bytesText(entry.dram.read + entry.dram.write)],
  ];
  if (standard) rows.push(["standard", w.standardMoves, standard.issued.read + standard.issued.write, bytesText(standard.issued.read + standard.issued.write)]);
  $("#counters").innerHTML = rows.map(([name, title, value, text]) => `<div><dt>${escaped(title)}</dt><dd data-counter="${name}" data-value="${value}">${text}</dd></div>`).join("");
}

// ---- (c) online softmax ----

let row = null;

function readRow() {
  const blocks = $("#scores").value.split("|").map((part) => part.trim().split(/[\s,]+/).filter(Boolean).map(Number)).filter((block) => block.length);
  const values = $("#values").value.trim().split(/[\s,]+/).filter(Boolean).map(Number), flat = blocks.flat();
  const good = flat.length > 0 && flat.length === values.length && flat.length <= 64 && [...flat, ...values].every(Number.isFinite);
  $("#softmax-error").textContent = good ? "" : words().bad;
  row = good ? { blocks, values } : null;
}

function drawSoftmax(share) {
  if (!row) return;
  const w = words(), version = state.version, steps = onlineSoftmax(row.blocks, row.values, version);
  const seen = Math.min(steps.length, Math.floor(share * (steps.length + 1) + 1e-9)), exact = exactSoftmax(row.blocks, row.values);
  const key = [seen, version, state.language, JSON.stringify(row)].join();
  if (drawSoftmax.last === key) return;
  drawSoftmax.last = key;
  const number = (x) => (x === 0 ? "0" : Math.abs(x) >= 1e-3 && Math.abs(x) < 1e5 ? x.toPrecision(6) : x.toExponential(3));
  const lines = steps.map((step, i) => `<tr class="${i >= seen ? "ahead" : i === seen - 1 ? "current" : ""}"><td>${step.scores.join(" ")}</td><td>${number(step.m)}</td><td>${step.alpha === null ? w.first : number(step.alpha)}</td><td>${number(step.l)}</td><td>${number(step.o)}</td></tr>`).join("");
  const current = steps[seen - 1], weights = softmaxBars(steps, seen, current);
  const result = resultOf(steps, version), done = seen === steps.length;
  const end = done ? `<p class="equal" data-result="${result}" data-exact="${exact.o}">${w.result} ${version === "v1" ? "o" : "o / l"} = ${number(result)} · ${w.exact} = ${number(exact.o)} · ${w.difference} ${number(Math.abs(result - exact.o))}</p>` : "";
  $("#softmax .drawing").innerHTML = `<div class="bars" role="img" aria-label="${escaped(w.p)}">${weights}</div><table><thead><tr><th>${w.seen}</th><th>m</th><th>${w.rescale}</th><th>l</th><th>o</th></tr></thead><tbody>${lines}</tbody></table>${end}`;
}

// The weights as they stand: those of earlier tiles shrink when the maximum grows.
function softmaxBars(steps, seen, current) {
  const height = new Map();
  for (const step of steps.slice(0, seen)) height.set(step.block, step.scores.map((s) => Math.exp(s - current.m) / current.l));
  return row.blocks.map((block, i) => block.map((s, j) => {
    const share = height.has(i) ? height.get(i)[j] : 0;
    return `<div title="${s}: ${share.toPrecision(4)}" style="height:${(share * 100).toFixed(2)}%"></div>`;
  }).join("")).join("");
}

// ---- (d) lanes ----

const LANE_HEIGHT = 24;

function lanesOf(sim) {
  const order = ["transposer", "producer", "copies", "block", "consumer 0", "consumer 1", "consumer 2", "combine", "store"];
  return order.filter((lane) => sim.lanes.has(lane));
}

function laneName(lane) {
  const w = words(), [kind, number] = lane.split(" ");
  if (lane === "store") return w.storeLane;
  return number === undefined ? w[kind] : `${w[kind]} ${number}`;
}

// The stretch of time on show: a few steps of the slowest version.
function windowOf(versions) {
  const step = Math.max(...versions.map((version) => simOf(version).duration / Math.max(simOf(version).steps[simOf(version).turns], 1)));
  const consumers = versions.includes("v3") && entryOf("v3") ? entryOf("v3").t.warps / 4 : 1;
  const span = Math.max(step * 9 * Math.min(consumers, 2), 1);
  const from = Math.max(0, Math.min(state.time - span / 3, duration() - span));
  return [Math.max(0, from), Math.max(0, from) + span];
}

function drawLanes() {
  const versions = shownVersions(), canvas = $("#lanes canvas");
  const rows = versions.flatMap((version) => [{ version, title: true }, ...lanesOf(simOf(version)).map((lane) => ({ version, lane }))]);
  const [context, width] = canvasContext(canvas, rows.length * LANE_HEIGHT + 20);
  if (!versions.length) return;
  const left = Math.min(118, width * 0.28), [from, to] = windowOf(versions), scale = (width - left) / (to - from);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  const seen = Object.fromEntries(versions.map((version) => [version, eventsBetween(simOf(version), from, to)]));
  rows.forEach(({ version, lane, title }, i) => {
    const y = i * LANE_HEIGHT;
    context.fillStyle = color(title ? "ink" : "faint");
    context.fillText(title ? version.toUpperCase() : laneName(lane), 2, y + LANE_HEIGHT / 2);
    if (title) return;
    context.fillStyle = color("skip");
    context.fillRect(left, y + 2, width - left, LANE_HEIGHT - 4);
    for (const e of layered(seen[version].filter((e) => e.lane === lane))) drawEvent(context, e, left + (e.start - from) * scale, (e.end - e.start) * scale, y, left, left + (e.ready - from) * scale);
  });
  context.strokeStyle = color("lit");
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(left + (state.time - from) * scale, 0);
  context.lineTo(left + (state.time - from) * scale, rows.length * LANE_HEIGHT);
  context.stroke();
  drawAxis(context, left, width, from, to, rows.length * LANE_HEIGHT + 10);
  writeLaneStates(versions, canvas);
}

// What lies below first: loads that came later, and last what runs behind other work.
function layered(events) {
  const loads = events.filter((e) => e.kind === "load"), rest = events.filter((e) => e.kind !== "load");
  return [...loads.reverse(), ...rest.filter((e) => !e.behind), ...rest.filter((e) => e.behind)];
}

function drawEvent(context, e, x, width, y, left, readyX) {
  if (e.waits && x > readyX && e.role !== "block" && e.kind !== "load") hatch(context, Math.max(left, readyX), x, y);
  const start = Math.max(x, left), end = x + Math.max(width, 1.5);
  if (end <= left) return;
  const thin = e.kind === "load" || e.kind === "store";
  context.fillStyle = color(HUE[e.what] || e.what);
  if (e.behind) return context.fillRect(start, y + LANE_HEIGHT - 9, end - start, 6);
  context.fillRect(start, y + (thin ? 6 : 3), end - start, LANE_HEIGHT - (thin ? 12 : 6));
  if (end - start > 26) {
    context.fillStyle = color("paper");
    context.fillText(e.what === "p" ? "P" : SHORT[e.what] || e.what, start + 4, y + LANE_HEIGHT / 2);
  }
  if (e.kind === "load") {  // its barrier completes: the tile may be read
    context.fillStyle = color("ink");
    context.fillRect(end - 1, y + 3, 1.5, LANE_HEIGHT - 6);
  }
}

function hatch(context, from, to, y) {
  if (to <= from) return;
  context.save();
  context.beginPath();
  context.rect(from, y + 5, to - from, LANE_HEIGHT - 10);
  context.clip();
  context.strokeStyle = color("wait");
  context.lineWidth = 1;
  context.beginPath();
  for (let x = from - LANE_HEIGHT; x < to; x += 5) {
    context.moveTo(x, y + LANE_HEIGHT);
    context.lineTo(x + LANE_HEIGHT, y);
  }
  context.stroke();
  context.restore();
}

function drawAxis(context, left, width, from, to, y) {
  const raw = (to - from) / 6, unit = 10 ** Math.floor(Math.log10(raw)), step = unit * [1, 2, 5, 10].find((n) => n * unit >= raw);
  context.fillStyle = color("faint");
  for (let at = Math.ceil(from / step) * step; at < to; at += step) context.fillText(countText(at), left + ((at - from) / (to - from)) * (width - left), y);
}

// What each lane is doing, in words.
function writeLaneStates(versions, canvas) {
  const w = words(), lines = [];
  for (const version of versions) {
    const sim = simOf(version), active = eventsBetween(sim, state.time, state.time + (entryOf(version) ? sim.duration / Math.max(sim.turns, 1) : 0));
    for (const lane of lanesOf(sim)) lines.push(`${version.toUpperCase()} ${laneName(lane)}: ${laneState(lane, sim, active.filter((e) => e.lane === lane))}`);
  }
  if (writeLaneStates.last === lines.join()) return;
  writeLaneStates.last = lines.join();
  $("#lane-now").innerHTML = lines.map((line) => `<li>${escaped(line)}</li>`).join("");
  canvas.setAttribute("aria-label", `${w.lanes}. ${lines.join("; ")}`);
}

function laneState(lane, sim, mine) {
  const w = words(), before = ["transposer", "store"].includes(lane), over = state.time >= (lane === "transposer" ? sim.begun : sim.duration);
  if (state.time < sim.begun && !before) return w.notBegun;
  const busy = mine.find((e) => e.start <= state.time && e.end > state.time && (e.kind === "product" || e.kind === "softmax" || e.bytes));
  if (busy) return `${w[busy.kind === "softmax" ? "softmaxWork" : busy.kind]} ${w[busy.what] || SHORT[busy.what] || busy.what}`;
  const next = mine.filter((e) => e.start > state.time).sort((a, b) => a.start - b.start)[0];
  if (!next && over) return w.done;
  return next && next.waits && next.ready <= state.time ? `${w.wait} ${w.waits[next.waits] || next.waits}` : w.idle;
}

function writeLanesLegend() {
  const w = words();
  $("#lanes-legend").innerHTML = swatch("q", "Q") + swatch("k", "K") + swatch("v", "V") + swatch("o", "O, LSE, m, l") + swatch("s", w.s) + swatch("p", w.p) + swatch("pv", w.pv) + swatch("wait", w.wait + " …");
}

// ---- (e) roofline, (f) curves ----

const log10 = Math.log10;

// A plot with logarithmic axes: where a point lies, and the frame.
function logPlot(width, height, [x0, x1], [y0, y1], xTitle, yTitle, unitX = String, unitY = String) {
  const left = 58, bottom = height - 34, top = 12, right = width - 12;
  const x = (v) => left + ((log10(v) - log10(x0)) / (log10(x1) - log10(x0))) * (right - left);
  const y = (v) => bottom - ((log10(v) - log10(y0)) / (log10(y1) - log10(y0))) * (bottom - top);
  const decades = (a, b) => Array.from({ length: Math.floor(log10(b) + 1e-9) - Math.ceil(log10(a) - 1e-9) + 1 }, (_, i) => 10 ** (Math.ceil(log10(a) - 1e-9) + i));
  const grid = decades(x0, x1).map((v) => `<line x1="${x(v)}" x2="${x(v)}" y1="${top}" y2="${bottom}" stroke="var(--line)"/><text class="small" x="${x(v)}" y="${bottom + 14}" text-anchor="middle">${unitX(v)}</text>`).join("")
    + decades(y0, y1).map((v) => `<line x1="${left}" x2="${right}" y1="${y(v)}" y2="${y(v)}" stroke="var(--line)"/><text class="small" x="${left - 5}" y="${y(v) + 4}" text-anchor="end">${unitY(v)}</text>`).join("");
  const titles = `<text class="small" x="${(left + right) / 2}" y="${height - 4}" text-anchor="middle">${escaped(xTitle)}</text><text class="small" x="12" y="${(top + bottom) / 2}" text-anchor="middle" transform="rotate(-90 12 ${(top + bottom) / 2})">${escaped(yTitle)}</text>`;
  return { x, y, left, right, top, bottom, frame: grid + titles };
}

const VERSION_COLOR = { standard: "wait", v1: "k", v2: "q", v3: "v" };

// Measurements are of the page's own problem and GPU.
const asPlanned = () => state.gpu.name === DATA.gpu && JSON.stringify(state.problem) === JSON.stringify(MODEL.problemOf(DATA.problem));

function rooflinePoints() {
  const w = words(), point = (entry, kind, label) => ({ kind, label, x: entry.useful / (entry.dram.read + entry.dram.write), y: entry.useful / entry.time.seconds, seconds: entry.time.seconds });
  const chosen = entryOf(state.version), points = [];
  if (!chosen) return points;
  for (const one of chosen.alternatives || []) points.push({ ...point({ ...one, useful: chosen.useful }, "alternative", `${one.t.m}×${one.t.n}`), algo: state.version, why: w.alternative });
  for (const one of chosen.rejected || []) {
    const judged = MODEL.evaluate({ ...one.c, t: { ...one.c.t, blocks: Math.max(one.c.blocks, 1) } });
    points.push({ ...point({ ...judged, useful: chosen.useful }, "rejected", one.name.replace("x", "×")), algo: state.version, why: one.why[state.language === "zh" ? 1 : 0] });
  }
  for (const algo of ALGOS) {
    const entry = entryOf(algo);
    if (entry) points.push({ ...point(entry, "plan", entry.t ? `${algo.toUpperCase()} ${entry.t.m}×${entry.t.n}` : algo), algo, why: "" });
  }
  for (const one of asPlanned() ? DATA.measured.filter((m) => m.same) : []) points.push({ kind: "measured", label: w.measured, algo: state.version, x: chosen.useful / (chosen.dram.read + chosen.dram.write), y: chosen.useful / one.seconds, seconds: one.seconds, why: one.name });
  points.sort((a, b) => a.seconds - b.seconds);
  return points.filter((one) => one.x > 0 && one.y > 0 && Number.isFinite(one.x) && Number.isFinite(one.y));
}

function drawRoofline() {
  const w = words(), points = rooflinePoints(), entry = entryOf(state.version);
  if (!entry || !points.length) {
    $("#roofline .drawing").innerHTML = "";
    return;
  }
  const r = entry.gpu.rates[entry.variant], peak = r.matmul_flops * r.sms * r.clock_hz;
  const xs = points.map((one) => one.x), ys = points.map((one) => one.y), ridge = peak / r.hbm_bytes_s;
  const span = [Math.min(...xs, ridge) / 3, Math.max(...xs, ridge) * 3];
  const rates = [Math.min(...ys) / 2, Math.max(peak, ...ys) * 1.6];
  const plot = logPlot(560, 330, span, rates, w.intensity, w.rate, (v) => v, (v) => `${v / 1e12} T`);
  const low = Math.max(span[0], rates[0] / r.hbm_bytes_s);
  const roof = `<path d="M${plot.x(low)} ${plot.y(Math.max(low * r.hbm_bytes_s, rates[0]))}L${plot.x(ridge)} ${plot.y(peak)}L${plot.right} ${plot.y(peak)}" fill="none" stroke="var(--ink)" stroke-width="1.5"/><text class="small" x="${plot.right}" y="${plot.y(peak) - 4}" text-anchor="end">${flopsText(peak)}/s</text>`;
  $("#roofline .drawing").innerHTML = `<svg viewBox="0 0 560 330" role="img" aria-label="${escaped(w.roofline)}">${plot.frame}${roof}${[...points].sort((a, b) => (b.kind === "plan") - (a.kind === "plan")).map((one) => mark(one, plot)).join("")}</svg>`;
  $("#roofline .notes").innerHTML = points.map((one) => `<li data-point="${one.kind}">${escaped(`${one.label}: ${secondsText(one.seconds)}${one.why ? ` · ${one.kind === "rejected" ? `${w.neighbour}: ` : ""}${one.why}` : ""}`)}</li>`).join("");
}

function mark(one, plot) {
  const x = plot.x(one.x), y = plot.y(one.y), stroke = `var(--${VERSION_COLOR[one.algo]})`, title = `<title>${escaped(`${one.label}: ${secondsText(one.seconds)} ${one.why}`)}</title>`;
  if (one.kind === "rejected") return `<path d="M${x - 4} ${y - 4}l8 8m0 -8l-8 8" stroke="var(--bad)" stroke-width="1.6">${title}</path>`;
  if (one.kind === "alternative") return `<circle cx="${x}" cy="${y}" r="4" fill="none" stroke="${stroke}">${title}</circle>`;
  if (one.kind === "measured") return `<rect x="${x - 4}" y="${y - 4}" width="8" height="8" transform="rotate(45 ${x} ${y})" fill="var(--lit)">${title}</rect>`;
  const end = x > 420;
  return `<circle cx="${x}" cy="${y}" r="6" fill="${stroke}">${title}</circle><text x="${x + (end ? -9 : 9)}" y="${y + 4}" text-anchor="${end ? "end" : "start"}">${escaped(one.label)}</text>`;
}

const LENGTHS = Array.from({ length: 9 }, (_, i) => 512 << i);

function curvePoints() {
  const reserve = { reserve: DATA.reserve, top: 1 };
  return LENGTHS.map((seq) => {
    const p = MODEL.changed({ ...state.problem, seq_kv: state.problem.seq }, { seq });
    return Object.fromEntries(ALGOS.map((algo) => {
      const entry = MODEL.plan(p, state.gpu, algo, reserve);
      return [algo, entry.time ? { bytes: entry.hbm.total, seconds: entry.time.seconds, fits: entry.fits } : null];
    }));
  });
}

function drawCurves() {
  const w = words();
  state.curves = state.curves || curvePoints();
  const limit = MODEL.budget(state.gpu, DATA.reserve);
  const charts = [["bytes", "GiB", (v) => v / 2 ** 30, limit / 2 ** 30], ["seconds", "s", (v) => v, null]].map(([field, unit, convert, line]) => {
    const all = state.curves.flatMap((at) => ALGOS.map((algo) => at[algo] && convert(at[algo][field]))).filter((v) => v > 0);
    const high = Math.max(...all, line || 0), low = Math.min(...all);
    const plot = logPlot(560, 230, [LENGTHS[0] * 0.9, LENGTHS[8] * 1.1], [10 ** Math.floor(log10(low)), 10 ** Math.ceil(log10(high))], w.seq, unit, (v) => v, (v) => v);
    const memory = line ? `<line x1="${plot.left}" x2="${plot.right}" y1="${plot.y(line)}" y2="${plot.y(line)}" stroke="var(--bad)" stroke-dasharray="6 4"/><text class="small" x="${plot.left + 6}" y="${plot.y(line) - 4}" style="fill:var(--bad)">${escaped(`${w.outOfMemory} ${line.toFixed(1)} GiB · ${state.gpu.name}`)}</text>` : "";
    const at = state.problem.seq >= LENGTHS[0] && state.problem.seq <= LENGTHS[8] ? `<line x1="${plot.x(state.problem.seq)}" x2="${plot.x(state.problem.seq)}" y1="${plot.top}" y2="${plot.bottom}" stroke="var(--faint)" stroke-dasharray="2 4"/>` : "";
    return `<svg viewBox="0 0 560 230" role="img" aria-label="${escaped(`${w.curves}: ${unit}`)}">${plot.frame}${at}${memory}${ALGOS.map((algo) => curve(algo, field, convert, plot)).join("")}</svg>`;
  });
  const legend = ALGOS.map((algo) => swatch(VERSION_COLOR[algo], algo)).join("");
  $("#curves .drawing").innerHTML = `${charts.join("")}<p class="legend">${legend}</p>`;
  $("#curves .table").innerHTML = curveTable();
}

function curve(algo, field, convert, plot) {
  const points = state.curves.map((at, i) => at[algo] && { x: plot.x(LENGTHS[i]), y: plot.y(convert(at[algo][field])), fits: at[algo].fits }).filter(Boolean);
  if (!points.length) return "";
  const hue = `var(--${VERSION_COLOR[algo]})`, dots = points.map(({ x, y, fits }) => `<circle cx="${x}" cy="${y}" r="3.5" fill="${fits ? hue : "var(--panel)"}" stroke="${hue}"/>`).join("");
  return `<path d="${points.map(({ x, y }, i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("")}" fill="none" stroke="${hue}" stroke-width="1.6"/>${dots}`;
}

function curveTable() {
  const w = words(), cell = (one) => (one ? `${bytesText(one.bytes)}, ${secondsText(one.seconds)}${one.fits ? "" : ` (${w.notFit})`}` : "–");
  const lines = state.curves.map((at, i) => `<tr><td>${LENGTHS[i]}</td>${ALGOS.map((algo) => `<td>${cell(at[algo])}</td>`).join("")}</tr>`).join("");
  return `<table><thead><tr><th>${w.seq}</th>${ALGOS.map((algo) => `<th>${algo}</th>`).join("")}</tr></thead><tbody>${lines}</tbody></table>`;
}

// ---- numbers ----

// Keys are paths of the `fasim plan --json` document.
function facts(entry) {
  const t = entry.t, list = [
    ["tile.block_q", t.m, t.m], ["tile.block_kv", t.n, t.n], ["tile.stages", t.stages, t.stages], ["tile.warps", t.warps, t.warps],
    ["launch.grid", entry.grid, countText(entry.grid)], ["launch.block", entry.threads, entry.threads],
    ["footprint.smem_bytes", entry.smem, bytesText(entry.smem)], ["footprint.registers_per_thread", t.registers, t.registers],
    ["occupancy.blocks_per_sm", entry.blocks, entry.blocks], ["occupancy.limiter", entry.limiter, entry.limiter],
    ["traffic.issued.read", entry.issued.read, bytesText(entry.issued.read)], ["traffic.issued.write", entry.issued.write, bytesText(entry.issued.write)],
    ["traffic.dram.read", entry.dram.read, bytesText(entry.dram.read)], ["traffic.dram.write", entry.dram.write, bytesText(entry.dram.write)],
    ["flops.useful", entry.useful, flopsText(entry.useful)], ["flops.executed", entry.executed, flopsText(entry.executed)],
    ["time.seconds", entry.time.seconds, secondsText(entry.time.seconds)], ["time.low", entry.time.low, secondsText(entry.time.low)],
    ["time.high", entry.time.high, secondsText(entry.time.high)], ["time.bound", entry.time.bound, entry.time.bound],
    ["footprint.hbm_bytes.total", entry.hbm.total, bytesText(entry.hbm.total)], ["footprint.max_seq", entry.max_seq, countText(entry.max_seq)],
  ];
  return list;
}

function writeFacts() {
  const entry = entryOf(state.version);
  $("#facts").innerHTML = entry ? facts(entry).map(([key, value, text]) => `<div><dt>${key}</dt><dd data-key="${key}" data-value="${value}">${text}</dd></div>`).join("") : "";
}

function writeHeadline() {
  const w = words(), p = state.problem, entry = entryOf(state.version);
  const shape = `${p.batch} × ${p.heads} × ${p.seq} × ${p.head_dim} ${p.dtype}${p.causal ? `, ${w.causal}` : ""}`;
  const tile = entry ? ` · ${state.version.toUpperCase()} ${entry.t.m}×${entry.t.n} · ${secondsText(entry.time.seconds)} (${w.launchOf})` : "";
  $("#headline").textContent = `${state.gpu.title} · ${shape}${tile}`;
  $("#illegal").textContent = state.illegal ? state.illegal[state.language === "zh" ? 1 : 0] : "";
  const problems = [];
  if (entry && !entry.fits) problems.push(`${w.notFit}: ${bytesText(entry.hbm.total)} > ${bytesText(MODEL.budget(state.gpu, DATA.reserve))}`);
  if (entry && simOf(state.version) === null) problems.push(w.noAnimation);
  $("#problem").textContent = problems.join(" ");
}

function writeNow(done, sim) {
  const w = words(), entry = entryOf(state.version);
  if (!sim || !entry) {
    $("#now").textContent = "";
    return;
  }
  const active = eventsBetween(sim, state.time, state.time).find((e) => e.what === "s" && e.end > state.time);
  const head = `${w.clock} ${countText(Math.min(state.time, sim.duration))} ${w.ofClocks} ${countText(sim.duration)}`;
  const text = `${head}${active ? ` · ${tileText(active, entry)}` : ""} · ${EVENTS.units(entry)} ${w.heads}`;
  $("#now").textContent = text;
  $("#time").setAttribute("aria-valuetext", text);
}

// ---- drawing ----

function captionOf(view) {
  const w = words(), kitchen = state.kitchen && w.kitchenCaptions, told = (kitchen || w.captions)[view];
  const serial = MODEL.transposes(state.version, state.problem), more = !kitchen && serial ? w.transposed[view] : "";
  const own = typeof told === "string" ? told : (serial && told.serial) || told[state.version];
  return [own, more].filter(Boolean).join(" ");
}

function drawStatic() {
  const w = words();
  document.documentElement.lang = state.language === "zh" ? "zh-CN" : "en";
  document.querySelectorAll("[data-t]").forEach((one) => { one.textContent = w[one.dataset.t]; });
  document.querySelectorAll("[data-label]").forEach((one) => { if (w[one.dataset.label]) one.setAttribute("aria-label", w[one.dataset.label]); });
  document.querySelectorAll("[data-language]").forEach((one) => one.setAttribute("aria-pressed", one.dataset.language === state.language));
  document.querySelectorAll("[data-version]").forEach((one) => {
    const entry = state.entries[one.dataset.version];
    one.setAttribute("aria-pressed", one.dataset.version === state.version);
    one.title = entry && entry.available === false ? entry.reason[state.language === "zh" ? 1 : 0] : "";
  });
  document.querySelectorAll("[data-c]").forEach((one) => {
    one.textContent = captionOf(one.dataset.c);
  });
  $("#kitchen-switch").hidden = state.language !== "zh";
  $("#kitchen-switch").style.display = state.language === "zh" ? "" : "none";
  $("#play").setAttribute("aria-label", state.playing ? w.pause : w.play);
  $("#play").textContent = state.playing ? "❚❚" : "▶";
  writeSpeeds();
  stillMemory();
  drawRoofline();
  writeFacts();
  writeHeadline();
  writeLanesLegend();
  readRow();
  drawSoftmax.last = writeLaneStates.last = null;
}

function draw() {
  const sim = simOf(state.version), end = duration();
  $("#time").max = end || 1;
  $("#time").value = state.time;
  const active = sim ? eventsBetween(sim, state.time, state.time) : [], done = sim ? doneAt(sim, state.time) : null;
  drawMatrix(active.filter((e) => e.end > state.time || state.time >= end));
  writeMatrixLegend();
  drawMemory(active, sim, done);
  writeCounters(done, sim);
  drawSoftmax(sim && sim.duration ? Math.min(1, state.time / sim.duration) : 1);
  drawLanes();
  writeNow(done, sim);
}

// ---- controls ----

function fill(select, options, value) {
  select.innerHTML = options.map(([key, text]) => `<option value="${escaped(key)}">${escaped(text)}</option>`).join("");
  select.value = value;
}

function writeSpeeds() {
  const w = words();
  fill($("#speed"), [["1", `1 ${w.perSecond}`], ["4", `4 ${w.perSecond}`], ["16", `16 ${w.perSecond}`], ["64", `64 ${w.perSecond}`], ["whole", w.whole]], state.speed);
}

function writeControls() {
  const entry = entryOf(state.version), asked = state.ask;
  fill($("#gpu"), Object.keys(DATA.gpus).sort().map((name) => [name, name]), state.gpu.name);
  $("#seq").value = state.problem.seq;
  $("#head_dim").value = state.problem.head_dim;
  $("#causal").checked = state.problem.causal;
  $("#auto").checked = !asked;
  const shape = asked && asked.shape ? asked.shape : asked ? [asked.m, asked.n] : entry ? [entry.t.m, entry.t.n] : ["", ""];
  if (document.activeElement !== $("#block_q")) $("#block_q").value = shape[0];
  if (document.activeElement !== $("#block_kv")) $("#block_kv").value = shape[1];
  fill($("#stages"), [["0", "auto"], ["1", "1"], ["2", "2"], ["3", "3"], ["4", "4"]], asked && asked.shape ? String(asked.stages) : "0");
}

function whole(input, low, high, otherwise) {
  const value = Number(input.value);
  return Number.isInteger(value) && value >= low && value <= high ? value : otherwise;
}

function problemChanged() {
  const p = state.problem;
  state.problem = MODEL.changed(p, {
    seq: whole($("#seq"), 1, 131072, p.seq), head_dim: whole($("#head_dim"), 1, 256, p.head_dim), causal: $("#causal").checked,
  });
  state.gpu = DATA.gpus[$("#gpu").value];
  if (state.ask && state.ask.m !== undefined) state.ask = null;
  recompute();
}

function tileChanged() {
  const entry = entryOf(state.version), old = entry ? [entry.t.m, entry.t.n] : [128, 64];
  state.ask = { shape: [whole($("#block_q"), 1, 4096, old[0]), whole($("#block_kv"), 1, 4096, old[1])], stages: Number($("#stages").value) };
  recompute();
}

function chooseVersion(version) {
  if (version === state.version) return;
  state.version = version;
  state.ask = null;
  recompute();
}

function seek(time) {
  state.time = Math.max(0, Math.min(duration(), time));
  draw();
}

function stepBy(direction) {
  const sims = shownVersions().map(simOf), moments = sims.map((sim) => momentFrom(sim, state.time, direction));
  if (moments.length) seek(direction > 0 ? Math.min(...moments) : Math.max(...moments));
}

let before = 0;

function play(on) {
  if (on === state.playing) return;
  state.playing = on;
  if (on && state.time >= duration()) state.time = 0;
  before = 0;
  $("#play").textContent = on ? "❚❚" : "▶";
  $("#play").setAttribute("aria-label", on ? words().pause : words().play);
  if (on) window.requestAnimationFrame(frame);
}

// Clocks a second: so many steps of the version on show, or all in 20 seconds.
function pace() {
  const sim = simOf(state.version);
  if (!sim) return 0;
  return state.speed === "whole" ? duration() / 20 : (Number(state.speed) * sim.duration) / Math.max(sim.steps[sim.turns], 1);
}

function frame(now) {
  if (!state.playing) return;
  const passed = before ? Math.min(now - before, 100) : 0;
  if (still.matches) return stillFrame(now);
  before = now;
  seek(state.time + (passed / 1000) * pace());
  if (state.time >= duration()) return play(false);
  window.requestAnimationFrame(frame);
}

// Without motion time jumps from event to event, twice a second.
function stillFrame(now) {
  if (!before || now - before >= 500) {
    before = now;
    stepBy(1);
  }
  if (state.time >= duration()) return play(false);
  window.requestAnimationFrame(frame);
}

const KEYS = {
  " ": () => play(!state.playing), ArrowRight: () => stepBy(1), ArrowLeft: () => stepBy(-1), Home: () => seek(0), End: () => seek(duration()),
  1: () => chooseVersion("v1"), 2: () => chooseVersion("v2"), 3: () => chooseVersion("v3"), "+": () => changeSpeed(1), "-": () => changeSpeed(-1),
};

function changeSpeed(direction) {
  const select = $("#speed");
  select.selectedIndex = Math.max(0, Math.min(select.options.length - 1, select.selectedIndex + direction));
  state.speed = select.value;
}

function onKey(event) {
  const { target } = event, typing = target.matches("input:not([type=range]):not([type=checkbox]), select") || (event.key === " " && target.matches("button, input, summary"));
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
}

function listen() {
  const on = (selector, type, act) => $(selector).addEventListener(type, act);
  for (const name of ["#gpu", "#seq", "#head_dim", "#causal"]) on(name, "change", problemChanged);
  for (const name of ["#block_q", "#block_kv", "#stages"]) on(name, "change", tileChanged);
  on("#auto", "change", () => { if ($("#auto").checked) { state.ask = null; recompute(); } else tileChanged(); });
  on("#time", "input", () => seek(Number($("#time").value)));
  on("#play", "click", () => play(!state.playing));
  on("#back", "click", () => stepBy(-1));
  on("#step", "click", () => stepBy(1));
  on("#speed", "change", () => { state.speed = $("#speed").value; });
  on("#side", "change", () => { state.side = $("#side").checked; seek(state.time); });
  on("#kitchen", "change", () => { state.kitchen = $("#kitchen").checked; drawStatic(); draw(); });
  for (const name of ["#scores", "#values"]) on(name, "input", () => { readRow(); draw(); });
  on("#controls", "submit", (event) => event.preventDefault());
  document.querySelectorAll("[data-version]").forEach((one) => one.addEventListener("click", () => chooseVersion(one.dataset.version)));
  document.querySelectorAll("[data-language]").forEach((one) => one.addEventListener("click", () => {
    state.language = one.dataset.language;
    drawStatic();
    draw();
    drawCurves();
  }));
  document.addEventListener("keydown", onKey);
  window.addEventListener("resize", draw);
  window.addEventListener("beforeprint", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { cells = null; drawStatic(); draw(); });
}

// The plan of the page as it was asked for: its own tile, unless that is what the planner takes anyway.
function begin() {
  const given = wholeTile(DATA.entry.tile), best = MODEL.plan(state.problem, state.gpu, state.version, { reserve: DATA.reserve });
  if (!best.t || !sameTile(best.t, given)) state.ask = given;
  listen();
  recompute();
}

begin();
