struct Params_ { columns: u32, eps: f32, }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
@group(0) @binding(3) var<uniform> params_: Params_;
var<workgroup> partial_: array<f32, 64>;
@compute @workgroup_size(64, 1, 1)
fn rms_norm(@builtin(workgroup_id) gid_: vec3<u32>, @builtin(local_invocation_id) tid_: vec3<u32>) {
  let was = gid_.x * params_.columns;
  let t = tid_.x;
  let start = was;
  var squares = 0.0f;
  for (var i = t; i < params_.columns; i += 64u) {
    squares = squares + x[start + i] * x[start + i];
  }
  partial_[t] = squares;
  workgroupBarrier();
  if (t < 32u) {
    partial_[t] = partial_[t] + partial_[t + 32u];
  }
  workgroupBarrier();
  if (t < 16u) {
    partial_[t] = partial_[t] + partial_[t + 16u];
  }
  workgroupBarrier();
  if (t < 8u) {
    partial_[t] = partial_[t] + partial_[t + 8u];
  }
  workgroupBarrier();
  if (t < 4u) {
    partial_[t] = partial_[t] + partial_[t + 4u];
  }
  workgroupBarrier();
  if (t < 2u) {
    partial_[t] = partial_[t] + partial_[t + 2u];
  }
  workgroupBarrier();
  if (t < 1u) {
    partial_[t] = partial_[t] + partial_[t + 1u];
  }
  workgroupBarrier();
  let rstd = inverseSqrt(partial_[0u] / f32(params_.columns) + params_.eps);
  for (var i_1 = t; i_1 < params_.columns; i_1 += 64u) {
    y[start + i_1] = x[start + i_1] * rstd * weight[i_1];
  }
}
