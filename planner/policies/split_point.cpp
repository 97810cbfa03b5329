#include "planner/policies/split_point.h"

#include <algorithm>
#include <cmath>

namespace poise {

Seconds split_time(const Line& load_act, const Line& kv_gen, const Line& load_kv, std::int32_t l,
                   std::int32_t blocks) {
  return load_act(l) + std::max(kv_gen(l), load_kv(blocks - l));
}

// Between its ends t(l) is the larger of two straight lines, so its least value is at an end or
// beside where they cross. (At the ends nothing is begun, which takes no time at all.)
std::int32_t split_point(const Line& load_act, const Line& kv_gen, const Line& load_kv,
                         std::int32_t blocks) {
  const double slopes = kv_gen.b + load_kv.b;
  const double crossing =
      slopes > 0 ? (load_kv.a + load_kv.b * blocks - kv_gen.a) / slopes : blocks;
  const double inside = std::clamp(std::floor(crossing), 0.0, static_cast<double>(blocks));
  const auto at = static_cast<std::int32_t>(inside);
  std::int32_t best = 0;
  for (const std::int32_t l : {1, at, at + 1, blocks - 1, blocks}) {
    if (l >= 0 && l <= blocks &&
        split_time(load_act, kv_gen, load_kv, l, blocks) <
            split_time(load_act, kv_gen, load_kv, best, blocks)) {
      best = l;
    }
  }
  return best;
}

}  // namespace poise
