#include "kernels/cpu/logits.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>

namespace poise::cpu {
namespace {

// fn(first, count) block by block until it says false.
template <typename Fn>
void by_blocks(const Logits& logits, Fn fn) {
  for (std::int32_t i = 0; i < logits.count; i += kLogitBlock) {
    if (!fn(i, std::min(kLogitBlock, logits.count - i))) {
      return;
    }
  }
}

// Floats in order as whole numbers in order.
std::uint32_t rank_of(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
float value_of(std::uint32_t rank) {
  return std::bit_cast<float>((rank >> 31) != 0 ? rank & 0x7fffffffu : ~rank);
}
float next_above(float x) { return value_of(rank_of(x) + 1); }

// The largest value in [low, high] for which `enough` holds. REQUIRES: it holds for low, and for
// everything below a value it holds for.
template <typename Enough>
float largest_value(float low, float high, Enough enough) {
  std::uint32_t holds = rank_of(low);
  std::uint32_t fails = rank_of(high) + 1;
  while (fails - holds > 1) {
    const std::uint32_t middle = holds + (fails - holds) / 2;
    (enough(value_of(middle)) ? holds : fails) = middle;
  }
  return value_of(holds);
}

// Only those at or above the threshold from now on. They may come from the same room.
void gather(Logits* logits, float threshold, const GatheredLogits& room) {
  if (logits->count_at_least(threshold) > GatheredLogits::kCapacity) {
    return;
  }
  std::int32_t kept = 0;
  by_blocks(*logits, [&](std::int32_t first, std::int32_t some) {
    std::array<std::int32_t, kLogitBlock> at;
    const std::int32_t found =
        logits->kernels.select_at_least(at.data(), logits->values + first, some, threshold);
    for (std::int32_t f = 0; f < found; ++f, ++kept) {
      const std::int32_t i = first + at[static_cast<std::size_t>(f)];
      room.ids[kept] = logits->id(i);
      room.values[kept] = logits->values[i];
    }
    return true;
  });
  logits->values = room.values;
  logits->ids = room.ids;
  logits->count = kept;
}

double mass_of(const Logits& logits, const Kept& kept) {
  if (kept.value == kLowestLogit) {
    return logits.mass_at_least(kLowestLogit);
  }
  return logits.mass_at_least(next_above(kept.value)) +
         static_cast<double>(kept.ties) * logits.weight(kept.value);
}

// A value that the k best are not below: k groups have a maximum at least that large.
float bound_of_best(const Logits& logits, std::int64_t k, const GatheredLogits& room) {
  const std::int64_t groups = (logits.count + kLogitGroup - 1) / kLogitGroup;
  if (k > groups || groups > GatheredLogits::kCapacity) {
    return kLowestLogit;
  }
  logits.kernels.group_maxima(room.values, logits.values, logits.count);
  std::nth_element(room.values, room.values + k - 1, room.values + groups, std::greater<>());
  return room.values[k - 1];
}

}  // namespace

double Logits::mass_at_least(float threshold) const {
  double mass = 0;
  by_blocks(*this, [&](std::int32_t i, std::int32_t some) {
    mass +=
        static_cast<double>(kernels.weigh_at_least(values + i, some, threshold, maximum, scale));
    return true;
  });
  return mass;
}

std::int64_t Logits::count_at_least(float threshold) const {
  std::int64_t total = 0;
  by_blocks(*this, [&](std::int32_t i, std::int32_t some) {
    total += kernels.count_at_least(values + i, some, threshold);
    return true;
  });
  return total;
}

double Logits::weight(float value) const {
  float weight = 0;
  kernels.weigh_each(&weight, &value, 1, maximum, scale);
  return static_cast<double>(weight);
}

Kept keep_likely(const Logits& logits, float share) {
  // Weights rise with logits: all below a value weigh too little.
  const float below = largest_value(kLowestLogit, logits.maximum, [&](float x) {
    return x == kLowestLogit || logits.weight(x) < static_cast<double>(share);
  });
  Kept kept;
  kept.value = below < logits.maximum ? next_above(below) : logits.maximum;
  kept.ties = logits.count_at_least(kept.value) - logits.count_at_least(next_above(kept.value));
  return kept;
}

Kept keep_best(Logits* logits, std::int64_t k, const GatheredLogits& room) {
  const float bound = bound_of_best(*logits, k, room);
  if (bound != kLowestLogit) {
    gather(logits, bound, room);
  }
  Kept kept;
  kept.value = largest_value(std::max(bound, std::numeric_limits<float>::lowest()), logits->maximum,
                             [&](float x) { return logits->count_at_least(x) >= k; });
  kept.ties = k - logits->count_at_least(next_above(kept.value));
  return kept;
}

Kept keep_mass(Logits* logits, const Kept& kept, double top_p, const GatheredLogits& room) {
  const double mass = mass_of(*logits, kept);
  const double wanted = top_p * mass;
  // Tokens of less weight than this, all together, are less than half of what may be left out.
  const double least = (1 - top_p) * mass / (2.0 * logits->count);
  const double bound =
      static_cast<double>(logits->maximum) + std::log(least) / static_cast<double>(logits->scale);
  float lowest = std::max(kept.value, std::numeric_limits<float>::lowest());
  if (bound > static_cast<double>(lowest)) {
    lowest = static_cast<float>(bound);
    gather(logits, lowest, room);
  }
  Kept result;
  result.value = largest_value(lowest, logits->maximum, [&](float x) {
    return x == lowest || logits->mass_at_least(x) >= wanted;
  });
  const float above = next_above(result.value);
  const std::int64_t equal = result.value == kept.value ? kept.ties
                                                        : logits->count_at_least(result.value) -
                                                              logits->count_at_least(above);
  const double missing = wanted - logits->mass_at_least(above);
  const double ties = std::ceil(missing / logits->weight(result.value));
  result.ties = ties < static_cast<double>(equal)
                    ? std::max<std::int64_t>(1, static_cast<std::int64_t>(ties))
                    : equal;
  return result;
}

std::int32_t draw(const Logits& logits, const Kept& kept, double point) {
  const float above = kept.value == kLowestLogit ? kLowestLogit : next_above(kept.value);
  struct Block {
    std::int32_t first = 0, count = 0;
    std::int64_t ties = 0;  // that are kept of it
  };
  // The first of a block at which the running sum passes `rest`, or the last that is kept.
  const auto pick = [&](Block block, double rest) {
    const float* values = logits.values + block.first;
    std::array<float, kLogitBlock> weights;
    logits.kernels.weigh_each(weights.data(), values, block.count, logits.maximum, logits.scale);
    std::int32_t chosen = -1;
    for (std::int32_t i = 0; i < block.count && rest >= 0; ++i) {
      const auto weight = static_cast<double>(weights[static_cast<std::size_t>(i)]);
      const bool tie = values[i] == kept.value && block.ties > 0;
      if ((values[i] >= above || tie) && weight > 0) {
        chosen = logits.id(block.first + i);
        rest -= weight;
        block.ties -= tie ? 1 : 0;
      }
    }
    return chosen;
  };
  double left = point * mass_of(logits, kept);
  std::int64_t ties = kept.ties;
  std::int32_t chosen = -1;
  Block last;  // with any weight: where the draw ends should rounding let the sum end too early
  by_blocks(logits, [&](std::int32_t first, std::int32_t some) {
    const float* values = logits.values + first;
    Block block{first, some, 0};
    if (ties > 0) {
      const std::int32_t equal = logits.kernels.count_at_least(values, some, kept.value) -
                                 logits.kernels.count_at_least(values, some, above);
      block.ties = std::min<std::int64_t>(equal, ties);
    }
    const double mass = static_cast<double>(logits.kernels.weigh_at_least(
                            values, some, above, logits.maximum, logits.scale)) +
                        static_cast<double>(block.ties) * logits.weight(kept.value);
    if (left < mass) {
      chosen = pick(block, left);
      return false;
    }
    last = mass > 0 ? block : last;
    left -= mass;
    ties -= block.ties;
    return true;
  });
  return chosen >= 0 ? chosen : pick(last, std::numeric_limits<double>::infinity());
}

std::int32_t best_ids(const Logits& logits, std::int32_t k, std::int32_t* ids) {
  constexpr std::int32_t kSome = 256;
  std::array<float, kMaxLogprobs> best;
  std::int32_t held = 0;
  for (std::int32_t first = 0; first < logits.count; first += kSome) {
    std::array<std::int32_t, kSome> at;
    const float threshold = held < k ? kLowestLogit : best[static_cast<std::size_t>(k) - 1];
    const std::int32_t found = logits.kernels.select_at_least(
        at.data(), logits.values + first, std::min(kSome, logits.count - first), threshold);
    for (std::int32_t f = 0; f < found; ++f) {
      const std::int32_t i = first + at[static_cast<std::size_t>(f)];
      std::int32_t place = held;
      while (place > 0 && best[static_cast<std::size_t>(place) - 1] < logits.values[i]) {
        --place;
      }
      if (place >= k) {
        continue;
      }
      held = std::min(held + 1, k);
      std::copy_backward(best.begin() + place, best.begin() + held - 1, best.begin() + held);
      std::copy_backward(ids + place, ids + held - 1, ids + held);
      best[static_cast<std::size_t>(place)] = logits.values[i];
      ids[place] = logits.id(i);
    }
  }
  return held;
}

}  // namespace poise::cpu
