// Launching printed kernels: binding i of group 0 is buffer i as the kernel declares it, the scalars' uniform block last.

/** The device that the page computes on. Throws an Error, in words for a visitor, where there is none. */
export async function open() {
  if (!navigator.gpu) {
    throw new Error(isSecureContext
      ? 'This browser has no WebGPU. Recent versions of Chrome, Edge, Safari and Firefox have it.'
      : 'Browsers offer WebGPU only to pages of https:// or of localhost; this page came from ' + location.origin + '.');
  }
  const adapter = await navigator.gpu.requestAdapter({ powerPreference: 'high-performance' });
  if (!adapter) {
    throw new Error('This browser has WebGPU, but offers no GPU: its driver may be blocked. See chrome://gpu or about:support.');
  }
  const wanted = ['maxStorageBufferBindingSize', 'maxBufferSize'];
  const requiredLimits = Object.fromEntries(wanted.map((name) => [name, adapter.limits[name]]));
  return new Gpu(await adapter.requestDevice({ requiredLimits }), adapter.info);
}

export class Gpu {
  constructor(device, info) {
    this.device = device;
    this.name = info.description || [info.vendor, info.architecture].filter(Boolean).join(' ') || 'an unnamed GPU';
    this.software = /swiftshader|llvmpipe|software/i.test(`${this.name} ${info.architecture}`);
    this.kernels = new Map();
    this.failed = new Promise((_, reject) => {
      device.addEventListener('uncapturederror', (event) => reject(new Error(event.error.message)));
      device.lost.then((lost) => reject(new Error(`The GPU was lost: ${lost.message}`)));
    });
    this.failed.catch(() => {});
  }

  /** The kernel that kernels.json describes. */
  kernel(described) {
    if (!this.kernels.has(described.file)) this.kernels.set(described.file, Kernel.load(this.device, described));
    return this.kernels.get(described.file);
  }

  /** A buffer that holds an array, or so many bytes of zeros. */
  buffer(content) {
    const bytes = typeof content === 'number' ? content : content.byteLength;
    const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
    const buffer = this.device.createBuffer({ size: Math.max(16, Math.ceil(bytes / 4) * 4), usage });
    if (typeof content !== 'number') this.device.queue.writeBuffer(buffer, 0, content);
    return buffer;
  }

  /** Let `record` put commands into an encoder, and submit them. */
  submit(record) {
    const encoder = this.device.createCommandEncoder();
    record(encoder);
    this.device.queue.submit([encoder.finish()]);
  }

  /** Run launches, each as [launch, grid], in order. */
  run(launches) {
    this.submit((encoder) => {
      const pass = encoder.beginComputePass();
      for (const [launch, grid] of launches) launch.encode(pass, grid);
      pass.end();
    });
  }

  /** The first `count` numbers of a buffer, once all that was submitted is done. */
  async read(buffer, count) {
    const size = count * 4;
    const staging = this.device.createBuffer({ size, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    this.submit((encoder) => encoder.copyBufferToBuffer(buffer, 0, staging, 0, size));
    await Promise.race([staging.mapAsync(GPUMapMode.READ), this.failed]);
    const copy = new Float32Array(staging.getMappedRange().slice(0));
    staging.destroy();
    return copy;
  }

  /** Wait until all that was submitted is done. */
  done() {
    return Promise.race([this.device.queue.onSubmittedWorkDone(), this.failed]);
  }

  /** Seconds of one run: the median of five batches, each long enough for the browser's coarse clock; of fewer where
   *  they are slow. */
  async seconds(launches) {
    let count = 1;
    const batch = async () => {
      const start = performance.now();
      this.run(Array.from({ length: count }, () => launches).flat());
      await this.done();
      return (performance.now() - start) / 1000;
    };
    let spent = await batch(); // the first also warms up
    while (spent < 0.02 && count < 512) {
      count *= 4;
      spent = await batch();
    }
    const batches = [];
    const end = performance.now() + 300;
    do batches.push(await batch()); while (batches.length < 5 && performance.now() < end);
    return batches.sort((a, b) => a - b)[batches.length >> 1] / count;
  }
}

class Kernel {
  static async load(device, described) {
    const kernel = new Kernel();
    const code = await (await fetch(described.file)).text();
    const kinds = described.buffers.map((b) => (b.access === 'read' ? 'read-only-storage' : 'storage'));
    if (described.scalars.length) kinds.push('uniform');
    kernel.device = device;
    kernel.described = described;
    kernel.layout = device.createBindGroupLayout({
      entries: kinds.map((type, binding) => ({ binding, visibility: GPUShaderStage.COMPUTE, buffer: { type } })),
    });
    kernel.pipeline = await device.createComputePipelineAsync({
      layout: device.createPipelineLayout({ bindGroupLayouts: [kernel.layout] }),
      compute: { module: device.createShaderModule({ code }), entryPoint: described.entry },
    });
    return kernel;
  }

  /** The kernel with its buffers and scalars, by name. */
  launch(buffers, scalars = {}) {
    return new Launch(this, buffers, scalars);
  }
}

class Launch {
  constructor(kernel, buffers, scalars) {
    const { described, device, layout } = kernel;
    const bound = described.buffers.map(({ name }) => buffers[name]);
    this.kernel = kernel;
    if (described.scalars.length) {
      const size = Math.ceil(described.scalars.length / 4) * 16;
      this.uniform = device.createBuffer({ size, usage: GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST });
      bound.push(this.uniform);
      this.set(scalars);
    }
    this.group = device.createBindGroup({
      layout,
      entries: bound.map((buffer, binding) => ({ binding, resource: { buffer } })),
    });
  }

  /** Change scalars; they hold for what is submitted from now on. Returns the launch. */
  set(scalars) {
    this.scalars = { ...this.scalars, ...scalars };
    const block = new DataView(new ArrayBuffer(this.uniform.size));
    this.kernel.described.scalars.forEach(({ name, type }, k) => {
      const write = { f32: 'setFloat32', u32: 'setUint32', i32: 'setInt32' }[type];
      block[write](4 * k, this.scalars[name], true);
    });
    this.kernel.device.queue.writeBuffer(this.uniform, 0, block.buffer);
    return this;
  }

  encode(pass, grid) {
    pass.setPipeline(this.kernel.pipeline);
    pass.setBindGroup(0, this.group);
    pass.dispatchWorkgroups(...grid);
  }
}
