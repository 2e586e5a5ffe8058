// The section with the decoder: checked against PyTorch's numbers, then writing, then showing where it looked.

import { Decoder } from './decoder.js';
import { draw } from './heatmap.js';
import { BytePairs } from './tokens.js';
import { small, time, verdict } from './words.js';

const FOLDER = 'model';
const LIKELIEST = 40; // tokens that a draw chooses from
const section = document.querySelector('#decoder');
const at = (id) => section.querySelector(`#${id}`);

export async function start(gpu, made) {
  if (!made) {
    at('model').textContent = 'This page was built without a model. README.md says how to train one in a minute and add it.';
    return null;
  }
  const decoder = await Decoder.open(gpu, made, FOLDER);
  const pairs = new BytePairs((await (await fetch(`${FOLDER}/byte_pairs.json`)).json()).merges);
  const { num_hidden_layers: layers, hidden_size: hidden, num_attention_heads: heads } = decoder.config;
  at('model').textContent = `A Llama of ${layers} layers and ${hidden} features with a vocabulary of `
    + `${pairs.bytes.length.toLocaleString('en')} byte pairs, a cache of ${decoder.slots} tokens; float32.`;
  const checked = made.reference ? await compare(decoder, pairs) : null;
  const page = new Writing(decoder, pairs, checked);
  page.offer(layers, heads);
  const written = await page.write();
  return { ...checked, ...written };
}

/** What PyTorch computed from the same weights, beside what this page computes. */
async function compare(decoder, pairs) {
  const { prompt, logits, budget, continuation } = await (await fetch(`${FOLDER}/reference.json`)).json();
  decoder.reset();
  const ours = [await decoder.forward(prompt)];
  const tokens = [];
  while (tokens.length < continuation.length) {
    tokens.push(likeliest(ours.at(-1)));
    ours.push(await decoder.forward(tokens.slice(-1)));
  }
  const error = distance(ours[0], logits);
  const same = tokens.every((token, i) => token === continuation[i]);
  return { prompt: pairs.decode(prompt), error, budget, tokens, same, logits: ours[0], ok: same && error <= budget };
}

function distance(a, b) {
  return a.reduce((most, x, i) => (Math.abs(x - b[i]) <= most ? most : Math.abs(x - b[i])), 0);
}

function likeliest(logits) {
  return logits.reduce((best, x, i) => (x > logits[best] ? i : best), 0);
}

function drawn(logits, temperature) {
  if (temperature === 0) return likeliest(logits);
  const order = Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a]).slice(0, LIKELIEST);
  const weights = order.map((i) => Math.exp((logits[i] - logits[order[0]]) / temperature));
  let left = Math.random() * weights.reduce((a, b) => a + b);
  return order[weights.findIndex((w) => (left -= w) < 0)] ?? order[0];
}

class Writing {
  constructor(decoder, pairs, checked) {
    Object.assign(this, { decoder, pairs, checked, form: at('writing'), given: 0, tokens: [], spans: [] });
    this.form.prompt.value = checked?.prompt ?? 'The following example shows how';
  }

  /** Show the controls and answer to them. */
  offer(layers, heads) {
    const { form } = this;
    const told = () => {
      const value = Number(form.temperature.value);
      form.querySelector('output').textContent = value === 0 ? 'likeliest' : value.toFixed(1);
    };
    told();
    form.temperature.addEventListener('input', told);
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      this.#busy(() => this.write());
    });
    for (const [name, count] of [['layer', layers], ['head', heads]]) {
      const select = at('looks').querySelector(`[name=${name}]`);
      select.replaceChildren(...Array.from({ length: count }, (_, i) => new Option(i + 1, i)));
      select.value = name === 'layer' ? count - 1 : 0;
      select.addEventListener('change', () => this.#busy(() => this.look()));
    }
    at('look').addEventListener('pointermove', (event) => this.#pointed(event));
    at('look').addEventListener('pointerdown', (event) => this.#pointed(event));
    form.hidden = at('text').hidden = at('looks').hidden = false;
  }

  /** Continue the prompt, a token at a time. */
  async write() {
    const { decoder, form, pairs } = this;
    const prompt = pairs.encode(form.prompt.value || ' ').slice(0, decoder.slots - 2);
    const count = Math.min(Number(form.tokens.value) || 1, decoder.slots - prompt.length);
    const temperature = Number(form.temperature.value);
    this.tokens = [...prompt];
    this.given = prompt.length;
    at('text').replaceChildren();
    this.#spans();
    decoder.reset();
    const began = performance.now();
    let logits = await decoder.forward(prompt);
    const prefill = (performance.now() - began) / 1000;
    const seen = [logits];
    for (let i = 0; i < count; i++) {
      this.tokens.push(drawn(logits, temperature));
      this.#spans();
      if (i + 1 < count) {
        logits = await decoder.forward(this.tokens.slice(-1));
        seen.push(logits);
      }
    }
    const seconds = (performance.now() - began) / 1000 - prefill;
    const { vocab_size: vocab } = decoder.config;
    const whole = await decoder.whole(this.tokens.slice(0, -1));
    const apart = Math.max(...seen.map((row, i) => {
      const start = (prompt.length - 1 + i) * vocab;
      return distance(row, whole.subarray(start, start + vocab));
    }));
    const found = { text: pairs.decode(this.tokens), apart, speed: (count - 1) / seconds };
    this.#tell(found, prompt.length, prefill);
    await this.look();
    return found;
  }

  /** Draw where every token looked, in the chosen layer and head. */
  async look() {
    const [layer, head] = ['layer', 'head'].map((name) => Number(at('looks').querySelector(`[name=${name}]`).value));
    const n = this.tokens.length;
    const all = await this.decoder.look(this.tokens, layer);
    this.weights = all.subarray(head * n * n, (head + 1) * n * n);
    draw(at('look'), this.weights, n, n);
    this.#choose(n - 1);
  }

  #tell({ apart, speed }, given, prefill) {
    const lines = [];
    const { checked } = this;
    if (checked) {
      lines.push(`${verdict(checked.ok)} beside PyTorch, from the same weights: logits differ by ${small(checked.error)}, `
        + `budget ${small(checked.budget)}; ${checked.same ? 'the same' : 'not the same'} ${checked.tokens.length} likeliest tokens`);
    }
    lines.push(`${given} tokens read in ${time(prefill)}, then ${speed.toFixed(0)} tokens/s; with and without the cache, `
      + `logits differ by ${small(apart)}`);
    at('decoder-result').innerHTML = lines.join('<br>');
  }

  /** Show the tokens that are not shown yet. A token may be a part of a letter: then it shows with the next. */
  #spans() {
    if (at('text').childElementCount === 0) this.spans = [];
    for (let i = this.spans.length; i < this.tokens.length; i++) {
      const span = document.createElement('span');
      span.textContent = this.pairs.decode([this.tokens[i]]);
      if (i < this.given) span.className = 'given';
      span.addEventListener('pointerenter', () => this.#choose(i));
      span.addEventListener('click', () => this.#choose(i));
      this.spans.push(span);
      at('text').append(span);
    }
  }

  #pointed(event) {
    const box = at('look').getBoundingClientRect();
    this.#choose(Math.floor((event.clientY - box.top) / box.height * this.tokens.length));
  }

  /** Shade the tokens that token `i` looked at. */
  #choose(i) {
    const n = this.tokens.length;
    if (this.weights?.length !== n * n || i < 0 || i >= n) return;
    const row = this.weights.subarray(i * n, (i + 1) * n);
    const top = Math.max(...row);
    this.spans.forEach((span, j) => {
      span.style.background = j <= i ? `rgba(var(--glow), ${(0.85 * row[j] / top).toFixed(3)})` : '';
      span.classList.toggle('chosen', j === i);
    });
    const best = row.indexOf(top);
    at('look-at').textContent = `“${this.#word(i)}” looked at “${this.#word(best)}” most, with ${(100 * top).toFixed(0)} % `
      + 'of its weight.';
  }

  #word(i) {
    return this.pairs.decode([this.tokens[i]]).trim() || '␣';
  }

  async #busy(work) {
    const controls = [this.form, at('looks')];
    controls.forEach((control) => { control.inert = true; });
    try {
      await work();
    } catch (problem) {
      at('decoder-result').textContent = problem.message;
    }
    controls.forEach((control) => { control.inert = false; });
  }
}
