#include <algorithm>

#include "common/units.h"
#include "kernels/cuda/few_rows.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/numbers.cuh"

namespace poise::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kWarpOutputs = 16;
constexpr int kDepth = 128;          // inputs of a stage
constexpr int kChunks = kDepth / 8;  // of 16 bytes, in a row of a stage
constexpr int kRowBytes = 2 * kDepth;
// Below so many blocks of threads of four warps, two warps make more of them: an H200 has 132
// multiprocessors.
constexpr std::int64_t kEnoughBlocks = 120;

// Some warps multiply, sixteen outputs each, and some copy what they need next. kRowTiles: of eight
// rows. A stage holds its outputs' weights, then the rows' inputs.
template <int kRowTiles, int kWarps>
struct Stages {
  static constexpr int kCopying = kLanes * 4;  // threads
  static constexpr int kThreads = kLanes * kWarps + kCopying;
  static constexpr int kOutputs = kWarpOutputs * kWarps;
  static constexpr int kRows = kOutputs + 8 * kRowTiles;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kPieces = kRows * kChunks;  // 16 bytes each
  static_assert(kPieces % kCopying == 0);
};

// A ring of stages, as many as its memory holds: which are copied, and which may be copied to. What is
// under way has to outlast the way to memory and back, 3 µs for a stage when all multiprocessors ask.
constexpr int kMostStages = 16;
struct Barriers {
  std::uint64_t full[kMostStages], empty[kMostStages];
};
class RingPlace {
 public:
  __device__ explicit RingPlace(int stages) : stages_(stages) {}
  __device__ void advance() {
    if (++entry == stages_) {
      entry = 0;
      parity ^= 1;
    }
  }
  int entry = 0;
  unsigned parity = 0;  // of its phase

 private:
  int stages_;
};

// Chunks of a row lie in an order of their own, so that eight rows of a matrix are in different banks.
__device__ __forceinline__ unsigned place_of(int row, int chunk) {
  return static_cast<unsigned>(row * kRowBytes + ((chunk ^ (row & 7)) << 4));
}

template <typename T, int kRowTiles, int kWarps>
class Product {
  using Sizes = Stages<kRowTiles, kWarps>;

 public:
  __device__ Product(const FewRows& op, int ring, char* shared, Barriers& barriers)
      : op_(op),
        ring_(ring),
        shared_(shared_address(shared)),
        full_(shared_address(barriers.full)),
        empty_(shared_address(barriers.empty)),
        first_(static_cast<int>(blockIdx.x) * Sizes::kOutputs),
        stages_((op.inputs + kDepth - 1) / kDepth),
        warp_(static_cast<int>(threadIdx.x) / kLanes),
        lane_(static_cast<int>(threadIdx.x) % kLanes) {}

  // All threads.
  __device__ void run() {
    if (threadIdx.x < kMostStages) {
      begin_barrier(full_ + 8 * threadIdx.x, Sizes::kCopying);
      begin_barrier(empty_ + 8 * threadIdx.x, kWarps);
    }
    __syncthreads();
    if (warp_ >= kWarps) {
      copy_all();
    } else {
      multiply_all();
      write_out();
    }
  }

 private:
  __device__ void copy_all() {
    constexpr int kEach = Sizes::kPieces / Sizes::kCopying;
    const int thread = static_cast<int>(threadIdx.x) - kWarps * kLanes;
    const int chunk = thread % kChunks;  // the same in all of this thread's rows
    const T* from[kEach];
    bool exists[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = i * (Sizes::kCopying / kChunks) + thread / kChunks;
      const bool is_weight = row < Sizes::kOutputs;
      const int at = is_weight ? first_ + row : row - Sizes::kOutputs;
      exists[i] = is_weight ? at < op_.outputs : at < static_cast<int>(op_.rows);
      from[i] = (is_weight ? static_cast<const T*>(op_.weight) + at * std::int64_t{op_.inputs}
                           : static_cast<const T*>(op_.in) + at * op_.in_stride) +
                8 * chunk;
    }
    const SharedAddress to = shared_ + place_of(thread / kChunks, chunk);
    static_assert(Sizes::kCopying / kChunks % 8 == 0);  // so that all rows have chunks in one order
    RingPlace at(ring_);
    for (int stage = 0; stage < stages_; ++stage, at.advance()) {
      if (stage >= ring_) {
        wait(empty_ + 8 * at.entry, at.parity ^ 1);
      }
      const int column = stage * kDepth;
      const bool within = column + 8 * chunk < op_.inputs;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        copy_16_async(to + static_cast<unsigned>(at.entry * Sizes::kBytes +
                                                 i * (Sizes::kCopying / kChunks) * kRowBytes),
                      within && exists[i] ? from[i] + column : op_.weight, within && exists[i]);
      }
      arrive_after_copies(full_ + 8 * at.entry);
    }
  }

  __device__ void multiply_all() {
    if (op_.adds) {
      each_sum(
          [this](float& before, int row, int output) {
            before = static_cast<const float*>(op_.out)[row * op_.out_stride + output];
          },
          before_);
    }
    RingPlace at(ring_);
    wait(full_, 0);
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      load(fragments_[step], shared_, step);
    }
    for (int stage = 0; stage < stages_; ++stage) {
      const int entry = at.entry;
      at.advance();
      const bool last = stage + 1 == stages_;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        Fragments& later = fragments_[(step + kAhead) % (2 * kAhead)];
        if (step + kAhead < kSteps) {
          load(later, entry_at(entry), step + kAhead);
        } else if (!last) {
          if (step + kAhead == kSteps) {
            wait(full_ + 8 * at.entry, at.parity);
          }
          load(later, entry_at(at.entry), step + kAhead - kSteps);
        }
        multiply(fragments_[step % (2 * kAhead)]);
      }
      __syncwarp();
      if (lane_ == 0) {
        arrive(empty_ + 8 * entry);
      }
    }
  }

  __device__ SharedAddress entry_at(int entry) const {
    return shared_ + static_cast<unsigned>(entry * Sizes::kBytes);
  }

  // What a step multiplies. It is read while the steps before it do, as many as there are registers
  // for: from shared memory takes as long as a product.
  struct Fragments {
    std::uint32_t weights[4];
    std::uint32_t inputs[(kRowTiles + 1) / 2][4];
  };
  static constexpr int kSteps = kDepth / 16;
  static constexpr int kAhead = kRowTiles > 4 ? 1 : 2;
  static_assert(kSteps % (2 * kAhead) == 0);

  __device__ void load(Fragments& to, SharedAddress stage, int step) const {
    load_matrices(to.weights,
                  stage + place_of(warp_ * kWarpOutputs + lane_ % 16, 2 * step + lane_ / 16));
#pragma unroll
    for (int tile = 0; tile < kRowTiles; tile += 2) {
      const int second = tile + 1 < kRowTiles ? lane_ / 16 : 0;
      const int row = Sizes::kOutputs + 8 * (tile + second) + lane_ % 8;
      load_matrices(to.inputs[tile / 2], stage + place_of(row, 2 * step + lane_ / 8 % 2));
    }
  }

  __device__ void multiply(const Fragments& step) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const std::uint32_t* inputs = step.inputs[tile / 2] + tile % 2 * 2;
      multiply_add<T>(sums_[tile], step.weights, inputs[0], inputs[1]);
    }
  }

  // Calls fn(number, row, output) for each of this lane's numbers that exists.
  template <typename Fn>
  __device__ __forceinline__ void each_sum(Fn fn, float (&numbers)[kRowTiles][4]) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * tile + 2 * (lane_ % 4) + i % 2;
        const int output = first_ + warp_ * kWarpOutputs + lane_ / 4 + i / 2 * 8;
        if (row < static_cast<int>(op_.rows) && output < op_.outputs) {
          fn(numbers[tile][i], row, output);
        }
      }
    }
  }

  __device__ void write_out() {
    const T* bias = static_cast<const T*>(op_.bias);
    if (op_.adds) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int output = first_ + warp_ * kWarpOutputs + lane_ / 4 + i / 2 * 8;
          if (bias != nullptr && output < op_.outputs) {
            before_[tile][i] = __fadd_rn(to_float(bias[output]), before_[tile][i]);
          }
          sums_[tile][i] = __fadd_rn(sums_[tile][i], before_[tile][i]);
        }
      }
      bias = nullptr;
    }
    each_sum(
        [this, bias](float& sum, int row, int output) {
          float value = bias != nullptr ? __fadd_rn(sum, to_float(bias[output])) : sum;
          value = op_.relu && value < 0.0f ? 0.0f : value;
          const std::int64_t at = row * op_.out_stride + output;
          if (op_.wide) {
            static_cast<float*>(op_.out)[at] = value;
          } else {
            static_cast<T*>(op_.out)[at] = from_float<T>(value);
          }
        },
        sums_);
  }

  const FewRows& op_;
  const int ring_;
  const SharedAddress shared_, full_, empty_;
  const int first_, stages_, warp_, lane_;
  Fragments fragments_[2 * kAhead];
  float sums_[kRowTiles][4] = {};
  float before_[kRowTiles][4] = {};
};

template <typename T, int kRowTiles, int kWarps>
__global__ void __launch_bounds__(Stages<kRowTiles, kWarps>::kThreads, 2)
    few_rows_kernel(const __grid_constant__ FewRows op, int ring) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Barriers barriers;
  Product<T, kRowTiles, kWarps>(op, ring, shared, barriers).run();
}

struct Multiprocessors {
  int count = 0;
  int shared = 0;  // bytes of each that one block may have

  // One device a process.
  static const Multiprocessors& here() {
    static const Multiprocessors found = [] {
      int device = 0;
      Multiprocessors here;
      cuda_check(cudaGetDevice(&device));
      cuda_check(cudaDeviceGetAttribute(&here.count, cudaDevAttrMultiProcessorCount, device));
      cuda_check(
          cudaDeviceGetAttribute(&here.shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
      return here;
    }();
    return found;
  }
};

template <typename T, int kRowTiles, int kWarps>
void multiply(const FewRows& op, cudaStream_t stream) {
  using Sizes = Stages<kRowTiles, kWarps>;
  constexpr int kOthers = 2048;  // the barriers, and what CUDA takes of each block's
  const Multiprocessors& here = Multiprocessors::here();
  static const bool allowed =
      (allow_shared("multiply few rows", &few_rows_kernel<T, kRowTiles, kWarps>,
                    static_cast<std::size_t>(here.shared - kOthers)),
       true);
  static_cast<void>(allowed);
  const std::int64_t blocks = ceil_div(op.outputs, Sizes::kOutputs);
  const int room = blocks <= here.count ? here.shared - kOthers : here.shared / 2 - kOthers;
  constexpr int kFewestStages = 3;  // fewer are worth more than two blocks on a multiprocessor
  const int ring = std::min(kMostStages, room / Sizes::kBytes >= kFewestStages
                                             ? room / Sizes::kBytes
                                             : (here.shared - kOthers) / Sizes::kBytes);
  require(ring > 1, "a multiprocessor holds two stages");
  launch("multiply few rows", &few_rows_kernel<T, kRowTiles, kWarps>,
         {.blocks = blocks,
          .threads = Sizes::kThreads,
          .shared_bytes = static_cast<std::size_t>(ring * Sizes::kBytes)},
         stream, op, ring);
}

template <typename T, int kRowTiles>
void multiply_with_blocks(const FewRows& op, cudaStream_t stream) {
  if (ceil_div(op.outputs, std::int64_t{4} * kWarpOutputs) >= kEnoughBlocks) {
    multiply<T, kRowTiles, 4>(op, stream);
  } else {
    multiply<T, kRowTiles, 2>(op, stream);
  }
}

template <typename T>
void multiply_with_tiles(const FewRows& op, cudaStream_t stream) {
  if (op.rows <= 8) {
    multiply_with_blocks<T, 1>(op, stream);
  } else if (op.rows <= 16) {
    multiply_with_blocks<T, 2>(op, stream);
  } else if (op.rows <= 24) {
    multiply_with_blocks<T, 3>(op, stream);
  } else if (op.rows <= 32) {
    multiply_with_blocks<T, 4>(op, stream);
  } else if (op.rows <= 48) {
    multiply_with_blocks<T, 6>(op, stream);
  } else {
    multiply_with_blocks<T, 8>(op, stream);
  }
}

bool at_16_bytes(const void* data, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
}

}  // namespace

bool serves(const FewRows& op) {
  return op.dtype != DType::float32 && op.rows <= kMostFewRows && op.inputs > 0 &&
         at_16_bytes(op.in, op.in_stride) && at_16_bytes(op.weight, op.inputs) &&
         (op.wide || !op.adds);
}

void multiply_few_rows(const FewRows& op, cudaStream_t stream) {
  require(serves(op), "a product of few rows has 16-bit rows at 16 bytes");
  if (op.dtype == DType::float16) {
    multiply_with_tiles<__half>(op, stream);
  } else {
    multiply_with_tiles<__nv_bfloat16>(op, stream);
  }
}

}  // namespace poise::cuda
