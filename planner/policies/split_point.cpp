#include "planner/policies/split_point.h"

#include <algorithm>

namespace poise {
namespace {

constexpr double kRounding = 1e-9;  // of a time: less is no gain

}  // namespace

Seconds split_time(const SplitCosts& costs, std::int32_t l, std::int32_t blocks) {
  const double made = costs.requests * l, loaded = costs.requests * (blocks - l);
  return costs.load_act(made) + std::max(costs.kv_gen(made), costs.load_kv(loaded));
}

std::int32_t split_point(const SplitCosts& costs, std::int32_t blocks) {
  std::int32_t best = 0;
  for (std::int32_t l = 1; l <= blocks; ++l) {
    if (split_time(costs, l, blocks) < split_time(costs, best, blocks) * (1 - kRounding)) {
      best = l;
    }
  }
  return best;
}

}  // namespace poise
