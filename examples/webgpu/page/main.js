// The page from top to bottom. `tilesmith.finished` becomes what all sections found, or { missing: why }.

import * as attention from './attention.js';
import * as fused from './fused.js';
import * as gpus from './gpu.js';
import * as writing from './writing.js';

const message = (text) => {
  const box = document.createElement('p');
  box.className = 'message bad';
  box.textContent = text;
  document.querySelector('#message').replaceChildren(box);
};

async function start() {
  const chips = document.querySelector('#device');
  let gpu;
  try {
    gpu = await gpus.open();
  } catch (problem) {
    chips.replaceChildren();
    document.querySelectorAll('main section').forEach((section) => { section.inert = true; });
    message(problem.message);
    return { missing: problem.message };
  }
  const { limits } = gpu.device;
  const told = [gpu.name, `buffers up to ${Math.round(limits.maxStorageBufferBindingSize / 2 ** 20).toLocaleString('en')} MiB`];
  if (gpu.software) told.push('a processor plays the GPU: times say nothing');
  chips.replaceChildren(...told.map((text) => {
    const chip = document.createElement('span');
    chip.className = 'chip';
    chip.textContent = text;
    return chip;
  }));
  gpu.failed.catch((problem) => message(problem.message));
  const made = await (await fetch('kernels.json')).json();
  return {
    device: gpu.name,
    attention: await attention.start(gpu, made.attention),
    fused: await fused.start(gpu, made.fused),
    decoder: await writing.start(gpu, made.decoder),
  };
}

globalThis.tilesmith = { finished: start() };
globalThis.tilesmith.finished.catch((problem) => message(problem.message));
