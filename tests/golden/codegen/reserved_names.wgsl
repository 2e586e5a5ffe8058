struct Params_ { fn_: f32, }
@group(0) @binding(0) var<storage, read> half_: array<f32>;
@group(0) @binding(1) var<storage, read_write> storage_: array<f32>;
@group(0) @binding(2) var<uniform> params_: Params_;
var<workgroup> device_: array<f32, 32>;
@compute @workgroup_size(32, 1, 1)
fn reserved_names(@builtin(local_invocation_id) tid_: vec3<u32>) {
  var template_: array<f32, 1>;
  let precision_ = half_[tid_.x];
  let let_ = precision_ * params_.fn_;
  let was = let_;
  device_[tid_.x] = was;
  template_[0u] = 3.1415927f;
  workgroupBarrier();
  for (var loop_ = 0u; loop_ < 1u; loop_++) {
    storage_[tid_.x + loop_] = device_[31u - tid_.x] + template_[0u];
  }
}
