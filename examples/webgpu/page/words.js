// Numbers and verdicts as the page shows them.

export const small = (x) => x.toExponential(1);

export function time(seconds) {
  return seconds < 1e-3 ? `${(seconds * 1e6).toPrecision(3)} µs` : `${(seconds * 1e3).toPrecision(3)} ms`;
}

/** A rate a second with the prefix that suits it: 1.23 GB/s. */
export function rate(amount, unit) {
  const step = Math.min(Math.max(Math.floor(Math.log10(amount) / 3), 2), 4);
  return `${(amount / 1000 ** step).toPrecision(3)} ${['M', 'G', 'T'][step - 2]}${unit}`;
}

export const verdict = (ok) => `<b class="${ok ? 'good' : 'bad'}">${ok ? '✓' : '✗'}</b>`;
