// A Llama decoder with a key/value cache: the weights of a folder that `tilesmith demo --export` wrote, one sequence.

import { rotary } from './reference.js';

export class Decoder {
  static async open(gpu, made, folder) {
    const decoder = new Decoder();
    const json = async (name) => (await fetch(`${folder}/${name}`)).json();
    decoder.gpu = gpu;
    decoder.made = made;
    decoder.config = await json('config.json');
    decoder.past = 0;
    const file = await (await fetch(`${folder}/model.safetensors`)).arrayBuffer();
    decoder.kernels = Object.fromEntries(await Promise.all(
      Object.entries(made.kernels).map(async ([name, described]) => [name, await gpu.kernel(described)])));
    decoder.#prepare(safetensors(file));
    return decoder;
  }

  get slots() {
    return this.made.slots;
  }

  /** Forget all tokens. */
  reset() {
    this.past = 0;
  }

  /** Append tokens to the sequence; the logits of what follows them. */
  async forward(tokens) {
    this.#layers(tokens);
    this.past += tokens.length;
    const bytes = this.config.hidden_size * 4;
    this.gpu.submit((encoder) => encoder.copyBufferToBuffer(
      this.buffers.normed, (tokens.length - 1) * bytes, this.buffers.last, 0, bytes));
    this.gpu.run([this.#product(this.lastLogits, 1)]);
    return this.gpu.read(this.buffers.lastLogits, this.config.vocab_size);
  }

  /** The logits [N, vocabulary] of a whole sequence, computed without what is cached. */
  async whole(tokens) {
    this.reset();
    this.#layers(tokens);
    this.past = tokens.length;
    this.gpu.run([this.#product(this.logits, tokens.length)]);
    return this.gpu.read(this.buffers.logits, tokens.length * this.config.vocab_size);
  }

  /** The attention weights [heads, N, N] of one layer over a whole sequence. */
  async look(tokens, layer) {
    const { num_attention_heads: heads } = this.config;
    this.reset();
    this.#layers(tokens, layer);
    this.past = tokens.length;
    return this.gpu.read(this.buffers.weights, heads * tokens.length ** 2);
  }

  #layers(tokens, watched = -1) {
    if (this.past + tokens.length > this.slots) throw new RangeError(`the cache holds ${this.slots} tokens`);
    const rows = tokens.length, heads = this.config.num_attention_heads;
    const seen = { tokens: rows, past: this.past };
    const work = [];
    const run = (launch, grid, scalars) => work.push([scalars ? launch.set(scalars) : launch, grid]);
    this.gpu.device.queue.writeBuffer(this.buffers.tokens, 0, Uint32Array.from(tokens));
    run(this.embedding, [rows, 1, 1]);
    this.blocks.forEach((block, layer) => {
      run(block.attentionNorm, [rows, 1, 1]);
      work.push(this.#product(block.qkv, rows));
      run(block.rope, [rows, 1, 1], seen);
      run(block.attention, [rows, heads, 1], seen);
      if (layer === watched) {
        run(block.weights, [Math.ceil(rows / this.made.threads), rows, heads], { tokens: rows });
      }
      work.push(this.#product(block.out, rows));
      run(block.mlpNorm, [rows, 1, 1]);
      work.push(this.#product(block.gate, rows), this.#product(block.up, rows));
      run(block.swiglu, this.made.swiglu_grids[rows], { rows });
      work.push(this.#product(block.down, rows));
    });
    run(this.norm, [rows, 1, 1]);
    this.gpu.run(work);
  }

  /** The launch and grid of x · weightᵀ, by the kernel that suits the number of rows. */
  #product({ few, many, outputs }, rows) {
    if (rows === 1) return [few, [Math.ceil(outputs / this.made.row_outputs), 1, 1]];
    return [many.set({ rows }), [Math.ceil(outputs / this.made.outputs), Math.ceil(rows / this.made.rows), 1]];
  }

  /** Put the weights on the GPU, and bind every launch once. */
  #prepare(weights) {
    const { config, gpu, kernels, slots } = this;
    const { hidden_size: hidden, intermediate_size: inter, vocab_size: vocab, head_dim: dim } = config;
    const { num_attention_heads: heads, num_key_value_heads: groups, rms_norm_eps: eps } = config;
    const held = (...names) => gpu.buffer(joined(names.map((name) => weights(name))));
    const floats = (count) => gpu.buffer(4 * count);
    const angles = rotary(slots, dim, config.rope_theta);
    const width = (heads + 2 * groups) * dim;
    const b = this.buffers = {
      tokens: floats(slots), x: floats(slots * hidden), normed: floats(slots * hidden), qkv: floats(slots * width),
      q: floats(slots * heads * dim), mixed: floats(slots * heads * dim), lse: floats(slots * heads),
      gate: floats(slots * inter), up: floats(slots * inter), gated: floats(slots * inter),
      last: floats(hidden), lastLogits: floats(vocab), logits: floats(slots * vocab),
      weights: floats(heads * slots * slots), cos: gpu.buffer(angles.cos), sin: gpu.buffer(angles.sin),
    };
    const product = (x, inputs, weight, y, outputs, added = '') => {
      const bound = { x, weight, y }, sizes = { rows: 1, vectors: inputs / 4, outputs };
      return {
        outputs,
        few: kernels[`linear_row${added}`].launch(bound, sizes),
        many: kernels[`linear${added}`].launch(bound, sizes),
      };
    };
    const table = held('model.embed_tokens.weight');
    this.embedding = kernels.embedding.launch({ tokens: b.tokens, table, x: b.x });
    this.blocks = Array.from({ length: config.num_hidden_layers }, (_, layer) => {
      const of = (name) => `model.layers.${layer}.${name}.weight`;
      const [keys, values] = [floats(groups * slots * dim), floats(groups * slots * dim)];
      const seen = { tokens: 1, past: 0 };
      return {
        attentionNorm: kernels.rms_norm.launch({ x: b.x, weight: held(of('input_layernorm')), y: b.normed }, { eps }),
        qkv: product(b.normed, hidden, held(...['q', 'k', 'v'].map((n) => of(`self_attn.${n}_proj`))), b.qkv, width),
        rope: kernels.rope_append.launch({ ...b, keys, values }, seen),
        attention: kernels.attention.launch({ q: b.q, keys, values, out: b.mixed, lse: b.lse }, seen),
        weights: kernels.weights.launch(
          { q: b.q, keys, lse: b.lse, weights: b.weights }, { tokens: 1, stride: slots, causal: 1, scale: dim ** -0.5 }),
        out: product(b.mixed, heads * dim, held(of('self_attn.o_proj')), b.x, hidden, '_added'),
        mlpNorm: kernels.rms_norm.launch({ x: b.x, weight: held(of('post_attention_layernorm')), y: b.normed }, { eps }),
        gate: product(b.normed, hidden, held(of('mlp.gate_proj')), b.gate, inter),
        up: product(b.normed, hidden, held(of('mlp.up_proj')), b.up, inter),
        swiglu: kernels.swiglu.launch({ gate: b.gate, up: b.up, out: b.gated }, { rows: 1 }),
        down: product(b.gated, inter, held(of('mlp.down_proj')), b.x, hidden, '_added'),
      };
    });
    this.norm = kernels.rms_norm.launch({ x: b.x, weight: held('model.norm.weight'), y: b.normed }, { eps });
    const output = config.tie_word_embeddings ? table : held('lm_head.weight');
    this.logits = product(b.normed, hidden, output, b.logits, vocab);
    this.lastLogits = product(b.last, hidden, output, b.lastLogits, vocab);
  }
}

/** A function from a tensor's name to its numbers, in float32. Throws where the file lacks it. */
export function safetensors(file) {
  const length = Number(new DataView(file).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(file, 8, length)));
  return (name) => {
    if (!header[name]) throw new Error(`model.safetensors has no ${name}`);
    const { dtype, data_offsets: [start, end] } = header[name];
    const bytes = file.slice(8 + length + start, 8 + length + end);
    if (dtype === 'F32') return new Float32Array(bytes);
    if (dtype === 'BF16') return new Float32Array(Uint32Array.from(new Uint16Array(bytes), (x) => x << 16).buffer);
    throw new Error(`${name} is ${dtype}; this page reads F32 and BF16`);
  };
}

function joined(arrays) {
  const whole = new Float32Array(arrays.reduce((sum, a) => sum + a.length, 0));
  let at = 0;
  for (const array of arrays) {
    whole.set(array, at);
    at += array.length;
  }
  return whole;
}
