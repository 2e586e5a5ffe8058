struct Params_ { n: u32, }
@group(0) @binding(0) var<storage, read> x: array<u32>;
@group(0) @binding(1) var<storage, read_write> y: array<u32>;
@group(0) @binding(2) var<uniform> params_: Params_;
@compute @workgroup_size(8, 4, 1)
fn control_flow(@builtin(workgroup_id) gid_: vec3<u32>, @builtin(num_workgroups) groups_: vec3<u32>, @builtin(local_invocation_id) tid_: vec3<u32>) {
  let i = tid_.x + tid_.y * 8u + gid_.x * 32u + gid_.y * groups_.x * 32u;
  var total = 0u;
  var both = i < params_.n;
  if (both) {
    both = x[i] % 3u != 0u;
  }
  if (both) {
    let stop = x[i] % 9u;
    for (var k = 2u; k < stop; k += 2u) {
      for (var j = 0u; j < k; j++) {
        if ((j + k) % 2u == 0u || j > 3u) {
          total = total + j;
        } else {
          total = total + 100u;
        }
      }
    }
  } else {
    if (i < params_.n) {
      let start = x[i];
      let was = start;
      var n_1 = was;
      var steps = 0u;
      while (n_1 > 1u) {
        n_1 = select(3u * n_1 + 1u, n_1 / 2u, (n_1 % 2u == 0u));
        steps = steps + 1u;
      }
      let was_1 = steps;
      let was_2 = n_1;
      let count = was_1;
      let last = was_2;
      total = count * 1000u + last;
    }
  }
  var negative = 0i;
  for (var k_1 = -3i; k_1 < 4i; k_1 += 3i) {
    negative = negative + (k_1 * k_1 - 1i);
  }
  let seen = i == 5u;
  if (!seen) {
    y[i] = total + u32(negative);
  } else {
    y[i] = 77u;
  }
}
