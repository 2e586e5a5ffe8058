// Numbers and verdicts as the page shows them.

/** 2.3e−6, with a minus that no line breaks at. */
export const small = (x) => x.toExponential(1).replace('-', '−');

export function time(seconds) {
  const [factor, unit] = seconds < 1e-3 ? [1e6, 'µs'] : seconds < 1 ? [1e3, 'ms'] : [1, 's'];
  return `${(seconds * factor).toPrecision(3)} ${unit}`;
}

/** A rate a second with the prefix that suits it: 1.23 GB/s. */
export function rate(amount, unit) {
  const step = Math.min(Math.max(Math.floor(Math.log10(amount) / 3), 2), 4);
  return `${Number((amount / 1000 ** step).toPrecision(3))} ${['M', 'G', 'T'][step - 2]}${unit}`;
}

export const verdict = (ok) => `<b class="${ok ? 'good' : 'bad'}">${ok ? '✓' : '✗'}</b>`;
