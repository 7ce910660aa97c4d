// Online softmax of one row, block by block, as the three versions do it, and the exact one.
"use strict";

// blocks: tiles of scores in the order in which they arrive; values: a number of V for each score.
function onlineSoftmax(blocks, values, version) {
  let m = -Infinity, l = 0, o = 0;
  const starts = blocks.map((_, i) => blocks.slice(0, i).reduce((n, b) => n + b.length, 0));
  return blocks.map((scores, i) => {
    const own = values.slice(starts[i], starts[i] + scores.length);
    const next = Math.max(m, ...scores), base = next === -Infinity ? 0 : next;
    const alpha = Math.exp(m - base), p = scores.map((s) => Math.exp(s - base));
    const sum = p.reduce((a, b) => a + b, 0), added = p.reduce((a, w, j) => a + w * own[j], 0);
    const before = l;
    l = alpha * l + sum;
    // V1 keeps O normalised, V2 and V3 divide once, at the end.
    o = version === "v1" ? (alpha * before * o + added) / (l || 1) : alpha * o + added;
    const step = { block: i, scores, p, alpha: m === -Infinity ? null : alpha, m: next, l, o };
    m = next;
    return step;
  });
}

function resultOf(steps, version) {
  const last = steps[steps.length - 1];
  return version === "v1" ? last.o : last.o / (last.l || 1);
}

function exactSoftmax(blocks, values) {
  const scores = blocks.flat(), top = Math.max(...scores), p = scores.map((s) => Math.exp(s - top));
  const sum = p.reduce((a, b) => a + b, 0);
  return { weights: p.map((w) => w / sum), o: p.reduce((a, w, j) => a + w * values[j], 0) / sum };
}

if (typeof module !== "undefined") module.exports = { onlineSoftmax, resultOf, exactSoftmax };
