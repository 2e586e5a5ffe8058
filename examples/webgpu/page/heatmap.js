// A matrix as a picture: one pixel an element, each row scaled to its largest.

const RAMP = [[16, 19, 31], [36, 59, 110], [42, 127, 142], [138, 199, 125], [253, 243, 180]];
const COLOURS = Uint8ClampedArray.from({ length: 256 * 3 }, (_, i) => {
  const at = Math.floor(i / 3) / 255 * (RAMP.length - 1);
  const step = Math.min(Math.floor(at), RAMP.length - 2);
  const [from, to] = [RAMP[step][i % 3], RAMP[step + 1][i % 3]];
  return from + (to - from) * (at - step);
});

/** Draw values[offset + row * columns + column] onto a canvas. */
export function draw(canvas, values, rows, columns, offset = 0) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext('2d');
  const image = context.createImageData(columns, rows);
  for (let row = 0; row < rows; row++) {
    const start = offset + row * columns;
    let top = 0;
    for (let c = 0; c < columns; c++) top = Math.max(top, values[start + c]);
    for (let c = 0; c < columns; c++) {
      const shade = top > 0 ? Math.round(255 * Math.sqrt(values[start + c] / top)) : 0;
      image.data.set(COLOURS.subarray(3 * shade, 3 * shade + 3), 4 * (row * columns + c));
      image.data[4 * (row * columns + c) + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
}
