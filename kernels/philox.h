#pragma once
// Random numbers without state: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011) of a key and a counter. The same (seed, step) gives the same number
// on every device and in any order, as a resumed or preempted request needs.
// Pure functions, on a GPU too.

#include <cstdint>

#if defined(__CUDACC__)
#define POISE_ON_EVERY_DEVICE __host__ __device__
#else
#define POISE_ON_EVERY_DEVICE
#endif

namespace poise {

struct PhiloxCounter {
  std::uint32_t x[4];
  friend bool operator==(const PhiloxCounter&, const PhiloxCounter&) = default;
};
struct PhiloxKey {
  std::uint32_t x[2];
};

POISE_ON_EVERY_DEVICE constexpr PhiloxCounter philox(PhiloxCounter counter, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * counter.x[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * counter.x[2];
    counter = {{static_cast<std::uint32_t>(b >> 32) ^ counter.x[1] ^ key.x[0],
                static_cast<std::uint32_t>(b),
                static_cast<std::uint32_t>(a >> 32) ^ counter.x[3] ^ key.x[1],
                static_cast<std::uint32_t>(a)}};
    key.x[0] += 0x9E3779B9u;
    key.x[1] += 0xBB67AE85u;
  }
  return counter;
}

// Uniform in [0, 1), 53 bits.
POISE_ON_EVERY_DEVICE constexpr double uniform(std::uint64_t seed, std::uint64_t step) {
  const PhiloxCounter bits =
      philox({{static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(step >> 32), 0, 0}},
             {{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)}});
  const std::uint64_t high = bits.x[0];
  return static_cast<double>(((high << 32) | bits.x[1]) >> 11) * 0x1p-53;
}

}  // namespace poise

#undef POISE_ON_EVERY_DEVICE
