#include "common/files/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "common/trouble.h"

namespace poise {
namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(16) constexpr std::uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t big_endian(const std::byte* bytes) {
  std::uint32_t word = 0;
  std::memcpy(&word, bytes, sizeof word);
  return __builtin_bswap32(word);
}

bool native() {
  static const bool has = detail::has_sha_instructions();
  return has;
}

void process(std::uint32_t* state, const std::byte* data, std::size_t blocks) {
  native() ? detail::sha256_blocks_native(state, data, blocks)
           : detail::sha256_blocks_portable(state, data, blocks);
}

}  // namespace

namespace detail {

void sha256_blocks_portable(std::uint32_t* state, const std::byte* data, std::size_t blocks) {
  for (; blocks > 0; --blocks, data += 64) {
    std::uint32_t w[64];
    for (int t = 0; t < 16; ++t) {
      w[t] = big_endian(data + 4 * t);
    }
    for (int t = 16; t < 64; ++t) {
      const std::uint32_t s0 =
          std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
      const std::uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = std::array<std::uint32_t, 8>{
        state[0], state[1], state[2], state[3], state[4], state[5], state[6], state[7]};
    for (int t = 0; t < 64; ++t) {
      const std::uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const std::uint32_t choice = (e & f) ^ (~e & g);
      const std::uint32_t t1 = h + sum1 + choice + kRound[t] + w[t];
      const std::uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const std::uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
      h = g;
      g = f;
      f = e;
      e = d + t1;
      d = c;
      c = b;
      b = a;
      a = t1 + sum0 + majority;
    }
    const std::array<std::uint32_t, 8> sums{a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) {
      state[i] += sums[i];
    }
  }
}

#if defined(__x86_64__)

bool has_sha_instructions() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool sha = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx >> 29 & 1u) != 0;
  return sha && __builtin_cpu_supports("sse4.1") != 0 && __builtin_cpu_supports("ssse3") != 0;
}

namespace {

// The instructions keep the state as (A B E F) and (C D G H), highest word first, and do two rounds
// each; four words of the message schedule are made at a time. Each step waits for the one before
// it, so that two messages side by side take hardly longer than one.
template <int kLanes>
__attribute__((target("sha,sse4.1,ssse3"))) void native_lanes(
    const std::array<std::uint32_t*, kLanes>& state, std::array<const std::byte*, kLanes> data,
    std::size_t blocks) {
  const __m128i to_big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  __m128i abef[kLanes], cdgh[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state[lane]));
    const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state[lane] + 4));
    const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1);
    const __m128i efgh = _mm_shuffle_epi32(hgfe, 0x1b);
    abef[lane] = _mm_alignr_epi8(cdab, efgh, 8);
    cdgh[lane] = _mm_blend_epi16(efgh, cdab, 0xf0);
  }
  for (; blocks > 0; --blocks) {
    __m128i abef_before[kLanes], cdgh_before[kLanes], w[kLanes][4];
    for (int lane = 0; lane < kLanes; ++lane) {
      abef_before[lane] = abef[lane];
      cdgh_before[lane] = cdgh[lane];
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
#pragma GCC unroll 2
      for (int lane = 0; lane < kLanes; ++lane) {
        __m128i* x = w[lane];
        if (i < 4) {
          const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data[lane]) + i);
          x[i] = _mm_shuffle_epi8(words, to_big_endian);
        } else {
          const __m128i sevenths = _mm_alignr_epi8(x[(i + 3) % 4], x[(i + 2) % 4], 4);
          x[i % 4] = _mm_sha256msg2_epu32(
              _mm_add_epi32(_mm_sha256msg1_epu32(x[i % 4], x[(i + 1) % 4]), sevenths),
              x[(i + 3) % 4]);
        }
        const __m128i round = _mm_load_si128(reinterpret_cast<const __m128i*>(kRound) + i);
        const __m128i sum = _mm_add_epi32(x[i % 4], round);
        cdgh[lane] = _mm_sha256rnds2_epu32(cdgh[lane], abef[lane], sum);
        abef[lane] = _mm_sha256rnds2_epu32(abef[lane], cdgh[lane], _mm_shuffle_epi32(sum, 0x0e));
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      abef[lane] = _mm_add_epi32(abef[lane], abef_before[lane]);
      cdgh[lane] = _mm_add_epi32(cdgh[lane], cdgh_before[lane]);
      data[lane] += 64;
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const __m128i feba = _mm_shuffle_epi32(abef[lane], 0x1b);
    const __m128i dchg = _mm_shuffle_epi32(cdgh[lane], 0xb1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state[lane]), _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state[lane] + 4), _mm_alignr_epi8(dchg, feba, 8));
  }
}

}  // namespace

void sha256_blocks_native(std::uint32_t* state, const std::byte* data, std::size_t blocks) {
  native_lanes<1>({state}, {data}, blocks);
}

void sha256_blocks_pair_native(const std::array<std::uint32_t*, 2>& state,
                               const std::array<const std::byte*, 2>& data, std::size_t blocks) {
  native_lanes<2>(state, data, blocks);
}

#else

bool has_sha_instructions() { return false; }
void sha256_blocks_native(std::uint32_t* state, const std::byte* data, std::size_t blocks) {
  sha256_blocks_portable(state, data, blocks);
}
void sha256_blocks_pair_native(const std::array<std::uint32_t*, 2>& state,
                               const std::array<const std::byte*, 2>& data, std::size_t blocks) {
  sha256_blocks_portable(state[0], data[0], blocks);
  sha256_blocks_portable(state[1], data[1], blocks);
}

#endif

}  // namespace detail

void Sha256::update(std::span<const std::byte> bytes) {
  const std::size_t held = length_ % block_.size();
  length_ += bytes.size();
  if (held > 0) {
    const std::size_t more = std::min(bytes.size(), block_.size() - held);
    std::copy_n(bytes.begin(), more, block_.begin() + static_cast<std::ptrdiff_t>(held));
    bytes = bytes.subspan(more);
    if (held + more < block_.size()) {
      return;
    }
    process(state_.data(), block_.data(), 1);
  }
  const std::size_t whole = bytes.size() / block_.size();
  process(state_.data(), bytes.data(), whole);
  const auto rest = bytes.subspan(whole * block_.size());
  std::ranges::copy(rest, block_.begin());
}

Digest Sha256::finish() {
  const std::uint64_t bits = length_ * 8;
  std::array<std::byte, 72> padding{std::byte{0x80}};
  const std::size_t zeros = (119 - length_ % 64) % 64;  // 1 + zeros + 8 fills the last block
  for (std::size_t i = 0; i < 8; ++i) {
    padding[1 + zeros + i] = static_cast<std::byte>(bits >> (56 - 8 * i));
  }
  update(std::span(padding).first(1 + zeros + 8));
  Digest digest;
  for (std::size_t i = 0; i < 32; ++i) {
    digest[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

Digest sha256(std::span<const std::byte> bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.finish();
}

std::array<Digest, 2> sha256_pair(std::span<const std::byte> a, std::span<const std::byte> b) {
  check(a.size() == b.size(), "a pair of digests is taken over messages of one length");
  Sha256 first, second;
  const std::size_t blocks = a.size() / 64;
  if (native()) {
    detail::sha256_blocks_pair_native({first.state_.data(), second.state_.data()},
                                      {a.data(), b.data()}, blocks);
    first.length_ = second.length_ = blocks * 64;
    a = a.subspan(blocks * 64);
    b = b.subspan(blocks * 64);
  }
  first.update(a);
  second.update(b);
  return {first.finish(), second.finish()};
}

std::string to_hex(const Digest& digest) {
  std::string text;
  for (const std::uint8_t byte : digest) {
    text += fmt::format("{:02x}", byte);
  }
  return text;
}

}  // namespace poise
