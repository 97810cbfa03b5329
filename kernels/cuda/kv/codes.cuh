#pragma once
// The numbers that the codes of quantised keys and values stand for, bit by bit as common/formats/kv_format.h
// defines them.

#include <cstdint>

#include "common/formats/kv_format.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/kernels.h"

namespace poise::cuda {

// One head's codes in rows of blocks. `which`: 0 for the key, 1 for the value.
template <typename T>
class HeadCodes {
 public:
  __device__ HeadCodes(const Attention& op, const KvRowLayout& layout, int kv_head)
      : bytes_(op.format == KvFormat::int8),
        codes_bytes_(static_cast<int>(layout.codes)),
        group_bytes_(layout.groups * 2 * static_cast<int>(sizeof(T))),
        kv_heads_(op.kv_heads),
        // Behind this head's key codes.
        groups_(layout.groups_at + kv_head * (std::int64_t{group_bytes_} - codes_bytes_)) {}

  // Eight numbers at a multiple of eight, as 16-bit T. `codes`: of the head's first number, at a
  // multiple of 8 bytes (int8) or 4; `key`: the head's key codes in the same row.
  __device__ void eight(std::uint32_t (&words)[4], const char* codes, const char* key, int which,
                        int vector) const {
    static_assert(sizeof(T) == 2);
    const std::uint32_t group = *reinterpret_cast<const std::uint32_t*>(
        group_of(key, which) + vector / (kKvGroup / 8) * 4);
    const float scale = half_of(group, 0), offset = half_of(group, 1);
    std::uint32_t low, high;  // four codes each, a byte each
    if (bytes_) {
      const uint2 both = *reinterpret_cast<const uint2*>(codes + 8 * vector);
      low = both.x;
      high = both.y;
    } else {
      const std::uint32_t all = *reinterpret_cast<const std::uint32_t*>(codes + 4 * vector);
      // Half bytes 0, 2, 4, 6 and 1, 3, 5, 7, then side by side.
      const std::uint32_t even = all & 0x0f0f0f0fu, odd = all >> 4 & 0x0f0f0f0fu;
      low = __byte_perm(even, odd, 0x5140);
      high = __byte_perm(even, odd, 0x7362);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[i] = pair(low >> 16 * i, scale, offset);
      words[2 + i] = pair(high >> 16 * i, scale, offset);
    }
  }

  // Any number of any type. `row`: the token's.
  __device__ float number(const char* row, int kv_head, int which, int d) const {
    const char* codes = row + (std::int64_t{which} * kv_heads_ + kv_head) * codes_bytes_;
    const char* key = row + std::int64_t{kv_head} * codes_bytes_;
    const T* group = reinterpret_cast<const T*>(group_of(key, which)) + d / kKvGroup * 2;
    const auto byte = static_cast<unsigned char>(codes[bytes_ ? d : d / 2]);
    const unsigned code = bytes_ ? byte : byte >> (d % 2 * 4) & 15u;
    return to_float(from_float<T>(
        __fmaf_rn(static_cast<float>(code), to_float(group[0]), to_float(group[1]))));
  }

 private:
  __device__ const char* group_of(const char* key, int which) const {
    return key + groups_ + (which == 0 ? 0 : std::int64_t{kv_heads_} * group_bytes_);
  }
  __device__ static float half_of(std::uint32_t both, int i) {
    const auto bits = static_cast<unsigned short>(both >> 16 * i);
    return to_float(*reinterpret_cast<const T*>(&bits));
  }
  // Of the two lowest bytes.
  __device__ static std::uint32_t pair(std::uint32_t codes, float scale, float offset) {
    return pack<T>(__fmaf_rn(static_cast<float>(codes & 0xffu), scale, offset),
                   __fmaf_rn(static_cast<float>(codes >> 8 & 0xffu), scale, offset));
  }

  const bool bytes_;
  const int codes_bytes_, group_bytes_, kv_heads_;
  const std::int64_t groups_;
};

}  // namespace poise::cuda
