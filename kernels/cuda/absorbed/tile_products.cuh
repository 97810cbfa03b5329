#pragma once
// The two kinds of products on tensor cores that absorbed attention is made of. A block of four warps makes 32 rows of
// outputs: of rows times rows, where the inputs of a sum lie side by side in both factors, or of rows times columns,
// where the second factor's are one below the other. Sixteen inputs at a time, in order, are one tensor core product,
// added to a float32 sum.

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reductions.cuh"

namespace poise::cuda {

inline constexpr int kProductThreads = 128;
inline constexpr int kTileRows = 32;

// A ring of stages in shared memory; copies of the next ones are always under way.
template <int kStages, int kStageBytes>
class StageRing {
 public:
  static constexpr int kBytes = kStages * kStageBytes;

  __device__ explicit StageRing(char* shared) : shared_(shared_address(shared)) {}

  // copy(stage, to) starts this thread's copies, multiply(from) follows once all threads' are there.
  template <typename Copy, typename Multiply>
  __device__ __forceinline__ void run(int stages, Copy copy, Multiply multiply) const {
    const auto start = [&](int stage) {
      if (stage < stages) {
        copy(stage, entry(stage));
      }
      end_copy_group();
    };
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      start(stage);
    }
    for (int stage = 0; stage < stages; ++stage) {
      wait_copy_groups<kStages - 2>();
      __syncthreads();
      start(stage + kStages - 1);
      multiply(entry(stage));
    }
  }

 private:
  __device__ SharedAddress entry(int stage) const {
    return shared_ + static_cast<unsigned>(stage % kStages * kStageBytes);
  }
  const SharedAddress shared_;
};

// Rows times rows: out[m, n] = Σ_k (upper[m, k] + lower[m, k]) · b[n, k], 32 by 64 of them. A stage has 64 inputs of
// the upper rows, the lower ones and those of b.
namespace by_rows {

constexpr int kColumns = 64;
constexpr int kDepth = 64;
constexpr int kSteps = kDepth / 16;
constexpr int kChunks = kDepth / 8;  // of 16 bytes
constexpr int kRowBytes = 2 * kDepth;
constexpr int kPass = kProductThreads / kChunks;  // rows that the threads copy at once
constexpr int kUpper = 0, kLower = kTileRows, kOthers = 2 * kTileRows;  // first rows
constexpr int kPasses = (kOthers + kColumns) / kPass;
using Ring = StageRing<3, (kOthers + kColumns) * kRowBytes>;
static_assert(Ring::kBytes <= 48 * 1024);

// Chunks of a row lie in an order of their own, so that eight rows of a matrix are in different banks.
__device__ __forceinline__ unsigned place_of(int row, int chunk) {
  return static_cast<unsigned>(row * kRowBytes + ((chunk ^ (row & 7)) << 4));
}

// Work has `upper(m)`, behind which `depth` numbers on the lower row lies, and `other(n)`: null where there is no such
// row. write(m, n, x, y) gets two neighbours of an output row, of rows that may not exist too.
template <typename T, typename Work>
__device__ __forceinline__ void multiply(const Work& work, int depth, char* shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp_row = static_cast<int>(threadIdx.x) / (2 * kWarp) * 16;
  const int warp_column = static_cast<int>(threadIdx.x) / kWarp % 2 * 32;
  const int row = static_cast<int>(threadIdx.x) / kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  const T* from[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int at = row + i * kPass;
    if (i * kPass < kLower) {
      from[i] = work.upper(at);
    } else if (i * kPass < kOthers) {
      from[i] = from[i - kLower / kPass] == nullptr ? nullptr : from[i - kLower / kPass] + depth;
    } else {
      from[i] = work.other(at - kOthers);
    }
  }
  float sums[4][4] = {};
  // What a step multiplies is read while the step before it is multiplied.
  struct Fragments {
    std::uint32_t upper[4], lower[4], other[2][4];
  };
  const auto load = [&](Fragments& to, SharedAddress stage, int step) {
    const int mine = warp_row + lane % 16;
    load_matrices(to.upper, stage + place_of(kUpper + mine, 2 * step + lane / 16));
    load_matrices(to.lower, stage + place_of(kLower + mine, 2 * step + lane / 16));
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int column = warp_column + 16 * pair + lane / 16 * 8 + lane % 8;
      load_matrices(to.other[pair], stage + place_of(kOthers + column, 2 * step + lane / 8 % 2));
    }
  };
  const auto add = [&](const Fragments& step) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const std::uint32_t* other = step.other[n / 2] + n % 2 * 2;
        multiply_add<T>(sums[n], part == 0 ? step.upper : step.lower, other[0], other[1]);
      }
    }
  };
  Ring(shared).run((depth + kDepth - 1) / kDepth,
                   [&](int stage, SharedAddress to) {
                     const int k = stage * kDepth + 8 * chunk;
#pragma unroll
                     for (int i = 0; i < kPasses; ++i) {
                       copy_16_async(to + place_of(row + i * kPass, chunk), from[i] + k,
                                     from[i] != nullptr && k < depth);
                     }
                   },
                   [&](SharedAddress stage) {
                     Fragments fragments[2];
                     load(fragments[0], stage, 0);
#pragma unroll
                     for (int step = 0; step < kSteps; ++step) {
                       if (step + 1 < kSteps) {
                         load(fragments[(step + 1) % 2], stage, step + 1);
                       }
                       add(fragments[step % 2]);
                     }
                   });
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      work.write(warp_row + lane / 4 + 8 * half, warp_column + 8 * n + 2 * (lane % 4),
                 sums[n][2 * half], sums[n][2 * half + 1]);
    }
  }
}

}  // namespace by_rows

// Rows times columns: out[m, n] = Σ_k a[m, k] · b[k, n], 32 by 128 of them, k in steps of sixteen. A stage has two
// steps of a, then of b.
namespace by_columns {

constexpr int kColumns = 128;
constexpr int kSteps = 2;
constexpr int kRowBytes = 2 * 16 * kSteps, kOtherBytes = 2 * kColumns;
constexpr int kChunks = kRowBytes / 16, kOtherChunks = kOtherBytes / 16;
constexpr int kOthers = kTileRows * kRowBytes;         // where b begins
constexpr int kPass = kProductThreads / kOtherChunks;  // rows of b that the threads copy at once
constexpr int kPasses = 16 * kSteps / kPass;
using Ring = StageRing<4, kOthers + 16 * kSteps * kOtherBytes>;
static_assert(kProductThreads == kTileRows * kChunks);

__device__ __forceinline__ unsigned place_of(int row, int chunk) {
  return static_cast<unsigned>(row * kRowBytes + ((chunk ^ (row / 2 & 3)) << 4));
}
__device__ __forceinline__ unsigned other_place(int row, int chunk) {
  return static_cast<unsigned>(kOthers + row * kOtherBytes + ((chunk ^ (row & 7)) << 4));
}

// What a thread copies: of one row of a, in each step, the eight inputs from `input` on; and eight columns of b.
struct Mine {
  const int row = static_cast<int>(threadIdx.x) / kChunks;
  const int input = static_cast<int>(threadIdx.x) % 2 * 8;
  const int column = static_cast<int>(threadIdx.x) % kOtherChunks * 8;
};

template <typename T>
class Sums {
 public:
  // Work has `row(step)`: this thread's inputs of its row, and `other(step, k)`: its columns of the step's input k; null
  // where there are none. All threads; shared memory is free again behind it.
  template <typename Work>
  __device__ __forceinline__ void add(const Work& work, int steps, char* shared) {
    const int row = static_cast<int>(threadIdx.x) / kChunks;
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
    const int other_row = static_cast<int>(threadIdx.x) / kOtherChunks;
    const int other_chunk = static_cast<int>(threadIdx.x) % kOtherChunks;
    const auto copy = [](SharedAddress to, const T* from) {
      copy_16_async(to, from, from != nullptr);
    };
    Ring(shared).run((steps + kSteps - 1) / kSteps,
                     [&](int stage, SharedAddress to) {
                       const int first = stage * kSteps;
                       const int mine = first + chunk / 2;
                       copy(to + place_of(row, chunk), mine < steps ? work.row(mine) : nullptr);
#pragma unroll
                       for (int i = 0; i < kPasses; ++i) {
                         const int k = other_row + i * kPass;
                         const int step = first + k / 16;
                         copy(to + other_place(k, other_chunk),
                              step < steps ? work.other(step, k % 16) : nullptr);
                       }
                     },
                     [&](SharedAddress stage) { multiply(stage); });
    __syncthreads();
  }

  // write(m, n, x, y) gets two neighbours of an output row, of rows and columns that may not exist too.
  template <typename Write>
  __device__ __forceinline__ void each(Write write) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          write(16 * m + lane_ / 4 + 8 * half, warp_column_ + 8 * n + 2 * (lane_ % 4),
                sums_[m][n][2 * half], sums_[m][n][2 * half + 1]);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void multiply(SharedAddress stage) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t rows[2][4], other[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        load_matrices(rows[m], stage + place_of(16 * m + lane_ % 16, 2 * step + lane_ / 16));
      }
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        load_matrices_transposed(
            other[pair],
            stage + other_place(16 * step + lane_ % 16, warp_column_ / 8 + 2 * pair + lane_ / 16));
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_add<T>(sums_[m][n], rows[m], other[n / 2][n % 2 * 2],
                          other[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }

  const int lane_ = static_cast<int>(threadIdx.x) % kWarp;
  const int warp_column_ = static_cast<int>(threadIdx.x) / kWarp * 32;
  float sums_[2][4][4] = {};
};

}  // namespace by_columns

// The number of T next to x. A float16 does not become infinite: what it lacks is the lower part's.
template <typename T>
__device__ __forceinline__ float upper_part(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    constexpr float kLargest = 65504;
    x = x > kLargest ? kLargest : x < -kLargest ? -kLargest : x;
  }
  return to_float(from_float<T>(x));
}

// Two numbers to their upper and lower parts; the latter lie `depth` numbers behind the former.
template <typename T>
__device__ __forceinline__ void write_parts(T* upper, int depth, float x, float y) {
  const float upper_x = upper_part<T>(x), upper_y = upper_part<T>(y);
  *reinterpret_cast<std::uint32_t*>(upper) = pack<T>(upper_x, upper_y);
  *reinterpret_cast<std::uint32_t*>(upper + depth) = pack<T>(x - upper_x, y - upper_y);
}

// Which tile a block of threads makes: the one of `first` counts fastest.
struct Tile {
  int first, second, third;

  __device__ Tile(unsigned first_count, unsigned second_count)
      : first(static_cast<int>(blockIdx.x % first_count)),
        second(static_cast<int>(blockIdx.x / first_count % second_count)),
        third(static_cast<int>(blockIdx.x / first_count / second_count)) {}
};

}  // namespace poise::cuda
