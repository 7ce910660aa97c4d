// The model of fasim/model, planner and legality, forward: the same equations, a tile at a time. Every
// constant comes from Python (C), every rate of a GPU too; tests run this file over golden plans and
// compare each number. Exact while a count stays below 2^53.
"use strict";

function makeModel(C, GPUS) {
  const KIB = 1024;
  const ceilDiv = (a, b) => Math.ceil(a / b);
  const roundUp = (a, b) => ceilDiv(a, b) * b;
  const sum = (xs) => xs.reduce((a, b) => a + b, 0);
  const granule = (dtype) => (dtype === "e4m3" ? 32 : 16);
  const padded = (d, dtype = "fp16") => roundUp(d, granule(dtype));
  const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

  // ---- problem ----

  // What Python's Problem derives from its fields.
  function problemOf(given) {
    const p = { ...given };
    p.group = p.heads / p.kv_heads;
    p.e = C.DTYPE_BYTES[p.dtype];
    p.out = C.DTYPE_BYTES[p.out_dtype];
    const [left, right] = p.window;
    p.reach = [left >= p.seq + p.seq_kv ? -1 : left, p.causal ? 0 : right];
    const kind = p.reach.join();
    p.mask = kind === "-1,-1" ? "full" : kind === "-1,0" ? "causal" : "window";
    p.dense = p.bias.startsWith("dense");
    p.biasBytes = p.bias === "dense_fp32" ? 4 : p.e;
    p.d = padded(p.head_dim, p.dtype);
    p.dv = padded(p.head_dim_v, p.dtype);
    p.valueRows = C.TRANSPOSED_ROWS[p.head_dim_v];  // of V as V3 multiplies bytes
    p.cache = new Map();
    return p;
  }

  // A copy with other options; lengths that were equal stay equal.
  function changed(problem, changes) {
    const next = { ...problem, ...changes };
    if ("seq" in changes && problem.seq_kv === problem.seq) next.seq_kv = changes.seq;
    if ("head_dim" in changes && problem.head_dim_v === problem.head_dim) next.head_dim_v = changes.head_dim;
    return problemOf(next);
  }

  // Keys that `count` rows from `first` on see, [start, stop); `group` query heads' rows are packed.
  function seen(p, first, count, group = 1) {
    const [left, right] = p.reach, aligned = p.seq_kv - p.seq;
    const last = Math.min(first + count, p.seq * group) - 1;
    const start = left >= 0 ? Math.max(0, Math.floor(first / group) + aligned - left) : 0;
    const stop = right >= 0 ? Math.floor(last / group) + aligned + right + 1 : p.seq_kv;
    return [start, Math.max(start, Math.min(stop, p.seq_kv))];
  }

  // Counts of fasim/model/visits.py, by walking the tiles of queries.
  function visits(p, m, n, before = 0) {
    const key = `${m},${n},${before}`;
    if (!p.cache.has(key)) p.cache.set(key, countVisits(p, m, n, before));
    return p.cache.get(key);
  }

  // Rows that V3's first tile of queries lacks at its front: rows_before in fasim/plan.py.
  function rowsBefore(p, variant, m) {
    if (variant !== "v3" || p.mask !== "causal" || p.varlen || p.dense) return 0;
    return Math.floor((ceilDiv(p.seq, m) * m - p.seq) / C.WARPGROUP_ROWS) * C.WARPGROUP_ROWS;
  }

  // Where the tile begins whose first query this is.
  const tileStart = (p, variant, t, query) => query - (query ? 0 : rowsBefore(p, variant, t.m));

  const tileVisits = (p, variant, t, n) => visits(p, queriesOf(p, variant, t), n, rowsBefore(p, variant, t.m));

  function countVisits(p, m, n, before) {
    const q_tiles = ceilDiv(p.seq, m), kv_tiles = ceilDiv(p.seq_kv, n);
    const v = { q_tiles, kv_tiles, steps: 0, rows: 0, keys: 0, pairs: 0, blind: 0, blind_rows: 0 };
    for (let i = 0; i < q_tiles; ++i) {
      const from = i * m - before, rows = Math.min(m, p.seq - from) + Math.min(from, 0), [start, stop] = seen(p, from, m);
      if (stop <= start) {
        v.blind += 1;
        v.blind_rows += rows;
        continue;
      }
      const first = Math.floor(start / n), end = ceilDiv(stop, n);
      const keys = Math.min(end * n, p.seq_kv) - first * n;
      v.steps += end - first;
      v.rows += rows * (end - first);
      v.keys += keys;
      v.pairs += rows * keys;
    }
    v.longest = kv_tiles;
    if (p.mask === "window") {
      const [left, right] = p.reach, aligned = p.seq_kv - p.seq;
      const begin = left < 0 ? -p.seq : aligned - left, end = right < 0 ? p.seq_kv : aligned + right;
      if (end - begin) v.longest = Math.min(kv_tiles, ceilDiv(m + end - begin, n) + 1);
    }
    return v;
  }

  function packedVisits(p, m, n) {
    const rows = p.group * p.seq, v = { q_tiles: ceilDiv(rows, m), kv_tiles: ceilDiv(p.seq_kv, n), steps: 0, keys: 0, longest: 0 };
    for (let first = 0; first < rows; first += m) {
      const [start, stop] = seen(p, first, m, p.group);
      const steps = stop > start ? ceilDiv(stop, n) : 0;
      v.steps += steps;
      v.keys += Math.min(steps * n, p.seq_kv);
      v.longest = Math.max(v.longest, steps);
    }
    return v;
  }

  function visiblePairs(p) {
    const [left, right] = p.reach, aligned = p.seq_kv - p.seq;
    const first = left < 0 ? -p.seq : aligned - left, last = right < 0 ? p.seq_kv : aligned + right;
    return clippedSum(p.seq, last + 1, p.seq_kv) - clippedSum(p.seq, first, p.seq_kv);
  }

  // Sum of clip(i + shift, 0, top) over i in [0, n).
  function clippedSum(n, shift, top) {
    const low = Math.min(Math.max(-shift, 0), n), high = Math.min(Math.max(top - shift, low), n);
    return (high - low) * shift + (high * (high - 1) - low * (low - 1)) / 2 + (n - high) * top;
  }

  // ---- footprint ----

  function tensors(p) {
    const rows = p.batch * p.heads * p.seq, keys = p.batch * p.kv_heads * p.seq_kv;
    const t = { q: rows * p.head_dim * p.e, k: keys * p.head_dim * p.e, v: keys * p.head_dim_v * p.e };
    t.o = rows * p.head_dim_v * p.out;
    t.lse = rows * 4;
    t.bias = rows * p.seq_kv * p.biasBytes * (p.dense ? 1 : 0);
    t.scores = rows * p.seq_kv * (p.dtype === "e4m3" ? p.out : p.e);
    t.kv = t.k + t.v;
    return t;
  }

  const isV3 = (variant) => variant === "v3" || variant === "v3_packed";
  // Variants whose tiles have the rows of all heads that share keys.
  const packs = (variant) => variant === "v2_split" || variant === "v3_packed";
  const headsOf = (p, variant) => p.batch * (packs(variant) ? p.kv_heads : p.heads);
  // Of a tile of V3; packed, it visits the keys that one of so many queries would.
  const queriesOf = (p, variant, t) => (variant === "v3_packed" ? Math.max(Math.floor(t.m / p.group), 1) : t.m);

  // V3 in e4m3 lays out V anew before it multiplies.
  const transposes = (variant, p) => variant === "v3" && p.dtype === "e4m3";

  // Of one head: rows of V laid out anew, the ones among them, and keys in whole slabs.
  const transposedShape = (p) => [p.dv + C.ONES, roundUp(Math.max(p.seq_kv, p.varlen ? 0 : 1), C.SLAB_BYTES)];

  // Threads that lay out a slab of V.
  const transposers = (p) => (p.dv * C.SLAB_BYTES) / C.TRANSPOSED_BYTES;

  // Bytes of V laid out anew in HBM: every packed sequence begins in a slab of its own.
  function transposedBytes(p) {
    const [rows, keys] = transposedShape(p), slabs = Math.floor((p.batch * p.seq_kv) / C.SLAB_BYTES) + p.batch;
    return p.kv_heads * rows * (p.varlen ? slabs * C.SLAB_BYTES : p.batch * keys);
  }

  // What the kernel that does so moves, for all heads.
  function laidOut(p) {
    const heads = p.batch * p.kv_heads, [rows, keys] = transposedShape(p);
    return { read: heads * p.seq_kv * p.head_dim_v, write: heads * rows * keys };
  }

  function hbm(p, variant, tile = null) {
    const t = tensors(p), inputs = t.q + t.kv + t.bias;
    const v1 = p.batch * p.heads * p.seq * 4 * (p.head_dim_v + 2);
    const parts = variant === "v2_split" && tile ? v1 * tile.splits : 0, workspace = transposes(variant, p) ? transposedBytes(p) : parts;
    const need = variant === "standard"
      ? { inputs, outputs: t.o, s_and_p: 2 * t.scores, saved: 0, workspace: 0 }
      : { inputs, outputs: t.o + t.lse, s_and_p: 0, saved: 0, workspace: variant === "v1" ? v1 : workspace };
    need.total = sum(Object.values(need));
    return need;
  }

  const budget = (gpu, reserve) => gpu.hbm_bytes - C.DRIVER_BYTES - reserve;

  function maxSeq(p, variant, gpu, reserve) {
    const fits = (seq) => hbm(changed(p, { seq }), variant).total <= budget(gpu, reserve);
    let low = 0, high = C.MAX_SEQ;
    while (low < high) {
      const middle = Math.floor((low + high + 1) / 2);
      if (fits(middle)) low = middle; else high = middle - 1;
    }
    return low;
  }

  const slabs = (width, bytes = 2) => ceilDiv(width * bytes, C.SLAB_BYTES);

  // Whether warps compute scores again: rescores in fasim/plan.py.
  const rescores = (p) => p.dtype !== "e4m3" && !p.dense;

  // Whether V3's consumers keep their rows of Q in registers: keeps_q in fasim/plan.py.
  function keepsQ(p, t) {
    if (!rescores(p)) return false;
    const options = (p.mask === "window") + (p.bias === "alibi") + Boolean(p.varlen);
    const needed = Math.floor((t.n * 3) / 4) + Math.floor(p.dv / 2) + Math.floor(p.d / 4) + C.KEPT_BASE + C.KEPT_OPTION * options;
    return t.warps === 2 * C.WARPGROUP && needed <= C.MOST_KEPT;
  }

  // Whether tiles of Q and K stay until their scores are weighed: tiles_stay in fasim/plan.py.
  const tilesStay = (p, t) => rescores(p) && t.warps !== 2 * C.WARPGROUP;

  // Tiles of Q, parts of O, stages of K beside those of V: v3_layouts in fasim/plan.py.
  function v3Layouts(p, kept) {
    const count = slabs(p.head_dim_v), parts = [];
    for (let n = 2; n <= count; ++n) if (count % n === 0) parts.push(n);
    const inParts = p.dtype === "e4m3" ? parts.map((n) => [2, n, 0]) : [];
    return [kept ? [1, 1, 1] : [2, 1, 0], ...inParts, [1, 1, 0], ...parts.map((n) => [1, n, 0])];
  }

  const v3ValueRows = (p, t) => (p.dtype === "e4m3" ? p.valueRows * Math.floor(t.n / C.SLAB_BYTES) : t.n * slabs(p.head_dim_v, p.e));

  function v3Smem(p, t, [queries, parts, moreKeys]) {
    const d = slabs(p.head_dim, p.e), rows = t.m * (queries * d + Math.floor(slabs(p.head_dim_v) / parts));
    const keys = (t.stages + moreKeys) * t.n * d;
    return (rows + keys + t.stages * v3ValueRows(p, t)) * C.SLAB_BYTES + C.V3_TAIL_BYTES;
  }

  function v3Layout(p, t) {
    const layouts = v3Layouts(p, keepsQ(p, t));
    return layouts.find((one) => v3Smem(p, t, one) <= C.HOPPER_SMEM) || layouts[layouts.length - 1];
  }

  // Whether products go on from a tile of queries to the next: streams in fasim/plan.py.
  const streams = (p, t) => p.dtype !== "e4m3" && !crowded(p, t);

  // Whether parts of O leave by the place of their queries: o_in_q in fasim/plan.py.
  function oInQ(p, t) {
    const [queries, parts] = v3Layout(p, t), bytes = (parts - 1) * Math.floor(slabs(p.head_dim_v) / parts);
    return p.dtype === "e4m3" && queries === 2 && parts > 1 && bytes <= slabs(p.head_dim, p.e);
  }

  // Whether consumers pass by tiles of keys that none of their rows sees: passes_by in fasim/plan.py.
  function passesBy(p, t) {
    if (p.dtype === "e4m3") return true;
    return t.warps === 2 * C.WARPGROUP && p.mask === "causal" && !p.dense && crowded(p, t);
  }

  // Whether there is no room for two tiles of Q beside O in one piece: crowded in fasim/plan.py.
  const crowded = (p, t) => !keepsQ(p, t) && v3Smem(p, t, [2, 1, 0]) > C.HOPPER_SMEM;

  function smemBytes(p, variant, t) {
    if (isV3(variant)) return v3Smem(p, t, v3Layout(p, t));
    const q = t.m * Math.max(p.d * p.e, p.dv * p.out);
    if (variant === "v1") return q + t.n * (p.d + p.dv) * p.e;
    return q + 2 * t.stages * t.n * Math.max(p.d, p.dv) * p.e;
  }

  const rowsPerWarp = (t) => Math.floor(t.m / t.warps);
  const accumulators = (p, t) => Math.floor((rowsPerWarp(t) * (p.dv + t.step)) / 32);
  const scoresOf = (t) => Math.floor((rowsPerWarp(t) * t.step) / 32);
  const withAllRows = (t) => ({ ...t, m: t.m * t.warps });
  const isLazy = (p) => C.LAZY_DTYPES.includes(p.dtype);

  function optionRegisters(p, kept = C.OPTION_REGISTERS) {
    const asked = { window: p.mask === "window", softcap: p.softcap > 0, ALiBi: p.bias === "alibi", "dense bias": p.dense, sequences: p.varlen };
    return sum(Object.keys(asked).filter((name) => asked[name]).map((name) => kept[name]));
  }

  function v3OptionRegisters(p, t) {
    if (p.dtype === "e4m3") return optionRegisters(p, { ...C.E4M3_OPTION_REGISTERS, ...(p.dense && { window: 0 }) });
    let kept = optionRegisters(p, C.V3_OPTION_REGISTERS);
    if (p.bias === "dense_fp32") kept += Math.trunc(C.V3_FP32_BIAS_PER_KEY * Math.max(t.n - C.V3_FP32_BIAS_KEYS, 0));
    if (p.dense && p.softcap) kept += Math.trunc(C.V3_CAPPED_BIAS_PER_KEY * Math.max(t.n - C.V3_CAPPED_BIAS_KEYS, 0));
    return kept;
  }

  function mmaRegisters(p, t) {
    const longest = Math.max(p.head_dim, p.head_dim_v), scores = scoresOf(t);
    let needed = accumulators(p, t) + C.FRAGMENTS + C.BASE_REGISTERS + optionRegisters(p);
    if (p.causal) needed += Math.floor(scores / C.SCORES_PER_LIMIT);
    if (longest > 128 || (longest > 64 && scores > 64)) needed += C.WIDE_REGISTERS;
    if (t.warps < 4) needed += C.SMALL_BLOCK_REGISTERS;
    if (p.dtype === "fp32") needed += C.FP32_REGISTERS;
    if (t.stages > 1) needed += C.RING_REGISTERS;
    return needed + Math.floor(Math.max(scores - C.MANY_SCORES, 0) / C.SCORES_PER_LOAD);
  }

  function lazyRegisters(p, t) {
    const crowded = scoresOf(t) > C.MOST_LAZY_SCORES || accumulators(p, t) + Math.floor(t.step / 4) > C.MOST_HELD;
    return crowded && isLazy(p) ? C.LAZY_REGISTERS : 0;
  }

  function remadeRegisters(p, t) {
    const few = scoresOf(t) <= C.FEW_SCORES && rowsPerWarp(t) > C.MMA_ROWS;
    const long = Math.max(p.head_dim, p.head_dim_v) > 128 && isLazy(p);
    return few && long ? C.WIDE_REGISTERS + (t.stages > 1 ? C.RING_REGISTERS : 0) : 0;
  }

  function v1Registers(p, t) {
    const options = optionRegisters(p), held = accumulators(p, t);
    const taken = C.V1_BASE + options + C.V1_PER_ACCUMULATOR[p.dtype] * held;
    const rounded = Math.min(roundUp(Math.trunc(taken), 8), C.MOST_REGISTERS);
    const needed = held < C.V1_SMALL ? rounded : C.MOST_REGISTERS;
    const excess = Math.max(held - (options ? C.V1_MOST_WITH_OPTIONS : C.V1_MOST), 0);
    return Math.max(needed, mmaRegisters(p, t)) + excess;
  }

  function variantRegisters(p, variant, t) {
    if (variant === "v1") return v1Registers(p, t);
    if (variant === "v2") return mmaRegisters(p, t) + lazyRegisters(p, t) - remadeRegisters(p, t);
    if (variant === "v2_split") return mmaRegisters(p, withAllRows(t)) + C.SPLIT_REGISTERS[p.dtype];
    const kept = Math.floor(p.dv / 2) + Math.floor((t.n * p.e) / 8) + v3OptionRegisters(p, t);
    const packed = variant === "v3_packed" && t.n > C.V3_PACKED_KEYS ? C.V3_PACKED_REGISTERS : 0;
    const queries = keepsQ(p, t) ? Math.floor(p.d / 4) : 0;
    if (p.dtype !== "e4m3") return Math.floor(t.n / 2) + kept + queries + C.V3_BASE + packed;
    const sums = Math.floor((t.warps === 12 ? C.UNDER_WAY_12 : C.UNDER_WAY_8)[p.head_dim_v] / 2);
    return Math.max(Math.floor(t.n / 2), sums) + kept + C.ROUNDED_SUMS + C.E4M3_BASE;
  }

  function archRegisters(p, variant, t, gpu) {
    if (isV3(variant)) return 0;
    const [major] = gpu.compute_capability;
    if (major < C.AMPERE[0]) return turingRegisters(p, variant, t);
    if (p.dtype !== "e4m3") return variant === "v2" && major >= C.BLACKWELL ? remadeRegisters(p, t) : 0;
    const generation = major in C.SUMS_REGISTERS ? major : C.BLACKWELL;
    const columns = C.SUMS_REGISTERS[generation][Math.floor((p.head_dim_v - 1) / 64)];
    return Math.trunc(columns + C.SUMS_PER_KEY[generation] * t.step);
  }

  function turingRegisters(p, variant, t) {
    const passing = C.COPIED_REGISTERS + (p.dtype === "fp16" ? Math.max(t.step - C.FEW_KEYS, 0) : 0);
    if (variant !== "v1") return passing;
    const taken = v1Registers(p, t);
    const beyond = taken <= C.MOST_REGISTERS ? Math.max(accumulators(p, t) - C.V1_MOST_WITH_OPTIONS, 0) : 0;
    return Math.min(passing, Math.max(C.MOST_REGISTERS - taken, 0)) + beyond;
  }

  const registersOf = (p, variant, t, gpu) => variantRegisters(p, variant, t) + archRegisters(p, variant, t, gpu);

  function granted(p, variant, t, cap, gpu) {
    const held = accumulators(p, variant === "v2_split" ? withAllRows(t) : t);
    const wanted = Math.trunc(C.WANTED_BASE + C.WANTED_PER_ACCUMULATOR * held);
    return Math.min(roundUp(Math.max(registersOf(p, variant, t, gpu), wanted), 8), cap);
  }

  // ---- occupancy ----

  function residency(gpu, threads, registers, smem) {
    const warps = ceilDiv(threads, C.WARP);
    const demand = roundUp(Math.max(registers, 1) * C.WARP, gpu.register_granularity);
    const perPartition = Math.floor(Math.floor(gpu.registers_per_sm / gpu.sub_partitions) / demand);
    const carveout = gpu.smem_carveouts.length ? Math.max(...gpu.smem_carveouts) : gpu.smem_per_sm;
    const shared = Math.max(roundUp(smem + gpu.smem_reserved, gpu.smem_granularity), 1);
    const limits = {
      registers: registers <= gpu.registers_per_thread ? Math.floor((perPartition * gpu.sub_partitions) / roundUp(warps, C.WARP_GRANULE)) : 0,
      smem: smem <= gpu.smem_per_block ? Math.floor(carveout / shared) : 0,
      warps: threads <= gpu.threads_per_block ? Math.floor(gpu.warps_per_sm / warps) : 0,
      blocks: gpu.blocks_per_sm,
    };
    const limiter = Object.keys(limits).reduce((a, b) => (limits[b] < limits[a] ? b : a));
    return [limits[limiter], limiter];
  }

  function registerCap(gpu, threads, blocks) {
    const warps = roundUp(ceilDiv(threads, C.WARP), C.WARP_GRANULE) * Math.max(blocks, 1);
    return Math.min(gpu.registers_per_thread, Math.floor(Math.floor(gpu.registers_per_sm / (C.WARP * warps)) / 8) * 8);
  }

  // ---- legality ----

  // A tile under judgement: what fasim/legality.py's Case holds of one.
  function caseOf(p, gpu, variant, tile) {
    const c = { p, gpu, variant, smem: smemBytes(p, variant, tile), registers: registersOf(p, variant, tile, gpu) };
    const v3 = isV3(variant);
    c.threads = tile.warps * C.WARP + (v3 ? C.LOADER_THREADS : 0);
    const groups = Math.floor(tile.warps / C.WARPGROUP);
    c.together = v3 ? C.V3_BLOCKS[groups] || 0 : 0;
    c.launchRegisters = v3 ? registerCap(gpu, c.threads, c.together) : c.registers;
    [c.blocks, c.limiter] = residency(gpu, c.threads, c.launchRegisters, c.smem);
    c.t = { ...tile, splits: 1 };
    if (variant === "v2_split") c.t.splits = splitCount(ceilDiv(p.seq_kv, tile.n), packedBlocks(p, tile), gpu.sm_count * c.blocks);
    const consumers = C.CONSUMER_REGISTERS[groups] || 0;
    c.t.registers = v3 ? consumers : granted(p, variant, tile, registerCap(gpu, c.threads, c.blocks), gpu);
    c.t.blocks = Math.max(c.blocks, 1);
    c.cap = v3 ? consumers : registerCap(gpu, c.threads, 1);
    c.grid = gridOf(c);
    return c;
  }

  const packedBlocks = (p, t) => p.batch * p.kv_heads * ceilDiv(p.group * p.seq, t.m);

  function gridOf({ p, gpu, variant, t, blocks }) {
    if (variant === "v2_split") return packedBlocks(p, t) * t.splits;
    if (variant === "v3_packed") return Math.min(packedBlocks(p, t), gpu.sm_count * blocks);
    const heads = p.batch * p.heads;
    if (variant === "v1") return heads * Math.min(p.seq, 1);
    const all = heads * ceilDiv(p.seq, t.m);
    return variant === "v3" ? Math.min(all, gpu.sm_count * blocks) : all;
  }

  function splitCount(keyTiles, blocks, slots) {
    let best = 1, least = Infinity;
    for (let splits = 1; splits <= Math.max(1, Math.min(keyTiles, C.MOST_SPLITS)); ++splits) {
      const turns = ceilDiv(blocks * splits, Math.max(slots, 1)) * (ceilDiv(keyTiles, splits) + C.ENDS_TILES);
      if (turns < least) [best, least] = [splits, turns];
    }
    return best;
  }

  // One decimal, ties to even, as Python prints it.
  function fixed1(x) {
    const tenths = x * 10, low = Math.floor(tenths);
    const up = tenths - low > 0.5 || (tenths - low === 0.5 && low % 2 === 1);
    return ((low + (up ? 1 : 0)) / 10).toFixed(1);
  }

  const warpsWord = (t) => `${t.warps} warp${t.warps > 1 ? "s" : ""}`;
  const mergeBytes = ({ p, t }) => t.warps * t.m * (p.dv + 8) * 4;

  const productRegisters = ({ p, t }) => (p.dtype === "e4m3" ? 0 : Math.floor(Math.max(p.dv, t.n) / 2) + C.PRODUCT_REGISTERS);
  const leastGroups = (p) => (p.dtype === "e4m3" ? 2 : 1);

  // [kept, why not in English, why not in Chinese], in the order in which they are asked.
  const RULES = {
    mmaRows: [({ t }) => t.m % (16 * t.warps) === 0,
      ({ t }) => `block_q ${t.m} is no multiple of 16 rows x ${warpsWord(t)} = ${16 * t.warps}`,
      ({ t }) => `block_q ${t.m} 不是 16 行 × ${t.warps} 个线程束 = ${16 * t.warps} 的倍数`],
    packedRows: [({ t }) => C.ROWS_PER_WARP.includes(t.m),
      ({ t }) => `block_q ${t.m} is not the 16 or 32 rows that split keys take`,
      ({ t }) => `切分键时 block_q 须为 16 或 32，而不是 ${t.m}`],
    sharedKeys: [({ p, t }) => t.step * t.warps === t.n && t.step % granule(p.dtype) === 0 && t.warps > 1,
      ({ p, t }) => `block_kv ${t.n} is not ${t.step} keys, a multiple of ${granule(p.dtype)}, for each of ${warpsWord(t)}`,
      ({ p, t }) => `block_kv ${t.n} 不能平分给 ${t.warps} 个线程束（每束 ${t.step} 个键，须为 ${granule(p.dtype)} 的倍数）`],
    fp32Columns: [({ p }) => p.dtype !== "fp32" || Math.max(p.head_dim, p.head_dim_v) <= C.SPLIT_FP32_COLUMNS,
      () => `with more than ${C.SPLIT_FP32_COLUMNS} fp32 columns split keys would spill`,
      () => `fp32 列数超过 ${C.SPLIT_FP32_COLUMNS} 时，切分键会溢出寄存器`],
    partsFit: [(c) => mergeBytes(c) <= c.smem,
      (c) => `the parts of ${warpsWord(c.t)} need ${fixed1(mergeBytes(c) / KIB)} KiB, the tiles have ${fixed1(c.smem / KIB)}`,
      (c) => `${c.t.warps} 个线程束的部分和需要 ${fixed1(mergeBytes(c) / KIB)} KiB，而分块只有 ${fixed1(c.smem / KIB)}`],
    warpgroupRows: [({ t }) => t.m * C.WARPGROUP === t.warps * C.WARPGROUP_ROWS,
      ({ t }) => `block_q ${t.m} is not 64 rows for each of ${t.warps / C.WARPGROUP} consumer warpgroups`,
      ({ t }) => `block_q ${t.m} 不是 ${t.warps / C.WARPGROUP} 个消费者线程束组各 64 行`],
    wholeSlabs: [({ p, t }) => p.dtype !== "e4m3" || t.n === C.SLAB_BYTES,
      ({ t }) => `block_kv ${t.n} is not one slab of ${C.SLAB_BYTES} keys of V`,
      ({ t }) => `block_kv ${t.n} 不是 V 的一组 ${C.SLAB_BYTES} 个键`],
    wholeKeys: [({ p, t }) => t.n % granule(p.dtype) === 0,
      ({ p, t }) => `block_kv ${t.n} is no multiple of the ${granule(p.dtype)} keys of one ${p.dtype} matmul step`,
      ({ p, t }) => `block_kv ${t.n} 不是一步 ${p.dtype} 矩阵乘的 ${granule(p.dtype)} 个键的倍数`],
    wholeSteps: [({ t }) => t.n % t.step === 0 && t.step % 16 === 0 && t.n > t.step,
      ({ t }) => `block_kv ${t.n} is not two or more whole steps of ${t.step} keys, themselves a multiple of 16`,
      ({ t }) => `block_kv ${t.n} 不是两步以上、每步 ${t.step} 个键（16 的倍数）`],
    oneStep: [({ t }) => t.step === t.n,
      ({ t }) => `step_kv ${t.step} differs from block_kv ${t.n}`,
      ({ t }) => `step_kv ${t.step} 与 block_kv ${t.n} 不同`],
    oneStage: [({ t }) => t.stages === 1,
      ({ t }) => `${t.stages} stages, but v1 copies and computes in turn`,
      ({ t }) => `${t.stages} 级流水，但 V1 先搬运再计算`],
    width: [({ t }) => t.n <= 256,
      ({ t }) => `block_kv ${t.n} exceeds the 256 columns of a wgmma`,
      ({ t }) => `block_kv ${t.n} 超过 wgmma 的 256 列`],
    consumers: [({ p, t }) => Object.keys(C.CONSUMER_REGISTERS).some((n) => n >= leastGroups(p) && C.WARPGROUP * n === t.warps),
      ({ p, t }) => `${t.warps} consumer warps are not ${leastGroups(p)} to 3 warpgroups`,
      ({ p, t }) => `${t.warps} 个消费者线程束不是 ${leastGroups(p)} 到 3 个线程束组`],
    oneProduct: [(c) => productRegisters(c) <= c.launchRegisters,
      (c) => `a product needs ${productRegisters(c)} registers, and a thread starts with ${c.launchRegisters}`,
      (c) => `一次乘法需要 ${productRegisters(c)} 个寄存器，而线程启动时只有 ${c.launchRegisters} 个`],
    together: [(c) => c.blocks >= c.together,
      (c) => `${c.together} blocks are to share an SM, and ${c.blocks} of ${fixed1(c.smem / KIB)} KiB fit`,
      (c) => `一个 SM 须容纳 ${c.together} 个线程块，每块 ${fixed1(c.smem / KIB)} KiB，只能容纳 ${c.blocks} 个`],
    threads: [(c) => c.threads <= c.gpu.threads_per_block,
      (c) => `${c.threads} threads exceed ${c.gpu.threads_per_block} per block`,
      (c) => `${c.threads} 个线程超过每块 ${c.gpu.threads_per_block} 个`],
    shared: [(c) => c.smem <= c.gpu.smem_per_block,
      (c) => `shared memory ${fixed1(c.smem / KIB)} KiB exceeds ${fixed1(c.gpu.smem_per_block / KIB)} KiB`,
      (c) => `共享内存 ${fixed1(c.smem / KIB)} KiB 超过 ${fixed1(c.gpu.smem_per_block / KIB)} KiB`],
    registers: [(c) => c.registers <= c.cap,
      (c) => `registers ${c.registers} per thread exceed ${c.cap}`,
      (c) => `每线程 ${c.registers} 个寄存器，超过 ${c.cap}`],
    rowsPerWarp: [({ t }) => C.ROWS_PER_WARP.includes(rowsPerWarp(t)),
      ({ t }) => `${rowsPerWarp(t)} rows per warp are not 16 or 32`,
      ({ t }) => `每线程束 ${rowsPerWarp(t)} 行，须为 16 或 32`],
    resident: [(c) => c.blocks > 0,
      (c) => `no block fits an SM: ${c.threads} threads with ${c.launchRegisters} registers and ${fixed1(c.smem / KIB)} KiB`,
      (c) => `一个 SM 容不下一个块：${c.threads} 线程 × ${c.launchRegisters} 寄存器，${fixed1(c.smem / KIB)} KiB`],
    grid: [(c) => c.grid <= C.MAX_GRID,
      (c) => `grid ${c.grid} exceeds ${C.MAX_GRID} blocks`,
      (c) => `网格 ${c.grid} 超过 ${C.MAX_GRID} 块`],
  };
  const LIMITS = ["threads", "shared", "registers", "resident", "grid"];
  const FORWARD = ["threads", "shared", "registers", "rowsPerWarp", "resident", "grid"];
  const ORDER = {
    v1: ["mmaRows", "wholeKeys", "oneStage", "wholeSteps", ...FORWARD],
    v2: ["mmaRows", "wholeKeys", "oneStep", ...FORWARD],
    v2_split: ["packedRows", "sharedKeys", "fp32Columns", "partsFit", ...LIMITS],
    v3: ["consumers", "wholeKeys", "width", "oneStep", "warpgroupRows", "wholeSlabs", ...LIMITS, "together", "oneProduct"],
    v3_packed: ["consumers", "wholeKeys", "width", "oneStep", "warpgroupRows", ...LIMITS, "together", "oneProduct"],
  };

  // The place of the first rule a tile breaks; the number of rules if none.
  function broken(c) {
    const place = ORDER[c.variant].findIndex((name) => !RULES[name][0](c));
    return place < 0 ? ORDER[c.variant].length : place;
  }

  const sentences = (c, place) => RULES[ORDER[c.variant][place]].slice(1).map((say) => say(c));

  // ---- candidates ----

  const product = (...lists) => lists.reduce((all, list) => all.flatMap((one) => list.map((x) => [...one, x])), [[]]);
  const tileOf = (m, n, warps, stages, step = n) => ({ m, n, warps, stages, step });

  function candidates(p, gpu, variant) {
    const keys = { e4m3: C.E4M3_KEYS, fp32: C.FP32_KEYS }[p.dtype] || C.KEYS;
    if (isV3(variant)) return product(Object.keys(C.CONSUMER_REGISTERS).map(Number), keys, C.V3_STAGES)
      .map(([g, n, s]) => tileOf(C.WARPGROUP_ROWS * g, n, C.WARPGROUP * g, s));
    if (variant === "v2_split") return product(C.SPLIT_WARPS, C.ROWS_PER_WARP, C.SPLIT_KEYS, C.SPLIT_STAGES)
      .map(([w, rows, n, s]) => tileOf(rows, n * w, w, s, n));
    if (variant === "v2") return product(C.WARPS, C.ROWS_PER_WARP, keys, [1, 2])
      .map(([w, rows, n, s]) => tileOf(rows * w, n, w, s));
    return v1Candidates(p, gpu);
  }

  function v1Candidates(p, gpu) {
    const elements = Math.floor(gpu.smem_per_block / C.DTYPE_BYTES[p.dtype]);
    const paper = Math.max(64, Math.floor(ceilDiv(elements, 4 * p.head_dim) / 64) * 64);
    const keys = [...new Set([...C.V1_KEYS, paper])].sort((a, b) => a - b);
    const pairs = product(keys, C.V1_STEPS).filter(([n, s]) => n % s === 0 && n > s);
    if (p.dtype === "fp32") pairs.push([32, 16]);
    if (optionRegisters(p)) pairs.push([64, 16], [128, 16]);
    return product(C.WARPS.slice(1), C.ROWS_PER_WARP, pairs).map(([w, rows, [n, s]]) => tileOf(rows * w, n, w, 1, s));
  }

  // Every completion of a shape; where the stages are asked for too, those with as many.
  function judged([m, n], variant, stages = 0) {
    const asked = (choices) => (stages ? [stages] : choices);
    const steps = [16, ...C.V1_STEPS].filter((s) => n % s === 0 && n > s);
    if (variant === "v1") return product(C.WARPS, asked([1]), steps.length ? steps : [n]).map(([w, s, k]) => tileOf(m, n, w, s, k));
    if (variant === "v2") return product(C.WARPS, asked([1, 2])).map(([w, s]) => tileOf(m, n, w, s));
    if (isV3(variant)) return product([4, 8, 12], asked(C.V3_STAGES)).map(([w, s]) => tileOf(m, n, w, s));
    const shares = product(C.SPLIT_WARPS, asked(C.SPLIT_STAGES)).filter(([w]) => n % w === 0);
    return shares.length ? shares.map(([w, s]) => tileOf(m, n, w, s, n / w)) : [tileOf(m, n, 1, 1)];
  }

  // ---- traffic ----

  const total = (moved) => sum(Object.values(moved));
  function rowsApart(p, variant, t) {
    if (variant === "v3") return passesBy(p, t) ? C.WARPGROUP_ROWS : t.m;
    return variant === "v2" && p.dtype !== "fp32" ? rowsPerWarp(t) : t.m;
  }

  function issued(p, variant, t) {
    const heads = p.batch * p.heads;
    let reads, writes;
    if (variant === "standard") {
      const s = tensors(p);
      reads = { q: s.q, k: s.k, v: s.v, s: s.scores, p: s.scores, ...(s.bias ? { bias: s.bias } : {}) };
      writes = { s: s.scores, p: s.scores, o: s.o };
    } else if (variant === "v2_split") {
      const v = packedVisits(p, t.m, t.n), kv = p.batch * p.kv_heads, rows = heads * p.seq, parts = rows * t.splits;
      writes = { o_part: parts * p.head_dim_v * 4, m_part: parts * 4, l_part: parts * 4 };
      reads = { q: parts * p.head_dim * p.e, k: kv * v.keys * p.head_dim * p.e, v: kv * v.keys * p.head_dim_v * p.e, ...writes };
      reads.m_part = 2 * parts * 4;
      writes = { ...writes, o: rows * p.head_dim_v * p.out, lse: rows * 4 };
    } else {
      const v = tileVisits(p, variant, t, t.n), kv = headsOf(p, variant);
      const rows = variant === "v1" ? v.rows + v.blind_rows : p.seq, again = heads * (rows - p.seq);
      const keys = variant === "v1" ? (v.q_tiles > 0 ? p.seq_kv : 0) : v.keys;
      reads = { q: heads * rows * p.head_dim * p.e, k: kv * keys * p.head_dim * p.e, v: kv * keys * p.head_dim_v * p.e };
      writes = {};
      if (variant === "v1") {
        const state = { o_acc: again * p.head_dim_v * 4, m: again * 4, l: again * 4 };
        Object.assign(reads, state);
        Object.assign(writes, state);
      }
      Object.assign(writes, { o: heads * p.seq * p.head_dim_v * p.out, lse: heads * p.seq * 4 });
      if (transposes(variant, p)) withTransposed(p, t, v, reads, writes);
      Object.assign(reads, optionReads(p, variant, t));
    }
    return { read: total(reads), write: total(writes), reads, writes };
  }

  // The kernel before lays out V anew, of which whole slabs of keys are read.
  function withTransposed(p, t, v, reads, writes) {
    const [rows, keys] = transposedShape(p), before = laidOut(p), any = p.varlen ? 1 : Math.min(v.q_tiles, 1);
    const ragged = v.kv_tiles * t.n - p.seq_kv, last = Math.floor((v.steps * t.n - v.keys) / Math.max(ragged, 1));
    Object.assign(reads, { v: before.read * any, vt: p.batch * p.heads * rows * (v.keys + last * (keys - p.seq_kv)) });
    writes.vt = before.write * any;
  }

  function optionReads(p, variant, t) {
    const heads = p.batch * p.heads, v = tileVisits(p, variant, t, t.step), reads = {};
    const threads = heads * (variant === "v1" ? Math.min(v.q_tiles, 1) : v.q_tiles) * t.warps * C.WARP;
    if (p.bias === "alibi") reads.slopes = 4 * threads;
    if (p.dense) reads.bias = heads * visits(p, rowsApart(p, variant, t), t.step).pairs * p.biasBytes;
    if (p.varlen) reads.cu_seqlens_q = reads.cu_seqlens_k = 8 * (variant === "v3" ? heads * v.q_tiles : threads);
    if (p.varlen && transposes(variant, p)) reads.cu_seqlens_k += (8 * transposers(p) * p.batch * p.kv_heads * transposedShape(p)[1]) / C.SLAB_BYTES;
    const readers = variant === "v3" ? heads * v.q_tiles : threads;
    if (p.dtype === "e4m3") for (const name of C.SCALE_INPUTS) reads[name] = 4 * readers;
    if (p.scales === "block") {
      reads.q_scale = 4 * heads * v.q_tiles * Math.floor(t.m / C.WARPGROUP_ROWS);
      for (const name of C.SCALE_INPUTS.slice(1)) reads[name] = 4 * heads * v.steps;
    }
    return reads;
  }

  function least(p, asked) {
    const t = tensors(p);
    return { read: t.q + t.kv + (asked.reads.bias || 0), write: t.o + t.lse };
  }

  function dram(p, gpu, variant, t, asked, blocks) {
    const cache = C.L2_SHARE * gpu.l2_bytes, resident = gpu.sm_count * Math.max(blocks, 1);
    if (variant === "standard") {
      const { scores } = tensors(p), saved = scores > cache ? 0 : 2 * scores;
      return { read: asked.read - saved, write: asked.write - saved };
    }
    const low = least(p, asked);
    if (variant === "v2_split") {
      const parts = hbm(p, variant, t).workspace, spilled = parts <= cache ? 0 : parts;
      return { read: low.read + spilled, write: low.write + spilled };
    }
    if (variant === "v1") {
      const alive = Math.min(resident, p.batch * p.heads) * p.seq * (p.e * p.head_dim + 4 * (p.head_dim_v + 2));
      return alive <= cache ? { read: Math.min(low.read, asked.read), write: Math.min(low.write, asked.write) } : asked;
    }
    const perHead = ceilDiv(p.seq, t.m);
    const perWalk = Math.max(packs(variant) ? ceilDiv(p.group * p.seq, t.m) : perHead * p.group, 1);
    const heads = Math.max(ceilDiv(resident, perWalk), 1), convoy = Math.min(resident, perWalk);
    const alive = heads * p.seq_kv * (p.head_dim + p.head_dim_v) * p.e;
    const passes = alive <= cache ? 1 : ceilDiv(perWalk, convoy);
    const extra = passes > 1 ? passes * (1 + C.DRIFT) - 1 : 0;
    const read = Math.min(Math.trunc(low.read + tensors(p).kv * extra), asked.read), write = Math.min(low.write, asked.write);
    if (!transposes(variant, p)) return { read, write };
    const before = laidOut(p);
    return { read: Math.min(read + before.read, asked.read), write: write + before.write };
  }

  // ---- flops ----

  const useful = (p) => p.batch * p.heads * visiblePairs(p) * 2 * (p.head_dim + p.head_dim_v);

  // That P V has: where V is laid out anew the ones sum the weights.
  const valueColumns = (p, variant) => (transposes(variant, p) ? p.valueRows : p.dv);

  function executed(p, variant, t) {
    const heads = p.batch * p.heads, perPair = 2 * (p.d + valueColumns(p, variant));
    if (variant === "standard") return heads * p.seq * p.seq_kv * 2 * (p.head_dim + p.head_dim_v);
    if (variant === "v2_split") return p.batch * p.kv_heads * perPair * packedVisits(p, t.m, t.n).steps * t.m * t.n;
    const rows = rowsApart(p, variant, t), v = rows === t.m ? tileVisits(p, variant, t, t.step) : visits(p, rows, t.step);
    const blind = isV3(variant) && p.dtype !== "e4m3" ? v.blind + withoutRows(p, t, rows) : 0;
    return headsOf(p, variant) * perPair * (v.steps + blind) * rows * t.step;
  }

  // Groups of so many rows in tiles of queries, beyond the last query.
  function withoutRows(p, t, rows) {
    return ceilDiv(p.seq, t.m) * Math.floor(t.m / rows) - ceilDiv(p.seq, rows);
  }

  // ---- time ----

  const beside = (a, b) => Math.max(a, b) + C.ISSUE_SHOWS * Math.min(a, b);

  function fetched(rowBytes) {
    const row = roundUp(rowBytes, 16), lines = roundUp(rowBytes, C.LINE_BYTES);
    if (row % C.LINE_BYTES === 0 || C.LINE_BYTES % row === 0) return lines;
    return lines * (row % C.SECTOR_BYTES === 0 ? C.CROSSING_LINES : C.CROSSING_SECTORS);
  }

  // Clocks of one step, pipe by pipe: fasim/model/steps.py.
  function step(p, r, variant, t) {
    const scores = t.m * t.n, kv = t.n * (p.d + p.dv) * p.e, q = t.m * p.d * p.e;
    const capped = p.softcap > 0 ? 1 : 0, mufu = 1 + C.SOFTCAP_MUFU * capped;
    const options = C.SOFTCAP_INSTRUCTIONS * capped + C.ALIBI_INSTRUCTIONS * (p.bias === "alibi") + C.DENSE_INSTRUCTIONS * p.dense;
    const instructions = C.SOFTMAX_INSTRUCTIONS + options, exponentials = (mufu * scores) / r.mufu;
    const columns = valueColumns(p, variant), tensor = (2 * scores * (p.d + columns)) / r.matmul_flops;
    if (isV3(variant)) {
      const groups = Math.floor(t.warps / C.WARPGROUP);
      const sums = transposes(variant, p) ? (C.E4M3_COLUMN * t.m * columns) / r.lanes + C.E4M3_SHOWS * tensor : 0;
      const l2 = (t.n * (fetched(p.head_dim * p.e) + fetched(p.head_dim_v * p.e))) / r.l2_bytes;
      return { tensor, softmax: beside(exponentials, (options * scores) / r.lanes) + sums, smem: (groups * kv + q + kv) / r.smem_bytes, l2, fill: kv };
    }
    const busy = Math.min(1, (t.warps * Math.max(t.blocks, 1)) / 4), reread = p.dtype === "fp32" ? C.FP32_REREAD : 1;
    let smem = (t.warps * kv * reread + q * Math.floor(t.n / t.step) + kv) / r.smem_bytes, l2 = kv / r.l2_bytes;
    const issue = (instructions * scores + t.m * p.dv) / r.lanes;
    let softmax = (beside(exponentials, issue) * (p.dtype === "e4m3" ? C.E4M3_SOFTMAX : 1)) / busy;
    if (variant === "v2" && isLazy(p)) softmax = beside(exponentials, ((instructions - C.LAZY_SAVES) * scores) / r.lanes) / busy;
    if (variant === "v2_split") {
      const rows = t.warps - 1;
      softmax += (rows * t.m * p.dv) / r.lanes / busy;
      smem += (rows * (q - kv * reread) - q * (Math.floor(t.n / t.step) - 1)) / r.smem_bytes;
    }
    if (variant === "v1") {
      smem += (q - kv) / r.smem_bytes;
      l2 = 0;
    }
    return { tensor: tensor / busy, softmax, smem, l2, fill: kv };
  }

  // Seconds: likely, low, high, and by pipe: fasim/model/timeline.py.
  function times(p, gpu, variant, t, asked, moved) {
    const r = gpu.rates[variant], s = step(p, r, variant, t);
    s.onChip = Math.max(s.tensor, Math.max(s.softmax, s.smem));
    s.serial = s.tensor + s.softmax + s.smem;
    const split = variant === "v2_split", v = split ? packedVisits(p, t.m, t.n) : tileVisits(p, variant, t, t.n);
    const f = { p, gpu, variant, t, r, s, v, heads: headsOf(p, variant), asked, moved };
    const stages = split || transposes(variant, p) ? 2 : 1, before = transposes(variant, p) ? laidOut(p) : { read: 0, write: 0 };
    const aside = (before.read + before.write) / r.hbm_bytes_s, hbmS = hbmSeconds(f), main = Math.max(hbmS - aside, 0);
    const launch = stages * r.launch_s + aside;
    const [likely, low, high] = [likelyLaw, perfectLaw, noneLaw].map((law) => clocks(f, law(f)) / r.clock_hz);
    const seconds = launch + Math.max(likely, main);
    const perClock = f.heads / (r.sms * r.clock_hz), steps = v.steps * perClock;
    const l2 = (asked.read + asked.write) / (r.l2_bytes * r.sms * r.clock_hz);
    const terms = { tensor: steps * s.tensor, mufu: steps * s.softmax, smem: steps * s.smem, l2: Math.max(l2, steps * s.l2), hbm: hbmS, launch: stages * r.launch_s };
    return timesOf(seconds, launch + Math.max(low, main), launch + high + main, terms);
  }

  function timesOf(seconds, low, high, terms) {
    const bound = C.TERMS.reduce((a, b) => (terms[b] > terms[a] ? b : a));
    return { seconds, low: Math.min(low, seconds), high: Math.max(high, seconds), bound, terms };
  }

  function hbmSeconds({ gpu, variant, t, r, s, moved, ...f }) {
    const bytes = moved.read + moved.write, seconds = bytes / r.hbm_bytes_s;
    if (!packs(variant)) return seconds;
    const slots = Math.min(f.heads * f.v.q_tiles * t.splits, r.sms * t.blocks);
    const onTheWay = slots * (t.stages - 0.5) * s.fill;
    return seconds + ((bytes / Math.max(onTheWay, 1)) * r.hbm_latency) / r.clock_hz;
  }

  const independent = ({ t }, resident) => Math.max(1, Math.min(resident, (resident * t.warps) / 4));

  function exposed({ gpu, variant, t, r, s }) {
    if (variant === "v1") return 0;
    const half = s.tensor / 2, background = gpu.cp_async ? 1 : 0;
    const arrival = r.l2_latency + s.fill / 2 / r.l2_bytes;
    const ahead = background ? (t.stages - 1) * s.serial : -half;
    return Math.max(0, arrival - ahead - half) + Math.max(0, arrival - ahead - half - s.softmax * background);
  }

  function likelyLaw(f) {
    const { p, variant, t, s } = f;
    if (isV3(variant)) {
      const longest = Math.max(Math.max(s.tensor, s.softmax), s.smem);
      const waits = t.warps === 2 * C.WARPGROUP ? C.WGMMA_WAITS * Math.max(0, s.softmax - s.tensor / 2) : 0;
      const shorter = Math.min(s.tensor, s.softmax), longer = Math.max(s.tensor, s.softmax), wide = Math.max(1, t.n / 128);
      const clocks = keepsQ(p, t) ? C.KEPT_SHOWN_CLOCKS : C.WGMMA_SHOWN_CLOCKS;
      const shown = (clocks * wide * shorter) / Math.max(longer, 1) + waits;
      return () => Math.max(longest + shown / t.blocks, s.l2);
    }
    let [pipes, softmax, alone] = [C.PIPES_SHOW, C.SOFTMAX_SHOWS, C.LONE_SHOWS];
    if (p.dtype === "fp32") pipes = C.FP32_PIPES_SHOW;
    else if (variant === "v2" && isLazy(p)) [pipes, softmax, alone] = [C.LAZY_PIPES_SHOW, C.LAZY_SOFTMAX_SHOWS, C.LAZY_LONE_SHOWS];
    const shown = pipes * (s.tensor + s.smem) + softmax * s.softmax, waits = alone * s.serial + exposed(f);
    return (resident) => Math.max(shown + waits / independent(f, resident) + C.SYNC_CLOCKS.fwd, Math.max(s.onChip, s.l2));
  }

  const perfectLaw = ({ s }) => () => Math.max(s.onChip, s.l2);
  const noneLaw = ({ variant, s }) => () => s.serial + s.l2 + (isV3(variant) ? C.WGMMA_SYNC_CLOCKS : C.SYNC_CLOCKS.fwd);

  function clocks(f, law) {
    if (f.variant === "v1") return oneBlockAHead(f, law);
    if (f.variant === "v2_split") return waves(f, law, f.heads * f.v.q_tiles * f.t.splits);
    const blocks = f.heads * f.v.q_tiles;
    return f.p.mask === "full" ? waves(f, law, blocks) : makespan(f, law, blocks);
  }

  function waves(f, law, blocks) {
    const full = f.t.blocks, slots = f.r.sms * full, whole = Math.floor(blocks / slots);
    const last = ceilDiv(blocks - whole * slots, f.r.sms);
    return (whole > 0 ? whole * full * block(f, law, full) : 0) + (last > 0 ? last * block(f, law, Math.max(last, 1)) : 0);
  }

  function makespan(f, law, blocks) {
    const { p, r, t, v, variant } = f;
    if (!blocks) return 0;
    const resident = clamp(ceilDiv(blocks, r.sms), 1, t.blocks), mean = block(f, law, resident);
    const sorted = isV3(variant) || (variant === "v2" && p.mask === "causal");
    const share = sorted ? C.SORTED_TAIL : C.MASKED_TAIL;
    const tail = blocks > r.sms ? share * resident * mean : 0;
    return Math.max(Math.max(blocks / r.sms, 1) * mean + tail, block(f, law, 1, v.longest));
  }

  function block(f, law, resident, steps = null) {
    const { p, t, r, s, v, variant } = f;
    if (variant === "v2_split") steps = ceilDiv(v.longest, t.splits);
    else if (steps === null) steps = v.steps / Math.max(v.q_tiles, 1);
    if (isV3(variant)) {
      const e4m3 = p.dtype === "e4m3", late = crowded(p, t) ? (e4m3 ? C.O_IN_PARTS_CLOCKS : C.ONE_Q_CLOCKS) : 0;
      const shows = e4m3 ? C.E4M3_MASKED_CLOCKS : C.MASKED_STEP_CLOCKS;
      const masked = p.mask === "full" ? 0 : shows * ceilDiv(queriesOf(p, variant, t), t.n);
      const drift = t.warps > 2 * C.WARPGROUP || !e4m3, ahead = t.stages > 2 && drift ? C.RING_CLOCKS : 0;
      return steps * law(resident) + ((e4m3 ? C.E4M3_TILE_CLOCKS : C.WGMMA_TILE_CLOCKS) + late + masked - ahead) / t.blocks;
    }
    const ends = (C.MMA_BLOCK_CLOCKS.fwd + s.serial / 2) / independent(f, resident);
    return steps * law(resident) + ends + (t.m * (p.head_dim * p.e + p.head_dim_v * p.out)) / r.l2_bytes;
  }

  function oneBlockAHead(f, law) {
    const { t, r, s, v, heads, asked, moved } = f, full = t.blocks;
    if (!(v.q_tiles > 0 && s.tensor > 0)) return 0;
    const head = (resident) => {
      const latency = (2 * r.l2_latency) / independent(f, resident);
      return v.steps * law(resident) + (v.steps + v.blind) * latency + C.MMA_BLOCK_CLOCKS.fwd;
    };
    const slots = r.sms * full, whole = Math.floor(heads / slots), last = ceilDiv(heads - whole * slots, r.sms);
    const turns = whole * full * head(full) + (last > 0 ? last * head(Math.max(last, 1)) : 0);
    const active = Math.min(1, heads / r.sms), drawn = Math.min(1, C.SOLO_DRAW * active);
    const l2 = (asked.read + asked.write) / (r.l2_bytes * r.sms * active);
    return turns + Math.max(l2, ((moved.read + moved.write) / (r.hbm_bytes_s * drawn)) * r.clock_hz);
  }

  function standardTimes(p, gpu) {
    const r = gpu.rates.standard, t = tensors(p), pairs = p.batch * p.heads * p.seq * p.seq_kv;
    const inL2 = t.scores <= C.L2_SHARE * gpu.l2_bytes;
    const rate = inL2 ? r.l2_bytes * r.sms * r.clock_hz : r.hbm_bytes_s, peak = r.matmul_flops * r.sms * r.clock_hz;
    const launches = [[2 * pairs * p.head_dim, 1, t.q + t.k], [0, 2, t.bias], [2 * pairs * p.head_dim_v, 1, t.v + t.o]];
    const matmul = launches.map(([flops]) => flops / peak);
    const memory = launches.map(([, passes, rest]) => (passes * t.scores) / rate + rest / r.hbm_bytes_s);
    const start = 3 * r.launch_s, all = sum(memory);
    const likely = sum(matmul.map((m, i) => Math.max(m / C.LIBRARY_MATMUL, memory[i])));
    const terms = { tensor: sum(matmul), mufu: pairs / (r.mufu * r.sms * r.clock_hz), smem: 0, l2: inL2 ? all : 0, hbm: inL2 ? 0 : all, launch: start };
    return timesOf(start + likely, start + Math.max(sum(matmul), all), start + sum(matmul) / C.LIBRARY_MATMUL + all, terms);
  }

  // ---- planning ----

  function unavailable(p, gpu, algo) {
    if (p.dtype !== "fp32" && !gpu.tensor_flops[p.dtype]) return [`${gpu.name} has no ${p.dtype} tensor cores`, `${gpu.name} 的张量核心不支持 ${p.dtype}`];
    if (algo === "v3" && !gpu.wgmma) return ["wgmma and TMA exist only on sm_90a", "wgmma 与 TMA 只有 sm_90a 才有"];
    if (algo === "v3" && p.dtype === "fp32") return ["wgmma has no fp32", "wgmma 没有 fp32"];
    if (algo === "v3" && (p.head_dim % (p.dtype === "e4m3" ? 16 : 8) || p.head_dim_v % 8)) return ["the page does not plan V3 for rows that it pads", "本页不规划需要补齐行的 V3"];
    if (algo === "v1" && p.dtype === "e4m3") return ["only V2 and V3 compute in e4m3", "只有 V2 与 V3 能用 e4m3 计算"];
    return null;
  }

  function maySplit(p, gpu, anyRows) {
    const few = anyRows || p.group * p.seq <= C.SPLIT_ROWS, plain = p.mask !== "window" && p.bias === "none";
    return few && plain && !p.softcap && !p.varlen && gpu.cp_async && p.dtype !== "e4m3";
  }

  function mayPack(p) {
    const few = p.group > 1 && p.seq <= C.PACKED_QUERIES, takable = p.head_dim % 8 === 0 && p.head_dim_v % 8 === 0;
    const boxes = C.WARPGROUP_ROWS % p.group === 0 && p.group * p.seq <= C.MOST_ROWS;
    return few && takable && boxes && isLazy(p) && p.bias === "none" && !p.varlen;
  }

  // What the model says of one tile, legal or not.
  function evaluate(c) {
    const { p, gpu, variant, t } = c, asked = issued(p, variant, t);
    const moved = dram(p, gpu, variant, t, asked, t.blocks);
    return { ...c, issued: asked, dram: moved, time: times(p, gpu, variant, t, asked, moved) };
  }

  function rank(p, gpu, variant, tiles) {
    const cases = tiles.map((tile) => caseOf(p, gpu, variant, tile));
    const places = cases.map(broken), unbroken = ORDER[variant].length;
    const legal = cases.filter((_, i) => places[i] === unbroken).map(evaluate);
    legal.sort((a, b) => a.time.seconds - b.time.seconds || b.t.blocks - a.t.blocks
      || a.issued.read + a.issued.write - b.issued.read - b.issued.write
      || a.smem - b.smem || a.t.m * a.t.n - b.t.m * b.t.n);
    return { cases, places, unbroken, legal };
  }

  // The sentences of the tile that came furthest.
  function reasons({ cases, places }) {
    const index = places.indexOf(Math.max(...places));
    return sentences(cases[index], places[index]);
  }

  // How far one changed choice is away; null if more than one differs.
  function distance(a, b) {
    const changes = [Math.abs(a.n - b.n), Math.abs(a.m - b.m), 16 * Math.abs(a.stages - b.stages), 16 * Math.abs(a.warps - b.warps) * (a.m === b.m)];
    const differing = changes.filter(Boolean);
    return differing.length === 1 ? differing[0] : null;
  }

  function describe(t, other) {
    const words = [`${t.m}x${t.n}`];
    if (t.warps !== other.warps) words.push(`${t.warps} warps`);
    if (t.stages !== other.stages) words.push(`${t.stages} stage${t.stages > 1 ? "s" : ""}`);
    return words.join(", ");
  }

  // Rejected tiles one choice away from the best, nearest first.
  function neighbours({ cases, places, unbroken }, best) {
    const found = new Map();
    cases.forEach((c, i) => {
      const away = places[i] < unbroken ? distance(c.t, best) : null;
      if (away === null) return;
      const why = sentences(c, places[i]), name = describe(c.t, best);
      found.set([away, name, why[0]].join("|"), { away, name, why, c });
    });
    const order = (a, b) => a.away - b.away || (a.name < b.name ? -1 : a.name > b.name ? 1 : a.why[0] < b.why[0] ? -1 : 1);
    return [...found.values()].sort(order).slice(0, 6);
  }

  // The best of each shape, the first `count`.
  function distinct(legal, count) {
    const shapes = new Set();
    return legal.filter(({ t }) => {
      const shape = `${t.m}x${t.n}`, fresh = !shapes.has(shape);
      shapes.add(shape);
      return fresh;
    }).slice(0, count);
  }

  // The entry of one algorithm, as fasim.planner makes it. `ask`: a whole tile, or {shape, stages} to
  // judge; null chooses. Where nothing is legal, `illegal` says why, in both languages.
  function plan(p, gpu, algo, { ask = null, reserve = 0, top = 5 } = {}) {
    const entry = { problem: p, gpu, algo, variant: algo, available: true };
    const stopped = unavailable(p, gpu, algo);
    if (stopped) return { ...entry, available: false, reason: stopped };
    if (algo === "standard") {
      const asked = issued(p, algo), moved = dram(p, gpu, algo, null, asked, 1);
      Object.assign(entry, { issued: asked, dram: moved, time: standardTimes(p, gpu), t: null, executed: executed(p, algo) });
      return finish(entry, gpu, reserve);
    }
    const whole = ask && ask.m !== undefined;
    const variants = algo === "v2" && maySplit(p, gpu, Boolean(ask)) ? ["v2", "v2_split"] : [algo];
    if (algo === "v3" && mayPack(p)) variants.push("v3_packed");
    if (algo === "v2" && whole && variants.length === 2) variants.splice(ask.step < ask.n ? 0 : 1, 1);
    const rankings = variants.map((variant) => ({
      variant,
      ...rank(p, gpu, variant, whole ? [ask] : ask ? judged(ask.shape, variant, ask.stages) : candidates(p, gpu, variant)),
    }));
    const legal = rankings.filter((one) => one.legal.length);
    if (!legal.length) return { ...entry, illegal: reasons(rankings[0]) };
    const ranking = legal.reduce((a, b) => (b.legal[0].time.seconds < a.legal[0].time.seconds ? b : a));
    const shown = distinct(ranking.legal, top), best = shown[0];
    Object.assign(entry, best, { algo, alternatives: shown.slice(1), executed: executed(p, ranking.variant, best.t) });
    entry.rejected = ask ? [] : neighbours(ranking, best.t);
    entry.splits = ranking.variant === "v2_split" ? best.t.splits : 0;
    return finish(entry, gpu, reserve);
  }

  function finish(entry, gpu, reserve) {
    const p = entry.problem, need = hbm(p, entry.variant, entry.t);
    return { ...entry, useful: useful(p), hbm: need, fits: hbm(p, entry.variant).total <= budget(gpu, reserve), max_seq: maxSeq(p, entry.variant, gpu, reserve) };
  }

  return { C, GPUS, isV3, packs, problemOf, changed, seen, visits, tileVisits, rowsBefore, tileStart, plan, evaluate, step, keepsQ, tilesStay, streams, oInQ, passesBy, v3Layout, transposers, transposes, transposedShape, valueColumns, tensors, hbm, budget, ceilDiv };
}

if (typeof module !== "undefined") module.exports = { makeModel };
