// The same mathematics in plain JavaScript. `round` is applied to every result: the identity for double precision,
// Math.fround for single precision, whose distance from double is what an error may be measured by.

const EPS = 2 ** -23;
export const NORM_EPS = 1e-5;

/** Twice what single precision costs this reference, and one rounding of the largest value. */
export function check(got, reference) {
  const exact = reference((x) => x);
  const single = reference(Math.fround);
  let error = 0, own = 0, largest = 0;
  for (let i = 0; i < exact.length; i++) {
    const off = Math.abs(got[i] - exact[i]);
    error = off <= error ? error : off; // NaN is never less or equal, and stays
    own = Math.max(own, Math.abs(single[i] - exact[i]));
    largest = Math.max(largest, Math.abs(exact[i]));
  }
  const budget = 2 * (own + EPS * largest);
  return { error, budget, ok: got.length === exact.length && error <= budget };
}

/** Normal numbers that are the same at every visit. */
export function normal(count, seed) {
  let state = seed >>> 0;
  const uniform = () => { // mulberry32
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
  return Float32Array.from({ length: count }, () =>
    Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform()));
}

/** cos and sin of position · base^(-2i / dim), each [positions, dim / 2]. */
export function rotary(positions, dim, base = 10000) {
  const half = dim / 2;
  const angle = (i) => Math.floor(i / half) * base ** (-2 * (i % half) / dim);
  const length = positions * half;
  return {
    cos: Float32Array.from({ length }, (_, i) => Math.cos(angle(i))),
    sin: Float32Array.from({ length }, (_, i) => Math.sin(angle(i))),
  };
}

/** softmax(q · kᵀ · scale) · v for the queries `rows` of every head; q, k, v: [heads, tokens, dim]. */
export function attention({ q, k, v, heads, tokens, dim, causal, scale, rows }, round) {
  const out = [];
  const weights = new Float64Array(tokens);
  for (let h = 0; h < heads; h++) {
    for (const i of rows) {
      const seen = causal ? i + 1 : tokens;
      let top = -Infinity, total = 0;
      for (let j = 0; j < seen; j++) {
        let score = 0;
        for (let d = 0; d < dim; d++) {
          score = round(score + round(q[(h * tokens + i) * dim + d] * k[(h * tokens + j) * dim + d]));
        }
        weights[j] = round(score * scale);
        top = Math.max(top, weights[j]);
      }
      for (let j = 0; j < seen; j++) {
        weights[j] = round(Math.exp(round(weights[j] - top)));
        total = round(total + weights[j]);
      }
      for (let d = 0; d < dim; d++) {
        let sum = 0;
        for (let j = 0; j < seen; j++) sum = round(sum + round(weights[j] * v[(h * tokens + j) * dim + d]));
        out.push(round(sum / total));
      }
    }
  }
  return out;
}

export function swiglu({ gate, up }, round) {
  return Float64Array.from(gate, (g, i) => round(round(g / round(1 + round(Math.exp(-g)))) * up[i]));
}

export function geglu({ gate, up }, round) {
  return Float64Array.from(gate, (g, i) => round(round(g * round(0.5 + round(0.5 * erf(g / Math.SQRT2)))) * up[i]));
}

export function gegluTanh({ gate, up }, round) {
  const slope = Math.sqrt(2 / Math.PI);
  return Float64Array.from(gate, (g, i) => {
    const inner = round(slope * round(g + round(0.044715 * round(g * round(g * g)))));
    return round(round(round(0.5 * g) * round(1 + round(Math.tanh(inner)))) * up[i]);
  });
}

function erf(x) {
  const z = Math.abs(x);
  if (z > 6) return Math.sign(x);
  let term = z, sum = z; // a series without cancellation: 2/√π · exp(-z²) · Σ 2ⁿ z^(2n+1) / (2n+1)!!
  for (let n = 1; term > 1e-18 * sum; n++) {
    term *= 2 * z * z / (2 * n + 1);
    sum += term;
  }
  return Math.sign(x) * 2 / Math.sqrt(Math.PI) * Math.exp(-z * z) * sum;
}

/** Layer norm, row by row. */
export function layerNorm(x, weight, bias, round) {
  const columns = weight.length;
  const y = new Float64Array(x.length);
  for (let start = 0; start < x.length; start += columns) {
    let total = 0, squares = 0;
    for (let c = 0; c < columns; c++) total = round(total + x[start + c]);
    const mean = round(total / columns);
    for (let c = 0; c < columns; c++) squares = round(squares + round(round(x[start + c] - mean) ** 2));
    const rstd = round(1 / round(Math.sqrt(round(round(squares / columns) + NORM_EPS))));
    for (let c = 0; c < columns; c++) {
      y[start + c] = round(round(round(round(x[start + c] - mean) * rstd) * weight[c]) + bias[c]);
    }
  }
  return y;
}

/** The sum of two float32 arrays, rounded to float32 as the kernel does before it normalises. */
export function sum({ x, residual }) {
  return Float32Array.from(x, (a, i) => a + residual[i]);
}

export function layerNormLinear({ x, norm_weight, norm_bias, weight, bias }, round) {
  const columns = norm_weight.length, outputs = bias.length, rows = x.length / columns;
  const normed = layerNorm(x, norm_weight, norm_bias, round);
  const y = new Float64Array(rows * outputs);
  for (let r = 0; r < rows; r++) {
    for (let o = 0; o < outputs; o++) {
      let total = 0;
      for (let c = 0; c < columns; c++) total = round(total + round(normed[r * columns + c] * weight[o * columns + c]));
      y[r * outputs + o] = round(total + bias[o]);
    }
  }
  return y;
}

/** RMS norm of each row of x, then rotation of the pairs half a head apart. */
export function rmsNormRope({ x, weight, cos, sin, positions }, headDim, round) {
  const columns = weight.length, half = headDim / 2;
  const y = new Float64Array(x.length);
  for (let row = 0; row < positions.length; row++) {
    const start = row * columns;
    let total = 0;
    for (let c = 0; c < columns; c++) total = round(total + round(x[start + c] ** 2));
    const rstd = round(1 / round(Math.sqrt(round(round(total / columns) + NORM_EPS))));
    for (let head = 0; head < columns; head += headDim) {
      for (let d = 0; d < half; d++) {
        const at = head + d, other = head + d + half;
        const a = round(round(x[start + at] * rstd) * weight[at]);
        const b = round(round(x[start + other] * rstd) * weight[other]);
        const c = cos[positions[row] * half + d], s = sin[positions[row] * half + d];
        y[start + at] = round(round(a * c) - round(b * s));
        y[start + other] = round(round(b * c) + round(a * s));
      }
    }
  }
  return y;
}

/** softmax(x · scale), row by row; where causal, row t of the square matrices sees columns up to t. */
export function softmax({ x }, columns, scale, causal, round) {
  const y = new Float64Array(x.length);
  for (let start = 0; start < x.length; start += columns) {
    const rows = Math.min(columns, x.length / columns); // of one matrix
    const seen = causal ? start / columns % rows + 1 + columns - rows : columns;
    let top = -Infinity, total = 0;
    for (let c = 0; c < seen; c++) top = Math.max(top, round(x[start + c] * scale));
    for (let c = 0; c < seen; c++) {
      y[start + c] = round(Math.exp(round(round(x[start + c] * scale) - top)));
      total = round(total + y[start + c]);
    }
    for (let c = 0; c < seen; c++) y[start + c] = round(y[start + c] / total);
  }
  return y;
}

/** The factor that dropout has for each of `count` elements: 0 or 1 / (1 - p), p rounded to a multiple of 2^-16, by as
 *  many bits of Philox4x32-10 of (seed, offset), four u32. */
export function dropoutFactors(count, p, seed) {
  const least = Math.round(p * 2 ** 16), scale = 2 ** 16 / (2 ** 16 - least);
  const factors = new Float64Array(count);
  for (let i = 0; i < count; i += 8) {
    philox(i / 8, seed).forEach((word, at) => {
      factors[i + 2 * at] = (word & 0xffff) >= least ? scale : 0;
      factors[i + 2 * at + 1] = word >>> 16 >= least ? scale : 0;
    });
  }
  return factors;
}

function philox(index, seed) {
  let [c0, c1, c2, c3] = [index, 0, seed[2], seed[3]];
  let [k0, k1] = [seed[0], seed[1]];
  for (let step = 0; step < 10; step++) {
    const [high0, low0] = product(c0, 0xd2511f53);
    const [high1, low1] = product(c2, 0xcd9e8d57);
    [c0, c1, c2, c3] = [(high1 ^ c1 ^ k0) >>> 0, low1, (high0 ^ c3 ^ k1) >>> 0, low0];
    k0 = (k0 + 0x9e3779b9) >>> 0;
    k1 = (k1 + 0xbb67ae85) >>> 0;
  }
  return [c0, c1, c2, c3];
}

/** The 64-bit product of two u32, as its high and low half. */
function product(a, b) {
  const whole = BigInt(a) * BigInt(b);
  return [Number(whole >> 32n), Number(whole & 0xffffffffn)];
}
