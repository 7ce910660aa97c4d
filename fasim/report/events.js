// The stream of events of fasim/model/events.py, with the clocks that the model gives each: products
// and weights on their pipes, loads on the way from the L2. One head, one block alone on an SM. A turn
// is what a block does with one tile of queries (V1: of keys); turns are made when they are looked at.
"use strict";

function makeEvents(model) {
  const { C, seen, v3Layout } = model;
  const sum = (xs) => xs.reduce((a, b) => a + b, 0);
  const range = (start, stop, step) => Array.from({ length: Math.max(0, Math.ceil((stop - start) / step)) }, (_, i) => start + i * step);

  // Tiles of one head, their bytes and clocks.
  function headOf(entry) {
    const { problem: p, t, variant, gpu } = entry, r = gpu.rates[variant];
    const group = variant === "v2_split" ? p.group : 1, rows = p.seq * group;
    const s = model.step(p, r, variant, { ...t, blocks: 1 });
    const longer = Math.max(s.tensor, s.smem), ofScores = p.d / (p.d + p.dv);
    const share = variant === "v3" ? C.WARPGROUP / t.warps : variant === "v1" ? t.step / t.n : 1;
    const clocks = { s: longer * ofScores * share, pv: longer * (1 - ofScores) * share, p: s.softmax * share };
    const seenBy = (query) => seen(p, query, t.m, group);
    const steps = (query) => {
      const [start, stop] = seenBy(query);
      return stop > start ? range(Math.floor(start / t.n) * t.n, stop, t.n) : [];
    };
    const bytes = (what, query, key) => {
      const own = Math.min(t.m, rows - query), keys = Math.max(0, Math.min(t.n, p.seq_kv - key));
      if (what === "q") return own * p.head_dim * p.e;
      if (what === "k") return keys * p.head_dim * p.e;
      if (what === "v") return keys * p.head_dim_v * p.e;
      if (what === "o") return own * p.head_dim_v * p.out;
      return what === "o_acc" || what === "o_part" ? own * p.head_dim_v * 4 : own * 4;
    };
    return { p, t, variant, r, rows, clocks, seenBy, steps, bytes, queries: range(0, rows, t.m), splits: entry.splits || 1, background: gpu.cp_async };
  }

  // Bytes of a dense bias that a step reads: rows that skip a tile of keys together read none of it.
  function biasBytes(h, query, key) {
    const { p, t } = h, apart = h.variant === "v2" && p.dtype !== "fp32";
    const rows = apart ? t.m / t.warps : t.m, keys = Math.max(0, Math.min(t.step, p.seq_kv - key));
    return sum(range(query, Math.min(query + t.m, p.seq), rows).map((first) => {
      const [start, stop] = seen(p, first, rows);
      return stop > start && key < stop && start < key + t.step ? Math.min(rows, p.seq - first) * keys * p.biasBytes : 0;
    }));
  }

  function constants(h) {
    const { p, t } = h, threads = t.warps * C.WARP, list = [];
    if (p.varlen && h.variant !== "v3") list.push(["cu_seqlens_q", 8 * threads], ["cu_seqlens_k", 8 * threads]);
    if (p.bias === "alibi") list.push(["slopes", 4 * threads]);
    if (p.dtype === "e4m3") for (const name of C.SCALE_INPUTS) list.push([name, 4 * threads]);
    return list;
  }

  // Where clocks go. `memory` is when the path from the L2 is free, `tensor` and `mufu` the pipes,
  // `lanes` when each role is. An event starts when all it waits for has come; `waits` names the last.
  class Scheduler {
    constructor(h, state) {
      this.h = h;
      this.state = state;
      this.events = [];
    }

    event(lane, role, kind, what, query, key, bytes, clocks, after, pipe = null) {
      const { state } = this, ready = state.lanes[role] || 0;
      let start = ready, waits = "";
      const later = (time, name) => {
        if (time > start) [start, waits] = [time, name];
      };
      for (const [name, time] of Object.entries(after)) later(time, name);
      if (pipe) later(state[pipe] || 0, pipe);
      const event = { lane, role, kind, what, query, key, bytes, ready, start, end: start + clocks, waits };
      if (pipe) state[pipe] = event.end;
      this.events.push(event);
      return event;
    }

    // A copy: its bytes pass one after the other, its latency overlaps with what others do.
    move(lane, role, kind, what, query, key, bytes, after = {}) {
      const { state, h } = this, busy = bytes / h.r.l2_bytes;
      const event = this.event(lane, role, kind, what, query, key, bytes, 0, after);
      const passes = Math.max(event.start, state.memory || 0) + busy;
      if (bytes) state.memory = passes;
      event.end = bytes ? passes + h.r.l2_latency : event.start;
      return event;
    }
  }

  // ---- V1 and V2: the threads of a block do everything together ----

  function blockRole(make, lane = "block") {
    const role = lane;
    return {
      load: (what, query, key, bytes, wait = true) => {
        const e = make.move(lane, role, "load", what, query, key, bytes);
        if (wait) make.state.lanes[role] = e.end;
        return e;
      },
      store: (what, query, bytes) => {
        const e = make.move("store", role, "store", what, query, -1, bytes);
        make.state.lanes[role] = e.end;
        return e;
      },
      work: (kind, what, query, key, clocks, after = {}) => {
        const e = make.event(lane, role, kind, what, query, key, 0, clocks, after);
        make.state.lanes[role] = e.end;
        return e;
      },
    };
  }

  function scores(h, make, role, query, key, after) {
    const s = role.work("product", "s", query, key, h.clocks.s, after);
    if (h.p.dense) role.load("bias", query, key, biasBytes(h, query, key));
    role.work("softmax", "p", query, key, h.clocks.p);
    return s;
  }

  function v1Turn(h, make, key, first) {
    const role = blockRole(make), { p, t } = h;
    if (first) for (const [name, bytes] of constants(h)) role.load(name, -1, -1, bytes);
    const kv = ["k", "v"].map((what) => role.load(what, -1, key, h.bytes(what, 0, key)));
    for (const query of h.queries) {
      const [start, stop] = h.seenBy(query), n = t.n;
      const from = stop > start ? Math.floor(start / n) * n : 0, to = stop > start ? Math.floor((stop - 1) / n) * n : 0;
      if (key < from || key > to) continue;
      const q = role.load("q", query, -1, h.bytes("q", query, 0));
      const end = stop > start ? Math.min(key + n, stop) : key;
      for (const step of range(Math.max(key, Math.floor(start / t.step) * t.step), end, t.step)) {
        scores(h, make, role, query, step);
        role.work("product", "pv", query, step, h.clocks.pv);
      }
      if (key > from) for (const name of ["m", "l", "o_acc"]) role.load(name, query, -1, h.bytes(name, query, 0));
      q.until = make.state.lanes.block;
      for (const name of key < to ? ["m", "l", "o_acc"] : ["lse", "o"]) role.store(name, query, h.bytes(name, query, 0));
    }
    for (const load of kv) load.until = make.state.lanes.block;
  }

  // In the background where the GPU can, else through the registers of the threads, which wait.
  function copy(h, make, what, query, key) {
    const e = make.move(h.background ? "copies" : "block", "block", "load", what, query, key, h.bytes(what, Math.max(query, 0), Math.max(key, 0)));
    if (!h.background) make.state.lanes.block = e.end;
    return e;
  }

  // K, V, K, V … through a ring, ahead of the products that read them.
  function ring(h, make, role, query, keys, q) {
    const loads = keys.flatMap((key) => [["k", key], ["v", key]]), ahead = 2 * h.t.stages - 1;
    const arrived = [];
    const fill = (count) => {
      for (; count > 0 && arrived.length < loads.length; --count) {
        const [what, key] = loads[arrived.length];
        arrived.push(copy(h, make, what, -1, key));
      }
    };
    fill(ahead);
    keys.forEach((key, j) => {
      fill(1);
      const s = scores(h, make, role, query, key, { q: q.end, k: arrived[2 * j].end });
      arrived[2 * j].until = s.end;
      fill(1);
      const pv = role.work("product", "pv", query, key, h.clocks.pv, { v: arrived[2 * j + 1].end });
      arrived[2 * j + 1].until = pv.end;
    });
  }

  function v2Turn(h, make, query) {
    const role = blockRole(make);
    for (const [name, bytes] of constants(h)) role.load(name, -1, -1, bytes);
    const q = copy(h, make, "q", query, -1);
    ring(h, make, role, query, h.steps(query).reverse(), q);
    make.state.lanes.block = Math.max(make.state.lanes.block, q.end);
    q.until = make.state.lanes.block;
    role.store("lse", query, h.bytes("lse", query, 0));
    role.store("o", query, h.bytes("o", query, 0));
  }

  function splitTurn(h, make, turn) {
    const perSplit = h.queries.length, split = Math.floor(turn / perSplit);
    const role = blockRole(make);
    if (split === h.splits) return combineTurn(h, make, h.queries[turn % perSplit]);
    const query = h.queries[turn % perSplit], keys = h.steps(query);
    const share = keys.slice(Math.floor((keys.length * split) / h.splits), Math.floor((keys.length * (split + 1)) / h.splits));
    const q = copy(h, make, "q", query, -1);
    ring(h, make, role, query, share, q);
    make.state.lanes.block = Math.max(make.state.lanes.block, q.end);
    q.until = make.state.lanes.block;
    for (const name of ["o_part", "m_part", "l_part"]) role.store(name, query, h.bytes(name, query, 0));
  }

  function combineTurn(h, make, query) {
    make.state.lanes.combine = Math.max(make.state.lanes.combine || 0, make.state.lanes.block || 0);
    const role = blockRole(make, "combine");
    for (const name of ["m_part", "m_part", "l_part", "o_part"]) role.load(name, query, -1, h.bytes(name, query, 0) * h.splits);
    for (const name of ["o", "lse"]) role.store(name, query, h.bytes(name, query, 0));
  }

  // ---- V3: a producer and consumers, each at its own pace ----

  function v3Steps(h, query) {
    const keys = h.steps(query).reverse();
    return keys.length ? keys : [(Math.floor(h.p.seq_kv / h.t.n) + 1) * h.t.n];
  }

  // The producer's loads up to what step n needs, in its own order: each waits for its slot.
  function producerLoad(h, make, what, query, key, gate, done) {
    const e = make.move("producer", "producer", "load", what, query, key, h.bytes(what, Math.max(query, 0), Math.max(key, 0)), { [`empty_${what}`]: gate });
    make.state.lanes.producer = e.start;
    done.push(e);
    if (done.length > 8) done[done.length - 9] = null;  // long since used
    return e;
  }

  function v3Turn(h, make, turn) {
    const { state } = make, { t } = h, query = h.queries[h.queries.length - 1 - turn];
    const queries = v3Layout(h.p, t)[0], keys = v3Steps(h, query);
    if (h.p.varlen) for (const name of ["cu_seqlens_q", "cu_seqlens_k"]) make.move("producer", "producer", "load", name, -1, -1, 8);
    const q = producerLoad(h, make, "q", query, -1, state.tiles[turn - queries] || 0, state.q);
    keys.forEach((key, i) => v3Step(h, make, query, key, i === 0, i === keys.length - 1, q));
    state.tiles[turn] = q.until;
    delete state.tiles[turn - 4];
    if (turn === h.queries.length - 1) {
      loadValues(h, make);
      drain(h, make);
    }
  }

  function loadValues(h, make) {
    const { state } = make, { before } = state, n = state.n - 1;
    before.v = producerLoad(h, make, "v", -1, before.key, state.freeV[(n - h.t.stages)] || 0, state.v);
  }

  function v3Step(h, make, query, key, first, last, q) {
    const { state } = make, { t } = h, n = state.n;
    const k = producerLoad(h, make, "k", -1, key, state.freeK[n - t.stages] || 0, state.k);
    if (state.before) loadValues(h, make);
    if (first) for (const [name, bytes] of constants(h)) make.move("consumer 0", "consumers", "load", name, -1, -1, bytes);
    const each = (act) => range(0, t.warps / C.WARPGROUP, 1).map((i) => act(i, `consumer ${i}`));
    const s = each((i, role) => make.event(role, role, "product", "s", query, key, 0, h.clocks.s, { q: q.end, k: k.end }, "tensor"));
    each((i, role) => { state.lanes[role] = s[i].end; });
    if (h.p.dense) each((i, role) => {
      state.lanes[role] = make.move(role, role, "load", "bias", query, key, own(h, biasBytes(h, query, key), query, i)).end;
    });
    const before = state.before;
    const pv = before && values(h, make, before, s);
    if (before && before.last) storeLse(h, make, before);
    const p = each((i, role) => make.event(role, role, "softmax", "p", query, key, 0, h.clocks.p, { s: s[i].end }, "mufu"));
    each((i, role) => { state.lanes[role] = Math.max(p[i].end, pv ? pv[i].end : 0); });
    k.until = state.freeK[n] = Math.max(...p.map((e) => e.end));
    if (last) q.until = k.until;
    if (before && before.last) storeOutput(h, make, before);
    state.before = { query, key, last, weights: p };
    state.n = n + 1;
    for (const free of [state.freeK, state.freeV]) delete free[n - 8];
  }

  function values(h, make, before, after = []) {
    const { state } = make, pv = before.weights.map((p, i) => {
      const role = `consumer ${i}`;
      return make.event(role, role, "product", "pv", before.query, before.key, 0, h.clocks.pv, { v: before.v.end, p: p.end }, "tensor");
    });
    before.v.until = state.freeV[state.n - 1] = Math.max(...pv.map((e) => e.end));
    return pv;
  }

  // A consumer's share of bytes that belong to all rows of a tile.
  function own(h, bytes, query, i) {
    const rows = Math.min(h.t.m, h.rows - query);
    return (bytes * Math.min(Math.max(rows - C.WARPGROUP_ROWS * i, 0), C.WARPGROUP_ROWS)) / rows;
  }

  function storeLse(h, make, { query, weights }) {
    weights.forEach((_, i) => make.move("store", `consumer ${i}`, "store", "lse", query, -1, own(h, h.bytes("lse", query, 0), query, i)));
  }

  // O leaves by TMA: the consumer goes on.
  function storeOutput(h, make, { query, weights }) {
    weights.forEach((_, i) => make.move("store", `consumer ${i}`, "store", "o", query, -1, own(h, h.bytes("o", query, 0), query, i)));
  }

  function drain(h, make) {
    const { before } = make.state;
    values(h, make, before).forEach((e, i) => { make.state.lanes[`consumer ${i}`] = e.end; });
    storeLse(h, make, before);
    storeOutput(h, make, before);
  }

  // ---- the whole head ----

  function turnsOf(h) {
    const { p, t, variant } = h;
    if (!h.queries.length) return [];
    if (variant === "v1") return range(0, Math.max(p.seq_kv, 1), t.n).map((key, i) => (make) => v1Turn(h, make, key, i === 0));
    if (variant === "v2") {
      const order = p.mask === "causal" ? [...h.queries].reverse() : h.queries;
      return order.map((query) => (make) => v2Turn(h, make, query));
    }
    if (variant === "v3") return h.queries.map((_, i) => (make) => v3Turn(h, make, i));
    return range(0, h.queries.length * (h.splits + 1), 1).map((i) => (make) => splitTurn(h, make, i));
  }

  const fresh = () => ({ lanes: {}, memory: 0, n: 0, tiles: {}, freeK: {}, freeV: {}, q: [], k: [], v: [], before: null });

  // A turn changes no event of an earlier one but `until`; copies of the tables are enough.
  function copied(s) {
    const tables = { lanes: { ...s.lanes }, tiles: { ...s.tiles }, freeK: { ...s.freeK }, freeV: { ...s.freeV } };
    return { ...s, ...tables, q: [], k: [], v: [], before: s.before && { ...s.before } };
  }

  // One pass over all turns keeps, of each, when it starts and ends, its bytes and where it began; the
  // events of a turn are made again when they are asked for.
  function simulate(entry) {
    const h = headOf(entry), turns = turnsOf(h), sim = { h, turns: turns.length, start: [], end: [], read: [0], write: [0], steps: [0], lanes: new Set() };
    const states = [];
    let state = fresh();
    turns.forEach((run, i) => {
      states.push(copied(state));
      const make = new Scheduler(h, state);
      run(make);
      record(sim, make.events);
      state = make.state;
      if (h.variant !== "v3") for (const role of Object.keys(state.lanes)) state.lanes[role] = sim.end[i];
    });
    sim.duration = sim.end.length ? Math.max(...sim.end.slice(-2)) : 0;
    const kept = new Map();
    sim.turn = (i) => {
      if (!kept.has(i)) {
        if (kept.size > 12) kept.delete(kept.keys().next().value);
        const make = new Scheduler(h, copied(states[i]));
        turns[i](make);
        kept.set(i, make.events);
      }
      return kept.get(i);
    };
    return sim;
  }

  function record(sim, events) {
    let start = Infinity, end = 0, read = 0, write = 0, steps = 0;
    for (const e of events) {
      start = Math.min(start, e.start);
      end = Math.max(end, e.end);
      if (e.kind === "load") read += e.bytes;
      if (e.kind === "store") write += e.bytes;
      steps += e.what === "s" ? 1 : 0;
      sim.lanes.add(e.lane);
    }
    sim.start.push(start);
    sim.end.push(Math.max(end, sim.end.length ? sim.end[sim.end.length - 1] : 0));
    sim.read.push(sim.read[sim.read.length - 1] + read);
    sim.write.push(sim.write[sim.write.length - 1] + write);
    sim.steps.push(sim.steps[sim.steps.length - 1] + steps);
  }

  // How many times the stream runs.
  const units = ({ problem: p, variant }) => p.batch * (variant === "v2_split" ? p.kv_heads : p.heads);

  return { simulate, units };
}

if (typeof module !== "undefined") module.exports = { makeEvents };
