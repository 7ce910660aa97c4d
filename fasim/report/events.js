// The stream of events of fasim/model/events.py, with the clocks that the model gives each: products
// and weights on their pipes, loads on the way from the L2. One head, one block alone on an SM. A turn
// is what a block does with one tile of queries (V1: of keys; where V is laid out anew before, also with
// a slab of it); turns are made when they are looked at.
"use strict";

function makeEvents(model) {
  const { C, isV3, packs, seen, keepsQ, tilesStay, streams, oInQ, passesBy, v3Layout, transposers, transposes, transposedShape, valueColumns, rowsBefore, tileStart } = model;
  const TRANSPOSER = "transposer";  // of V3 in e4m3: the kernel before the main one
  const sum = (xs) => xs.reduce((a, b) => a + b, 0);
  const range = (start, stop, step) => Array.from({ length: Math.max(0, Math.ceil((stop - start) / step)) }, (_, i) => start + i * step);

  // Tiles of one head, their bytes and clocks.
  function headOf(entry) {
    const { problem: p, t, variant, gpu } = entry, r = gpu.rates[variant];
    const group = packs(variant) ? p.group : 1, rows = p.seq * group;
    const s = model.step(p, r, variant, { ...t, blocks: 1 });
    const columns = valueColumns(p, variant), before = transposes(variant, p);
    const longer = Math.max(s.tensor, s.smem), share = isV3(variant) ? C.WARPGROUP / t.warps : variant === "v1" ? t.step / t.n : 1;
    const product = (n) => (longer * n * share) / (p.d + columns);
    const clocks = { s: product(p.d), pv: product(columns), p: s.softmax * share };
    // The first tile of queries may begin before its first query, by which it is called.
    const startOf = (query) => tileStart(p, variant, t, query);
    const held = (query) => Math.min(startOf(query) + t.m, rows) - query;
    const seenBy = (query) => seen(p, query, held(query), group);
    const steps = (query) => {
      const [start, stop] = seenBy(query);
      return stop > start ? range(Math.floor(start / t.n) * t.n, stop, t.n) : [];
    };
    const transposed = (key, count) => {
      const [ofV, keys] = transposedShape(p);
      return ofV * Math.max(0, Math.min(count, keys - key));
    };
    const bytes = (what, query, key) => {
      const own = held(query), keys = Math.max(0, Math.min(t.n, p.seq_kv - key));
      if (what === "q") return own * p.head_dim * p.e;
      if (what === "k") return keys * p.head_dim * p.e;
      if (what === "v") return keys * p.head_dim_v * p.e;
      if (what === "vt") return transposed(key, t.n);
      if (what === "o") return own * p.head_dim_v * p.out;
      return what === "o_acc" || what === "o_part" ? own * p.head_dim_v * 4 : own * 4;
    };
    // What the main kernel takes for V, and whether that waits for the next scores.
    const values = before ? "vt" : "v", behind = isV3(variant) && !before, goesOn = behind && streams(p, t);
    const passes = variant === "v3" && passesBy(p, t), inQ = variant === "v3" && oInQ(p, t);
    return { entry, p, t, variant, r, rows, clocks, seenBy, steps, bytes, transposed, values, behind, goesOn, passesBy: passes, oInQ: inQ, startOf, held, queries: range(-rowsBefore(p, variant, t.m), rows, t.m).map((start) => Math.max(start, 0)), splits: entry.splits || 1, background: gpu.cp_async };
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
    if (p.varlen && !isV3(h.variant)) list.push(["cu_seqlens_q", 8 * threads], ["cu_seqlens_k", 8 * threads]);
    if (p.bias === "alibi") list.push(["slopes", 4 * threads]);
    if (p.dtype === "e4m3" && !isV3(h.variant)) for (const name of C.SCALE_INPUTS) list.push([name, 4 * threads]);
    return list;
  }

  // Where clocks go. `from` and `to` are when the paths from and to the L2 are free, `tensor` and `mufu` the
  // pipes, `lanes` each role. An event starts when all it waits for has come; `waits` names the last.
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
      const path = kind === "load" ? "from" : "to", passes = Math.max(event.start, state[path]) + busy;
      if (bytes) state[path] = passes;
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

  const consumersOf = (h) => range(0, h.t.warps / C.WARPGROUP, 1).map((i) => `consumer ${i}`);

  // In e4m3 a kernel before lays out V anew, a slab of keys after the other; the main one starts when it
  // is over.
  function transposeTurn(h, make, key, last) {
    const { p } = h, { lanes } = make.state, keys = Math.max(0, Math.min(C.SLAB_BYTES, p.seq_kv - key));
    if (p.varlen) make.move(TRANSPOSER, TRANSPOSER, "load", "cu_seqlens_k", -1, -1, 8 * transposers(p));
    lanes[TRANSPOSER] = make.move(TRANSPOSER, TRANSPOSER, "load", "v", -1, key, keys * p.head_dim_v * p.e).end;
    const { end } = make.move("store", TRANSPOSER, "store", "vt", -1, key, h.transposed(key, C.SLAB_BYTES));
    if (last) for (const role of ["producer", ...consumersOf(h)]) lanes[role] = end;
  }

  function v3Keys(h, query) {
    const keys = h.steps(query).reverse();
    return keys.length ? keys : [(Math.floor(h.p.seq_kv / h.t.n) + 1) * h.t.n];
  }

  // A load of the producer, which waits for its slot, after the scale factor of a block of keys.
  function producerLoad(h, make, what, query, key, gate) {
    const after = { [`empty_${what}`]: gate };
    if (h.p.scales === "block" && key >= 0 && key < h.p.seq_kv) read(make, `${what[0]}_scale`, -1, key, after);
    const e = make.move("producer", "producer", "load", what, query, key, h.bytes(what, Math.max(query, 0), Math.max(key, 0)), after);
    make.state.lanes.producer = e.start;
    return e;
  }

  const read = (make, name, query, key, after = {}, bytes = 4) => make.move("producer", "producer", "load", name, query, key, bytes, after);

  // What the producer reads with a tile of queries.
  function producerConstants(h, make, query) {
    const { p } = h;
    if (p.varlen) for (const name of ["cu_seqlens_q", "cu_seqlens_k"]) read(make, name, -1, -1, {}, 8);
    if (p.scales === "block") read(make, "q_scale", query, -1, {}, 4 * Math.floor(h.t.m / C.WARPGROUP_ROWS));
    else if (p.dtype === "e4m3") for (const name of C.SCALE_INPUTS) read(make, name, -1, -1);
  }

  function v3Turn(h, make, turn) {
    const { state } = make, query = h.queries[h.queries.length - 1 - turn];
    const queries = v3Layout(h.p, h.t)[0], keys = v3Keys(h, query);
    producerConstants(h, make, query);
    const q = producerLoad(h, make, "q", query, -1, state.tiles[turn - queries] || 0);
    keys.forEach((key, i) => v3Step(h, make, { query, key, q, first: i === 0, last: i === keys.length - 1 }));
    if (h.oInQ) q.until = Math.max(...consumersOf(h).map((role) => state.lanes[role]));
    state.tiles[turn] = q.until;
    state.owed = h.oInQ && { turn, q };
    delete state.tiles[turn - 4];
    if (!h.goesOn || turn === h.queries.length - 1) lastValues(h, make);
  }

  // Those of a tile of queries, where no scores of the next come before them.
  function lastValues(h, make) {
    const { state } = make, { before } = state;
    if (before) valuesAfter(h, make, before, null);
    state.before = null;
  }

  function valuesAfter(h, make, before, now) {
    if (before) before.v = producerLoad(h, make, h.values, -1, before.key, make.state.freeV[before.n - h.t.stages] || 0);
    consumerSteps(h, make, before, now);
  }

  // The producer brings K of one step and V of the step before, or in e4m3 of the same; the consumers
  // multiply and weigh them.
  function v3Step(h, make, now) {
    const { state } = make, { before, n } = state, { stages } = h.t, moreKeys = v3Layout(h.p, h.t)[2];
    now.k = producerLoad(h, make, "k", -1, now.key, state.freeK[n - stages - moreKeys] || 0);
    now.n = n;
    if (!h.behind) return serialStep(h, make, now);
    valuesAfter(h, make, before, now);
    state.before = now;
    stepOn(state);
  }

  function serialStep(h, make, now) {
    const { state } = make;
    now.v = producerLoad(h, make, h.values, -1, now.key, state.freeV[now.n - h.t.stages] || 0);
    consumerSteps(h, make, null, now);
    consumerSteps(h, make, now, null);
    stepOn(state);
  }

  function stepOn(state) {
    for (const free of [state.freeK, state.freeV]) delete free[state.n - 8];
    state.n += 1;
  }

  // Consumers take turns to start the products of a step; a slot is free when all are done with it.
  function consumerSteps(h, make, before, now) {
    const { state } = make, last = (from, events) => Math.max(from.end, ...events.filter(Boolean).map((e) => e.end));
    if (now && now.first) for (const [name, bytes] of constants(h)) make.move("consumer 0", "consumers", "load", name, -1, -1, bytes);
    const done = consumersOf(h).map((role, i) => consumerStep(h, make, role, i, before, now));
    if (before) before.v.until = state.freeV[before.n] = last(before.v, done.map(({ pv }) => pv));
    if (now) now.weights = done.map(({ p }) => p);
    if (now && now.first && state.owed) giveBack(state, last(state.owed.q, done.map(({ s }) => s)));
    const leaves = () => (tilesStay(h.p, h.t) ? now.weights : done.map(({ s }) => s));
    if (now && h.behind) freeKeys(h, state, now, last(now.k, leaves()));
    if (!h.behind && before) freeKeys(h, state, before, before.v.until);
  }

  // The place of the queries before, from which O has left under the first scores of the next.
  function giveBack({ tiles, owed }, end) {
    tiles[owed.turn] = owed.q.until = end;
  }

  function freeKeys(h, state, step, end) {
    step.k.until = state.freeK[step.n] = end;
    if (h.oInQ) return;
    if (keepsQ(h.p, h.t) ? step.first : step.last) step.q.until = end;
  }

  // The one place that says in which order a consumer works, as _v3_step in fasim/model/events.py does.
  function consumerStep(h, make, role, i, before, now) {
    const { lanes } = make.state, ends = before && before.last;
    const until = (e) => { lanes[role] = Math.max(lanes[role] || 0, e.end); };
    const product = (what, at, after) => make.event(role, role, "product", what, at.query, at.key, 0, h.clocks[what], after, "tensor");
    const values = () => product("pv", before, { v: before.v.end, p: before.weights[i].end });
    const store = (what) => { if (ends) storeRows(h, make, role, i, what, before.query); };
    const works = (at) => at && (!h.passesBy || (h.behind && at.last) || meets(h, h.startOf(at.query) + C.WARPGROUP_ROWS * i, at.key));
    const first = !h.behind && works(before) && values();
    if (first) until(first);
    if (before && !h.behind) ["lse", "o"].forEach(store);
    const s = works(now) && product("s", now, { q: now.q.end, k: now.k.end });
    if (s) until(s);
    if (s && h.p.dense) until(make.move(role, role, "load", "bias", now.query, now.key, own(h, biasBytes(h, now.query, now.key), now.query, i)));
    const pv = h.behind ? works(before) && values() : first;
    if (before && h.behind) store("lse");
    const p = s && make.event(role, role, "softmax", "p", now.query, now.key, 0, h.clocks.p, { s: s.end }, "mufu");
    if (pv) pv.behind = Boolean(now && h.behind);  // of the weights of the next scores
    [p, pv].filter(Boolean).forEach(until);
    if (before && h.behind) store("o");  // by TMA: the consumer goes on
    return { s, p, pv };
  }

  // Whether a row of a warpgroup, from the first on, sees one of a tile of keys.
  function meets(h, first, key) {
    const [start, stop] = first >= 0 && first < h.rows ? seen(h.p, first, C.WARPGROUP_ROWS, 1) : [0, 0];
    return stop > start && key < stop && start < key + h.t.n;
  }

  // A consumer's share of bytes that belong to all rows of a tile.
  function own(h, bytes, query, i) {
    const first = h.startOf(query) + C.WARPGROUP_ROWS * i, last = Math.min(first + C.WARPGROUP_ROWS, h.rows);
    return (bytes * Math.max(last - Math.max(first, 0), 0)) / h.held(query);
  }

  function storeRows(h, make, role, i, what, query) {
    make.move("store", role, "store", what, query, -1, own(h, h.bytes(what, query, 0), query, i));
  }

  // ---- the whole head ----

  function turnsOf(h) {
    const { p, t, variant } = h;
    if (!h.queries.length && variant !== "v3") return [];
    if (variant === "v1") return range(0, Math.max(p.seq_kv, 1), t.n).map((key, i) => (make) => v1Turn(h, make, key, i === 0));
    if (variant === "v2") {
      const order = p.mask === "causal" ? [...h.queries].reverse() : h.queries;
      return order.map((query) => (make) => v2Turn(h, make, query));
    }
    if (isV3(variant)) return [...transposeTurns(h), ...h.queries.map((_, i) => (make) => v3Turn(h, make, i))];
    return range(0, h.queries.length * (h.splits + 1), 1).map((i) => (make) => splitTurn(h, make, i));
  }

  function transposeTurns(h) {
    const slabs = transposes(h.variant, h.p) && (h.p.seq || h.p.varlen) ? range(0, transposedShape(h.p)[1], C.SLAB_BYTES) : [];
    return slabs.map((key, i) => (make) => transposeTurn(h, make, key, i === slabs.length - 1));
  }

  const fresh = () => ({ lanes: {}, from: 0, to: 0, n: 0, tiles: {}, freeK: {}, freeV: {}, before: null });

  // A turn changes no event of an earlier one but `until`; copies of the tables are enough.
  function copied(s) {
    const tables = { lanes: { ...s.lanes }, tiles: { ...s.tiles }, freeK: { ...s.freeK }, freeV: { ...s.freeV } };
    return { ...s, ...tables, before: s.before && { ...s.before } };
  }

  // One pass over all turns keeps, of each, when it starts and ends, its bytes, of all heads, and where
  // it began; the events of a turn are made again when they are asked for. `before` counts the turns of
  // the kernel before the main one, which begins at `begun`.
  function simulate(entry) {
    const h = headOf(entry), turns = turnsOf(h), before = transposeTurns(h).length;
    const sim = { h, before, turns: turns.length, start: [], end: [], read: [0], write: [0], steps: [0], lanes: new Set() };
    const states = [];
    let state = fresh();
    turns.forEach((run, i) => {
      states.push(copied(state));
      const make = new Scheduler(h, state);
      run(make);
      record(sim, make.events);
      state = make.state;
      if (!isV3(h.variant)) for (const role of Object.keys(state.lanes)) state.lanes[role] = sim.end[i];
    });
    sim.begun = before ? sim.end[before - 1] : 0;
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
      if (e.kind === "load") read += ofAll(sim, e);
      if (e.kind === "store") write += ofAll(sim, e);
      steps += e.what === "s" ? 1 : 0;
      sim.lanes.add(e.lane);
    }
    sim.start.push(start);
    sim.end.push(Math.max(end, sim.end.length ? sim.end[sim.end.length - 1] : 0));
    sim.read.push(sim.read[sim.read.length - 1] + read);
    sim.write.push(sim.write[sim.write.length - 1] + write);
    sim.steps.push(sim.steps[sim.steps.length - 1] + steps);
  }

  // How many times a role's part of the stream runs.
  const units = ({ problem: p, variant }, role = "") => p.batch * (packs(variant) || role === TRANSPOSER ? p.kv_heads : p.heads);

  // Bytes of an event, in all heads.
  const ofAll = ({ h }, e) => e.bytes * units(h.entry, e.role);

  return { simulate, units, ofAll };
}

if (typeof module !== "undefined") module.exports = { makeEvents };
