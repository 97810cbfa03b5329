#pragma once
// Tensor core products that a warpgroup (four warps, the first a multiple of four) makes together, and what
// goes with them. Code for 9.0a alone: PTX for other GPUs does not know them.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/mma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define POISE_HAS_WGMMA 1
#else
#define POISE_HAS_WGMMA 0
#endif

namespace poise::cuda {

#if POISE_HAS_WGMMA

template <int kRegisters>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Whether the phase is complete (mma.cuh: wait). Does not wait.
__device__ __forceinline__ bool completed(SharedAddress barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{ .reg .pred done;\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done; }\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Before the first product of a group, behind the last write to registers that it uses.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kLeft) : "memory");
}
// Uses of the numbers stay behind the wait before this, and writes before the products after it.
template <int kTiles>
__device__ __forceinline__ void hold(float (&numbers)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("" : "+f"(numbers[n][i])::"memory");
    }
  }
}

// A matrix in shared memory: rows of 64 numbers of 16 bits (128 bytes), eight rows side by side in 1,024
// bytes at a multiple of 1,024; vector v of row r lies where v ^ r % 8 would (swizzle_128). Wider matrices
// are several such ones, `next_columns` bytes apart.
class SharedMatrix {
 public:
  __device__ __forceinline__ SharedMatrix(SharedAddress at, int next_columns)
      // From one lane: so the compiler knows that it is the same in all.
      : low_(__shfl_sync(0xffffffffu, at >> 4 | static_cast<unsigned>(next_columns >> 4) << 16,
                         0)) {}
  // From this byte on.
  __device__ __forceinline__ std::uint64_t from(int byte) const {
    return static_cast<std::uint64_t>(1u << 30 | 1024u >> 4) << 32 |
           (low_ + static_cast<unsigned>(byte >> 4));
  }

 private:
  std::uint32_t low_;
};

// sum (64 × 8·kTiles) = a (64 × 16) · b (16 × 8·kTiles) + (adds ? sum : 0). Each warp holds sixteen rows of
// sum and a, as multiply_add's (mma.cuh). kTransposed: b's rows lie in shared memory; else its columns.
#define POISE_WGMMA_64(OUTPUT, TYPES, TRANSPOSED)                                      \
  asm volatile(                                                                        \
      "{ .reg .pred adds; setp.ne.b32 adds, %37, 0;\n"                                 \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES                              \
      " {"                                                                             \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "         \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
      "}, {%32, %33, %34, %35}, %36, adds, 1, 1, " TRANSPOSED "; }\n"                  \
      : OUTPUT(sum[0][0]), OUTPUT(sum[0][1]), OUTPUT(sum[0][2]), OUTPUT(sum[0][3]),    \
        OUTPUT(sum[1][0]), OUTPUT(sum[1][1]), OUTPUT(sum[1][2]), OUTPUT(sum[1][3]),    \
        OUTPUT(sum[2][0]), OUTPUT(sum[2][1]), OUTPUT(sum[2][2]), OUTPUT(sum[2][3]),    \
        OUTPUT(sum[3][0]), OUTPUT(sum[3][1]), OUTPUT(sum[3][2]), OUTPUT(sum[3][3]),    \
        OUTPUT(sum[4][0]), OUTPUT(sum[4][1]), OUTPUT(sum[4][2]), OUTPUT(sum[4][3]),    \
        OUTPUT(sum[5][0]), OUTPUT(sum[5][1]), OUTPUT(sum[5][2]), OUTPUT(sum[5][3]),    \
        OUTPUT(sum[6][0]), OUTPUT(sum[6][1]), OUTPUT(sum[6][2]), OUTPUT(sum[6][3]),    \
        OUTPUT(sum[7][0]), OUTPUT(sum[7][1]), OUTPUT(sum[7][2]), OUTPUT(sum[7][3])     \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)))
#define POISE_WGMMA_128(OUTPUT, TYPES, TRANSPOSED)                                       \
  asm volatile(                                                                          \
      "{ .reg .pred adds; setp.ne.b32 adds, %69, 0;\n"                                   \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPES                               \
      " {"                                                                               \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"   \
      "}, {%64, %65, %66, %67}, %68, adds, 1, 1, " TRANSPOSED "; }\n"                    \
      : OUTPUT(sum[0][0]), OUTPUT(sum[0][1]), OUTPUT(sum[0][2]), OUTPUT(sum[0][3]),      \
        OUTPUT(sum[1][0]), OUTPUT(sum[1][1]), OUTPUT(sum[1][2]), OUTPUT(sum[1][3]),      \
        OUTPUT(sum[2][0]), OUTPUT(sum[2][1]), OUTPUT(sum[2][2]), OUTPUT(sum[2][3]),      \
        OUTPUT(sum[3][0]), OUTPUT(sum[3][1]), OUTPUT(sum[3][2]), OUTPUT(sum[3][3]),      \
        OUTPUT(sum[4][0]), OUTPUT(sum[4][1]), OUTPUT(sum[4][2]), OUTPUT(sum[4][3]),      \
        OUTPUT(sum[5][0]), OUTPUT(sum[5][1]), OUTPUT(sum[5][2]), OUTPUT(sum[5][3]),      \
        OUTPUT(sum[6][0]), OUTPUT(sum[6][1]), OUTPUT(sum[6][2]), OUTPUT(sum[6][3]),      \
        OUTPUT(sum[7][0]), OUTPUT(sum[7][1]), OUTPUT(sum[7][2]), OUTPUT(sum[7][3]),      \
        OUTPUT(sum[8][0]), OUTPUT(sum[8][1]), OUTPUT(sum[8][2]), OUTPUT(sum[8][3]),      \
        OUTPUT(sum[9][0]), OUTPUT(sum[9][1]), OUTPUT(sum[9][2]), OUTPUT(sum[9][3]),      \
        OUTPUT(sum[10][0]), OUTPUT(sum[10][1]), OUTPUT(sum[10][2]), OUTPUT(sum[10][3]),  \
        OUTPUT(sum[11][0]), OUTPUT(sum[11][1]), OUTPUT(sum[11][2]), OUTPUT(sum[11][3]),  \
        OUTPUT(sum[12][0]), OUTPUT(sum[12][1]), OUTPUT(sum[12][2]), OUTPUT(sum[12][3]),  \
        OUTPUT(sum[13][0]), OUTPUT(sum[13][1]), OUTPUT(sum[13][2]), OUTPUT(sum[13][3]),  \
        OUTPUT(sum[14][0]), OUTPUT(sum[14][1]), OUTPUT(sum[14][2]), OUTPUT(sum[14][3]),  \
        OUTPUT(sum[15][0]), OUTPUT(sum[15][1]), OUTPUT(sum[15][2]), OUTPUT(sum[15][3])   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)))

template <typename T, bool kTransposed, bool kAdds, int kTiles>
__device__ __forceinline__ void multiply_together(float (&sum)[kTiles][4],
                                                  const std::uint32_t (&a)[4], std::uint64_t b,
                                                  bool adds = kAdds) {
  static_assert(kTiles == 8 || kTiles == 16);
  constexpr bool kHalf = std::is_same_v<T, __half>;
  if constexpr (kTiles == 8 && kHalf && !kTransposed && !kAdds) {
    POISE_WGMMA_64("=f", "f16.f16", "0");
  } else if constexpr (kTiles == 8 && kHalf && !kTransposed && kAdds) {
    POISE_WGMMA_64("+f", "f16.f16", "0");
  } else if constexpr (kTiles == 8 && kHalf && kTransposed && kAdds) {
    POISE_WGMMA_64("+f", "f16.f16", "1");
  } else if constexpr (kTiles == 8 && !kHalf && !kTransposed && !kAdds) {
    POISE_WGMMA_64("=f", "bf16.bf16", "0");
  } else if constexpr (kTiles == 8 && !kHalf && !kTransposed && kAdds) {
    POISE_WGMMA_64("+f", "bf16.bf16", "0");
  } else if constexpr (kTiles == 8 && !kHalf && kTransposed && kAdds) {
    POISE_WGMMA_64("+f", "bf16.bf16", "1");
  } else if constexpr (kTiles == 16 && kHalf && kTransposed && kAdds) {
    POISE_WGMMA_128("+f", "f16.f16", "1");
  } else if constexpr (kTiles == 16 && !kHalf && kTransposed && kAdds) {
    POISE_WGMMA_128("+f", "bf16.bf16", "1");
  } else {
    static_assert(kTiles == 0, "no such product is used");
  }
}

#undef POISE_WGMMA_64
#undef POISE_WGMMA_128
#endif

}  // namespace poise::cuda
