#pragma once
// One row of finite logits while a token is drawn from it: what top_k and top_p keep of it, and the
// draw. All results are functions of the row alone, with the same bits on every instruction
// set. Masses are sums of exp((logit - maximum) / temperature): float32 within a block of
// kLogitBlock, double over blocks. For speed a cut looks only at logits that can matter, gathered
// into a worker's scratch; ids keep their order there.

#include <cstdint>
#include <limits>

#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {

inline constexpr float kLowestLogit = -std::numeric_limits<float>::infinity();

struct Logits {
  const LaneKernels& kernels;
  const float* values;      // (count)
  const std::int32_t* ids;  // (count), ascending; null: value i is of id i
  std::int32_t count;
  float maximum;
  float scale;  // 1 / temperature

  std::int32_t id(std::int32_t i) const { return ids == nullptr ? i : ids[i]; }
  double mass_at_least(float threshold) const;
  std::int64_t count_at_least(float threshold) const;
  double weight(float value) const;
};

// Room for gathered logits; if there are more than kCapacity, the row is searched in place.
struct GatheredLogits {
  static constexpr std::int32_t kCapacity = 1 << 19;
  float* values;
  std::int32_t* ids;
};

// Which logits are kept: those above `value`, and the first `ties` of those equal to it.
struct Kept {
  float value = kLowestLogit;
  std::int64_t ties = 0;
};

// Those of at least `share` of the best one's weight.
Kept keep_likely(const Logits& logits, float share);
// The k best, of equals the lower ids. REQUIRES: 1 ≤ k ≤ logits->count.
Kept keep_best(Logits* logits, std::int64_t k, const GatheredLogits& room);
// The smallest set of the best of `kept` that has a share of at least top_p < 1 of its mass.
Kept keep_mass(Logits* logits, const Kept& kept, double top_p, const GatheredLogits& room);
// The id at which the running sum of kept weights, in the order of ids, passes `point` in [0, 1)
// of them all.
std::int32_t draw(const Logits& logits, const Kept& kept, double point);

// The k best ids into `ids`, best first, the lower id first among equals. Returns how many there
// are. REQUIRES: k ≤ kMaxLogprobs.
std::int32_t best_ids(const Logits& logits, std::int32_t k, std::int32_t* ids);

}  // namespace poise::cpu
