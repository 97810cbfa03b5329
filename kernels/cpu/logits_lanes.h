#pragma once
// Passes over a row of logits, sixteen at a time; the steps of SampleTokens. Included after one of
// lanes_*.h, math_lanes.h and rows_lanes.h.

#include <bit>
#include <cstdint>

#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

inline LogitScan scan_logits(const float* logits, std::int32_t count) {
  Lanes largest = Lanes::all(-__builtin_inff());
  Lanes trouble = Lanes::zero();  // x · 0 is 0, or not a number where x is infinite or none
  in_sixteens(count, [&](std::int64_t i, int some) {
    const Lanes x = load_some(logits + i, some);
    largest = Lanes::max(Lanes::first(some, x, largest), largest);
    trouble = Lanes::fma(x, Lanes::zero(), trouble);
  });
  LogitScan scan{.maximum = largest.largest(), .argmax = 0, .finite = trouble.sum() == 0.0f};
  while (scan.finite && logits[scan.argmax] != scan.maximum) {
    if (scan.argmax + 16 <= count) {
      const std::uint32_t found =
          Lanes::at_least(Lanes::load(logits + scan.argmax), Lanes::all(scan.maximum));
      scan.argmax += found != 0 ? std::countr_zero(found) : 16;
    } else {
      ++scan.argmax;
    }
  }
  return scan;
}

inline void group_maxima(float* out, const float* logits, std::int32_t count) {
  for (std::int32_t g = 0; g * kLogitGroup < count; ++g) {
    const std::int32_t first = g * kLogitGroup;
    Lanes largest = Lanes::all(-__builtin_inff());
    in_sixteens(count - first < kLogitGroup ? count - first : kLogitGroup,
                [&](std::int64_t i, int some) {
                  const Lanes x = load_some(logits + first + i, some);
                  largest = Lanes::max(Lanes::first(some, x, largest), largest);
                });
    out[g] = largest.largest();
  }
}

inline float weigh_at_least(const float* logits, std::int32_t count, float threshold, float maximum,
                            float scale) {
  Lanes total = Lanes::zero();
  in_sixteens(count, [&](std::int64_t i, int some) {
    const Lanes x = load_some(logits + i, some);
    const Lanes weight = exp((x - Lanes::all(maximum)) * Lanes::all(scale));
    const Lanes counted = Lanes::where_less(x, Lanes::all(threshold), Lanes::zero(), weight);
    total = total + Lanes::first(some, counted, Lanes::zero());
  });
  return total.sum();
}

inline void weigh_each(float* weights, const float* logits, std::int32_t count, float maximum,
                       float scale) {
  in_sixteens(count, [&](std::int64_t i, int some) {
    const Lanes x = load_some(logits + i, some);
    store_some(exp((x - Lanes::all(maximum)) * Lanes::all(scale)), weights + i, some);
  });
}

inline std::uint32_t mask_at_least(const float* logits, int some, float threshold) {
  return Lanes::at_least(load_some(logits, some), Lanes::all(threshold)) &
         (some == 16 ? 0xffffu : (1u << some) - 1u);
}

inline std::int32_t count_at_least(const float* logits, std::int32_t count, float threshold) {
  std::int32_t total = 0;
  in_sixteens(count, [&](std::int64_t i, int some) {
    total += std::popcount(mask_at_least(logits + i, some, threshold));
  });
  return total;
}

inline std::int32_t select_at_least(std::int32_t* at, const float* logits, std::int32_t count,
                                    float threshold) {
  std::int32_t found = 0;
  in_sixteens(count, [&](std::int64_t i, int some) {
    std::uint32_t mask = mask_at_least(logits + i, some, threshold);
    for (; mask != 0; mask &= mask - 1) {
      at[found++] = static_cast<std::int32_t>(i) + std::countr_zero(mask);
    }
  });
  return found;
}

}  // namespace
}  // namespace poise::cpu
