#pragma once
// SHA-256 (FIPS 180-4), for the fingerprint of a model: strong, so that no other model has the same
// one, and computed with the processor's SHA instructions if it has them, so that reading a model
// takes no longer. One thread uses a Sha256; the free functions are pure.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace poise {

using Digest = std::array<std::uint8_t, 32>;

class Sha256 {
 public:
  void update(std::span<const std::byte> bytes);
  Digest finish();  // the object must not be used afterwards

 private:
  friend std::array<Digest, 2> sha256_pair(std::span<const std::byte>, std::span<const std::byte>);

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, 64> block_{};
  std::uint64_t length_ = 0;  // bytes so far
};

Digest sha256(std::span<const std::byte> bytes);
// Both digests in hardly more than the time of one. REQUIRES: a.size() == b.size().
std::array<Digest, 2> sha256_pair(std::span<const std::byte> a, std::span<const std::byte> b);
std::string to_hex(const Digest& digest);

namespace detail {
// `blocks` times 64 bytes into the state. The portable one is always there; the other where
// `has_sha_instructions`. Both give the same, a test holds them to it.
void sha256_blocks_portable(std::uint32_t* state, const std::byte* data, std::size_t blocks);
bool has_sha_instructions();
void sha256_blocks_native(std::uint32_t* state, const std::byte* data, std::size_t blocks);
void sha256_blocks_pair_native(const std::array<std::uint32_t*, 2>& state,
                               const std::array<const std::byte*, 2>& data, std::size_t blocks);
}  // namespace detail

}  // namespace poise
