enable f16;
@group(0) @binding(0) var<storage, read> x: array<vec4<f16>>;
@group(0) @binding(1) var<storage, read_write> y: array<vec4<f16>>;
@group(0) @binding(2) var<storage, read_write> z: array<f16>;
var<workgroup> stage: array<f16, 128>;
@compute @workgroup_size(32, 1, 1)
fn halves(@builtin(local_invocation_id) tid_: vec3<u32>) {
  let i = tid_.x;
  let v = vec4<f32>(x[i]) * vec4<f32>(1.5f);
  y[i] = vec4<f16>(v);
  stage[4u * i] = f16(v.x);
  stage[4u * i + 1u] = f16(v.y);
  stage[4u * i + 2u] = f16(v.z);
  stage[4u * i + 3u] = f16(v.w);
  workgroupBarrier();
  let w = stage[127u - i] + x[i].x * 0.5h;
  let low = select(-w, w, (w < 0.0h));
  z[i] = max(low, -2.0h) - x[i].w / 4.0h;
}
