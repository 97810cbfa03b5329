#pragma once
// Plans whose single rows attend activations as they are, beside everything else that attention reads. The tests of
// both devices use them.

#include <random>

#include "tests/gpu_executor/pipeline_run.h"

namespace poise::test {

// A number of a block that has no pattern: the same for each call.
inline std::uint32_t drawn(std::uint32_t seed, std::uint32_t request, std::uint32_t block) {
  std::mt19937 random(seed * 1009 + request * 101 + block);
  return static_cast<std::uint32_t>(random());
}

// Each sequence's blocks are drawn to be loaded, regenerated and absorbed, of the host and of the device; host
// cores attend the first request and every fourth behind it.
inline Plan scattered(const ModelShape& shape, std::uint32_t seed) {
  Plan plan{.sequences = random_sequences(shape, {37, 45, 1, 60, 30, 53, 41, 28}, 7)};
  plan.seed = seed;
  plan.kind = [seed](std::uint32_t request, std::uint32_t block) {
    return drawn(seed, request, block) % 3 == 0 ? BlockKind::kv : BlockKind::act;
  };
  plan.absorbed = [seed](std::uint32_t request, std::uint32_t block) {
    return drawn(seed, request, block) % 3 == 1;
  };
  plan.on_host = [](std::uint32_t request) { return request % 4 == 0; };
  return plan;
}

inline Setting absorbing() {
  Setting setting;
  setting.limits.absorption = setting.limits.host_attention = true;
  setting.limits.gpu_act_blocks = 6;
  setting.limits.gpu_kv_blocks = 4;
  return setting;
}

inline ModelShape with_shared_keys() {
  ModelShape shape = tiny_shape();
  shape.num_attention_heads = 4;
  shape.num_key_value_heads = 2;
  shape.qkv_bias = 0;
  return shape;
}

}  // namespace poise::test
