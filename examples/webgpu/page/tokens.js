// Byte-pair encoding, as tilesmith.cli.text.BytePairs does it: token 256 + i is the pair merges[i].

const WORDS = / ?[\p{L}\p{N}_]+| ?[^\p{L}\p{N}_\s]+|\s+/gu;

export class BytePairs {
  constructor(merges) {
    this.bytes = Array.from({ length: 256 }, (_, i) => [i]);
    this.merged = new Map();
    merges.forEach(([left, right], i) => {
      this.bytes.push([...this.bytes[left], ...this.bytes[right]]);
      this.merged.set(`${left} ${right}`, 256 + i);
    });
  }

  encode(text) {
    return (text.match(WORDS) ?? []).flatMap((word) => this.#encodeWord([...new TextEncoder().encode(word)]));
  }

  decode(tokens) {
    return new TextDecoder('utf-8', { ignoreBOM: true }).decode(Uint8Array.from(tokens.flatMap((token) => this.bytes[token])));
  }

  #encodeWord(tokens) {
    for (;;) {
      const pairs = tokens.slice(1).map((right, i) => this.merged.get(`${tokens[i]} ${right}`) ?? Infinity);
      const first = Math.min(...pairs);
      if (first === Infinity) return tokens;
      for (let i = 0; i + 1 < tokens.length; i++) {
        if (this.merged.get(`${tokens[i]} ${tokens[i + 1]}`) === first) tokens.splice(i, 2, first);
      }
    }
  }
}
