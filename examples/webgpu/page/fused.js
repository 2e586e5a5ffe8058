// The section with the fused operations: each checked on a few rows, then timed on many.

import * as reference from './reference.js';
import { rate, small, time, verdict } from './words.js';

const SEED = Uint32Array.of(20261121, 0, 7, 0); // of dropout: (seed, offset) as two int64

/** Each op's inputs, scalars, outputs (the sizes that are not `rows`), and what its outputs should be. */
function ops({ columns, head_dim: headDim, positions, dropout }) {
  const rows = (count, seed, stretch = 1) => (n) => reference.normal(n * count, seed).map((x) => stretch * x);
  const fixed = (count, seed, stretch = 1, shift = 0) => () =>
    reference.normal(count, seed).map((x) => shift + stretch * x);
  const norm = { weight: fixed(columns, 3, 0.2, 1), bias: fixed(columns, 4, 0.2) };
  const gates = { gate: rows(columns, 1, 2), up: rows(columns, 2) };
  const residual = { x: rows(columns, 1), residual: rows(columns, 2), ...norm };
  const eps = reference.NORM_EPS;
  const layerNorm = (given, round) => reference.layerNorm(reference.sum(given), given.weight, given.bias, round);
  return {
    swiglu: { title: 'SwiGLU', inputs: gates, outputs: { out: reference.swiglu } },
    geglu: { title: 'GeGLU, exact', inputs: gates, outputs: { out: reference.geglu } },
    geglu_tanh: { title: 'GeGLU, tanh', inputs: gates, outputs: { out: reference.gegluTanh } },
    residual_layer_norm_pre: {
      title: 'residual + LayerNorm, pre', inputs: residual, scalars: () => ({ eps }),
      outputs: { y: layerNorm, sum: reference.sum },
    },
    residual_layer_norm_post: {
      title: 'residual + LayerNorm, post', inputs: residual, scalars: () => ({ eps }), outputs: { y: layerNorm },
    },
    rms_norm_rope: {
      title: 'RMSNorm + RoPE', scalars: () => ({ eps }),
      inputs: {
        x: rows(columns, 1),
        weight: fixed(columns, 3, 0.2, 1),
        cos: () => reference.rotary(positions, headDim).cos,
        sin: () => reference.rotary(positions, headDim).sin,
        positions: (n) => Uint32Array.from({ length: n }, (_, i) => (i * 37) % positions),
      },
      outputs: { y: (given, round) => reference.rmsNormRope(given, headDim, round) },
    },
    softmax: {
      title: 'softmax, causal', inputs: { x: rows(columns, 1, 3) },
      scalars: (n) => ({ queries: Math.min(n, columns), scale: 0.5 }),
      outputs: { y: (given, round) => reference.softmax(given, columns, 0.5, true, round) },
    },
    softmax_dropout: {
      title: 'softmax + dropout', inputs: { x: rows(columns, 1, 3), seed: () => SEED },
      scalars: (n) => ({ queries: n, scale: 1 }),
      outputs: {
        y: (given, round) => {
          const factors = reference.dropoutFactors(given.x.length, dropout, SEED);
          return reference.softmax(given, columns, 1, false, round).map((p, i) => round(p * factors[i]));
        },
      },
    },
    layer_norm_linear: {
      title: 'LayerNorm + linear', scalars: () => ({ eps }),
      inputs: {
        x: rows(columns, 1),
        norm_weight: norm.weight,
        norm_bias: norm.bias,
        weight: fixed(columns * columns, 5, columns ** -0.5),
        bias: fixed(columns, 6),
      },
      outputs: { y: reference.layerNormLinear },
      operations: (n) => 2 * n * columns * columns,
    },
  };
}

export async function start(gpu, made) {
  const [few, ...many] = made.rows;
  const rows = gpu.software ? many[0] : many.at(-1);
  const body = document.querySelector('#fused-rows');
  document.querySelector('#fused-note').textContent =
    `float32, rows of ${made.columns}; errors of ${few} rows, times of ${rows.toLocaleString('en')}.`;
  const found = {};
  for (const [name, op] of Object.entries(ops(made))) {
    found[name] = await compute(gpu, made.ops[name], made.columns, op, few, rows);
    const { error, budget, ok, seconds, bytes, operations } = found[name];
    const speed = operations ? rate(operations / seconds, 'FLOP/s') : rate(bytes / seconds, 'B/s');
    body.insertAdjacentHTML('beforeend', `<tr><td>${op.title}</td><td>${verdict(ok)}</td><td>${small(error)}</td>`
      + `<td>${small(budget)}</td><td>${time(seconds)}</td><td>${speed}</td></tr>`);
  }
  return found;
}

async function compute(gpu, described, columns, op, few, many) {
  const kernel = await gpu.kernel(described);
  const launch = (rows) => {
    const inputs = Object.fromEntries(Object.entries(op.inputs).map(([name, make]) => [name, make(rows)]));
    const buffers = Object.fromEntries(Object.entries(inputs).map(([name, array]) => [name, gpu.buffer(array)]));
    for (const name of Object.keys(op.outputs)) buffers[name] = gpu.buffer(rows * columns * 4);
    const scalars = { rows, ...op.scalars?.(rows) };
    return { inputs, buffers, scalars, pair: [kernel.launch(buffers, scalars), described.grids[rows]] };
  };
  const small = launch(few);
  gpu.run([small.pair]);
  const found = { inputs: small.inputs, scalars: small.scalars, outputs: {}, ok: true, error: 0, budget: 0 };
  for (const [name, wanted] of Object.entries(op.outputs)) {
    found.outputs[name] = await gpu.read(small.buffers[name], few * columns);
    const { error, budget, ok } = reference.check(found.outputs[name], (round) => wanted(small.inputs, round));
    found.ok &&= ok;
    if (!(error / budget <= found.error / found.budget)) Object.assign(found, { error, budget });
  }
  const large = launch(many);
  found.seconds = await gpu.seconds([large.pair]);
  found.bytes = Object.values(large.inputs).reduce((sum, a) => sum + a.byteLength, 0)
    + Object.keys(op.outputs).length * many * columns * 4;
  found.operations = op.operations?.(many);
  for (const { buffers } of [small, large]) Object.values(buffers).forEach((buffer) => buffer.destroy());
  return found;
}
