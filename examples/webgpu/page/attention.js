// The section with flash attention: four heads that look in different ways, drawn and checked.

import { draw } from './heatmap.js';
import * as reference from './reference.js';
import { rate, small, time, verdict } from './words.js';

const HEADS = ['nearby', 'eight tokens back', 'every 32nd token', 'the same topic'];
const CHECKED = 64; // queries of each head that are checked

export async function start(gpu, made) {
  const form = document.querySelector('#attention form');
  const canvases = HEADS.map((title) => {
    const figure = document.createElement('figure');
    const canvas = document.createElement('canvas');
    const caption = document.createElement('figcaption');
    canvas.setAttribute('role', 'img');
    canvas.setAttribute('aria-label', `attention weights of the head that looks at ${title}`);
    caption.textContent = title;
    figure.append(canvas, caption);
    document.querySelector('#maps').append(figure);
    return canvas;
  });
  const show = async () => {
    form.inert = true;
    const found = await compute(gpu, made, Number(form.tokens.value), form.causal.checked);
    canvases.forEach((canvas, h) => draw(canvas, found.weights, found.tokens, found.tokens, h * found.tokens ** 2));
    document.querySelector('#attention-result').innerHTML =
      `${verdict(found.ok)} ${found.tokens} tokens, ${HEADS.length} heads of ${made.head_dim}: error ${small(found.error)}, `
      + `budget ${small(found.budget)}; ${time(found.seconds)}, ${rate(found.operations / found.seconds, 'FLOP/s')}`;
    form.inert = false;
    return found;
  };
  form.addEventListener('change', () => show().catch(report));
  return show();
}

function report(error) {
  document.querySelector('#attention-result').textContent = error.message;
}

async function compute(gpu, made, tokens, causal) {
  const { heads, head_dim: dim, block_size_q: block } = made;
  const scale = dim ** -0.5;
  const { q, k } = looks(tokens, dim);
  const v = reference.normal(heads * tokens * dim, 3);
  const buffers = {
    q: gpu.buffer(q), k: gpu.buffer(k), v: gpu.buffer(v), out: gpu.buffer(q.byteLength),
    lse: gpu.buffer(heads * tokens * 4), weights: gpu.buffer(heads * tokens * tokens * 4),
  };
  const flash = await gpu.kernel(causal ? made.causal : made.full);
  const launch = flash.launch(buffers, { n_q: tokens, n_kv: tokens, heads, kv_heads: heads, scale });
  const grid = [Math.ceil(tokens / block), heads, 1];
  const weights = (await gpu.kernel(made.weights)).launch(
    { ...buffers, keys: buffers.k }, { tokens, stride: tokens, causal: Number(causal), scale });
  gpu.run([[launch, grid], [weights, [Math.ceil(tokens / made.weights.threads), tokens, heads]]]);
  const out = await gpu.read(buffers.out, heads * tokens * dim);
  const rows = Array.from({ length: Math.min(CHECKED, tokens) }, (_, i, all = Math.min(CHECKED, tokens)) =>
    Math.floor((i + 1) * tokens / all) - 1);
  const picked = Float32Array.from({ length: heads * rows.length * dim }, (_, i) => {
    const [h, r, d] = [Math.floor(i / (rows.length * dim)), Math.floor(i / dim) % rows.length, i % dim];
    return out[(h * tokens + rows[r]) * dim + d];
  });
  const found = {
    tokens, causal, scale, q, k, v, out,
    lse: await gpu.read(buffers.lse, heads * tokens),
    weights: await gpu.read(buffers.weights, heads * tokens * tokens),
    operations: 4 * heads * dim * tokens * (causal ? (tokens + 1) / 2 : tokens),
    seconds: await gpu.seconds([[launch, grid]]),
    ...reference.check(picked, (round) =>
      reference.attention({ q, k, v, heads, tokens, dim, causal, scale, rows }, round)),
  };
  Object.values(buffers).forEach((buffer) => buffer.destroy());
  return found;
}

/** Queries and keys [4, tokens, dim] of heads that look as HEADS says. */
function looks(tokens, dim) {
  const half = dim / 2, size = tokens * dim;
  const q = reference.normal(4 * size, 1).map((x) => 0.3 * x);
  const k = reference.normal(4 * size, 2).map((x) => 0.3 * x);
  const topics = reference.normal(5 * dim, 4);
  for (let i = 0; i < tokens; i++) {
    for (let f = 0; f < half; f++) {
      const near = 0.5 * 100 ** (-f / half), every = 2 * Math.PI / 32 * (1 + f % 4);
      [[near, 0], [near, 8], [every, 0]].forEach(([speed, back], h) => {
        const at = h * size + i * dim + 2 * f;
        q[at] += 1.3 * Math.cos(speed * (i - back));
        q[at + 1] += 1.3 * Math.sin(speed * (i - back));
        k[at] += 1.3 * Math.cos(speed * i);
        k[at + 1] += 1.3 * Math.sin(speed * i);
      });
    }
    const topic = Math.floor(7 * i / tokens) * 3 % 5;
    for (let d = 0; d < dim; d++) {
      q[3 * size + i * dim + d] += 0.8 * topics[topic * dim + d];
      k[3 * size + i * dim + d] += 0.8 * topics[topic * dim + d];
    }
  }
  return { q, k };
}
