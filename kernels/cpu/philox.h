#pragma once
// Random numbers without a state: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011) of a key and a counter. The same (seed, step) gives the same number
// anywhere, in any order, which is what a resumed or preempted request needs. Pure functions.

#include <array>
#include <cstdint>

namespace poise::cpu {

constexpr std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                              std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {
        static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
        static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// Uniform in [0, 1), 53 bits.
constexpr double uniform(std::uint64_t seed, std::uint64_t step) {
  const auto bits =
      philox({static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(step >> 32), 0, 0},
             {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  const std::uint64_t high = bits[0];
  return static_cast<double>(((high << 32) | bits[1]) >> 11) * 0x1p-53;
}

}  // namespace poise::cpu
