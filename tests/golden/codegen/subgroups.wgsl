enable subgroups;
diagnostic(off, subgroup_uniformity);
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
@group(0) @binding(2) var<storage, read_write> z: array<u32>;
var<workgroup> partial_: array<f32, 64>;
@compute @workgroup_size(64, 1, 1)
fn subgroups(@builtin(workgroup_id) gid_: vec3<u32>, @builtin(num_workgroups) groups_: vec3<u32>, @builtin(local_invocation_index) index_: u32, @builtin(subgroup_invocation_id) lane_: u32, @builtin(subgroup_size) subgroup_size_: u32, @builtin(local_invocation_id) tid_: vec3<u32>) {
  let t = tid_.x;
  let v = x[gid_.x * 64u + t];
  let reduced = subgroupAdd(v);
  let reduced_1 = subgroupMax(v);
  let reduced_2 = subgroupMin(v);
  let was = reduced;
  let was_1 = reduced_1;
  let was_2 = reduced_2;
  let total = was;
  let high = was_1;
  let low = was_2;
  if (lane_ == 0u) {
    partial_[(index_ / subgroup_size_)] = total;
  }
  workgroupBarrier();
  var everyone = 0.0f;
  for (var k = 0u; k < (64u / subgroup_size_); k++) {
    everyone = everyone + partial_[k];
  }
  let shuffled = subgroupShuffleXor(v, 1u);
  let shuffled_1 = subgroupShuffle(v, 0u);
  let swapped = shuffled + shuffled_1;
  y[gid_.x * 64u + t] = everyone;
  let last = subgroup_size_ - 1u;
  z[gid_.x * 64u + t] = u32((swapped == x[(gid_.x * 64u + t) ^ 1u] + x[gid_.x * 64u + (t & (~last))]));
  z[(gid_.x + groups_.x) * 64u + t] = u32(high >= v && low <= v);
}
