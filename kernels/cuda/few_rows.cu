#include <algorithm>

#include "common/units.h"
#include "kernels/cuda/few_rows.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reductions.cuh"

namespace poise::cuda {
namespace {

constexpr int kWarpOutputs = 16;
constexpr int kDepth = 128;          // inputs of a stage
constexpr int kChunks = kDepth / 8;  // of 16 bytes, in a row of a stage
constexpr int kRowBytes = 2 * kDepth;
// On an H200, one warp copies 8 GB/s, however many copies it has in flight. A block alone on a
// multiprocessor needs 33 GB/s of weights and its rows' inputs, which are the same number of bytes
// for 32 outputs and 32 rows: eight warps. Of two large blocks, each has four.
constexpr int kCopyWarps = 8;
// With fewer thread blocks of four warps than this, blocks of two warps are used, which makes more of
// them: an H200 has 132 multiprocessors.
constexpr std::int64_t kEnoughBlocks = 120;

// Some warps multiply, sixteen outputs each, and some copy what they need next. kRowTiles: of eight
// rows. A stage holds its outputs' weights, then the rows' inputs. kBlocks: on a multiprocessor.
template <int kRowTiles, int kWarps, int kBlocks>
struct Stages {
  static constexpr int kCopying = kWarp * kCopyWarps / (kWarps > 2 ? kBlocks : 1);  // threads
  static constexpr int kThreads = kWarp * kWarps + kCopying;
  static constexpr int kOutputs = kWarpOutputs * kWarps;
  static constexpr int kRows = kOutputs + 8 * kRowTiles;
  static constexpr int kBytes = kRows * kRowBytes;
};

// A ring of stages, as many as its memory holds: which are copied, and which may be copied to.
constexpr int kMaxStages = 16;
struct Barriers {
  std::uint64_t full[kMaxStages], empty[kMaxStages];
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

template <typename T, int kRowTiles, int kWarps, int kBlocks>
class Product {
  using Sizes = Stages<kRowTiles, kWarps, kBlocks>;

 public:
  __device__ Product(const FewRows& op, int ring, char* shared, Barriers& barriers)
      : op_(op),
        ring_(ring),
        shared_(shared_address(shared)),
        full_(shared_address(barriers.full)),
        empty_(shared_address(barriers.empty)),
        first_(static_cast<int>(blockIdx.x) * Sizes::kOutputs),
        stages_((op.inputs + kDepth - 1) / kDepth),
        warp_(static_cast<int>(threadIdx.x) / kWarp),
        lane_(static_cast<int>(threadIdx.x) % kWarp) {}

  // All threads.
  __device__ void run() {
    if (threadIdx.x < kMaxStages) {
      begin_barrier(full_ + 8 * threadIdx.x, Sizes::kCopying);
      begin_barrier(empty_ + 8 * threadIdx.x, kWarp * kWarps);
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
  // Each thread copies one chunk of every kPass-th row, of the weight and then of the rows' inputs.
  __device__ void copy_all() {
    constexpr int kPass = Sizes::kCopying / kChunks;
    static_assert(kPass % 8 == 0);  // so that all its rows have chunks in one order
    static_assert(Sizes::kOutputs % kPass == 0);
    constexpr int kWeightRows = Sizes::kOutputs / kPass;
    constexpr int kInputRows = (8 * kRowTiles + kPass - 1) / kPass;
    const int thread = static_cast<int>(threadIdx.x) - kWarps * kWarp;
    const int chunk = thread % kChunks, row = thread / kChunks;
    const SharedAddress to = shared_ + place_of(row, chunk);
    const auto* weight =
        static_cast<const T*>(op_.weight) + (first_ + row) * std::int64_t{op_.inputs} + 8 * chunk;
    const auto* in = static_cast<const T*>(op_.in) + row * op_.in_stride + 8 * chunk;
    RingPlace at(ring_);
    for (int stage = 0; stage < stages_; ++stage, at.advance()) {
      if (stage >= ring_) {
        wait(empty_ + 8 * at.entry, at.parity ^ 1);
      }
      // Nothing is read of a row that does not exist.
      const bool within = stage * kDepth + 8 * chunk < op_.inputs;
      const int outputs = within ? op_.outputs - first_ - row : 0;
      const int rows = within ? static_cast<int>(op_.rows) - row : 0;
      const SharedAddress entry = to + static_cast<unsigned>(at.entry * Sizes::kBytes);
#pragma unroll
      for (int i = 0; i < kWeightRows; ++i) {
        copy_16_async(entry + static_cast<unsigned>(i * kPass * kRowBytes),
                      weight + std::int64_t{op_.inputs} * (i * kPass), i * kPass < outputs);
      }
#pragma unroll
      for (int i = 0; i < kInputRows; ++i) {
        if ((i + 1) * kPass <= 8 * kRowTiles || row + i * kPass < 8 * kRowTiles) {
          copy_16_async(entry + static_cast<unsigned>((Sizes::kOutputs + i * kPass) * kRowBytes),
                        in + op_.in_stride * (i * kPass), i * kPass < rows);
        }
      }
      arrive_after_copies(full_ + 8 * at.entry);
      weight += kDepth;
      in += kDepth;
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
      // Each lane arrives for itself: racecheck does not see what lanes agree on within a warp.
      arrive(empty_ + 8 * entry);
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

template <typename T, int kRowTiles, int kWarps, int kBlocks>
__global__ void __launch_bounds__(Stages<kRowTiles, kWarps, kBlocks>::kThreads, kBlocks)
    few_rows_kernel(const __grid_constant__ FewRows op, int ring) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Barriers barriers;
  Product<T, kRowTiles, kWarps, kBlocks>(op, ring, shared, barriers).run();
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

template <typename T, int kRowTiles, int kWarps, int kBlocks>
void multiply(const FewRows& op, cudaStream_t stream) {
  using Sizes = Stages<kRowTiles, kWarps, kBlocks>;
  constexpr int kOthers = 2048;  // the barriers, and what CUDA takes of each block's
  constexpr auto* kKernel = &few_rows_kernel<T, kRowTiles, kWarps, kBlocks>;
  const int whole = Multiprocessors::here().shared - kOthers;
  const int part = Multiprocessors::here().shared / kBlocks - kOthers;
  static const bool allowed =
      (allow_shared("multiply few rows", kKernel, static_cast<std::size_t>(whole)), true);
  static_cast<void>(allowed);
  constexpr int kFewestStages = 3;  // with fewer, more stages are worth more than a second block
  const int room = part / Sizes::kBytes >= kFewestStages ? part : whole;
  const int ring = std::min(kMaxStages, room / Sizes::kBytes);
  require(ring > 1, "a multiprocessor holds two stages");
  launch("multiply few rows", kKernel,
         {.blocks = ceil_div(op.outputs, Sizes::kOutputs),
          .threads = Sizes::kThreads,
          .shared_bytes = static_cast<std::size_t>(ring * Sizes::kBytes)},
         stream, op, ring);
}

template <typename T, int kRowTiles, int kWarps>
void multiply_with_warps(const FewRows& op, std::int64_t blocks, cudaStream_t stream) {
  if (blocks <= Multiprocessors::here().count) {
    multiply<T, kRowTiles, kWarps, 1>(op, stream);
  } else {
    multiply<T, kRowTiles, kWarps, 2>(op, stream);
  }
}

template <typename T, int kRowTiles>
void multiply_with_blocks(const FewRows& op, cudaStream_t stream) {
  const std::int64_t blocks = ceil_div(op.outputs, std::int64_t{4} * kWarpOutputs);
  if (blocks >= kEnoughBlocks) {
    multiply_with_warps<T, kRowTiles, 4>(op, blocks, stream);
  } else {
    multiply_with_warps<T, kRowTiles, 2>(op, ceil_div(op.outputs, std::int64_t{2} * kWarpOutputs),
                                         stream);
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
  } else {
    multiply_with_blocks<T, 8>(op, stream);
  }
}

}  // namespace

bool serves(const FewRows& op) {
  const auto in_order = [](const void* rows, std::int64_t stride) {
    return in_eights(static_cast<const __half*>(rows), stride);  // of either 16-bit type
  };
  return op.dtype != DType::float32 && op.rows <= kMaxFewRows && op.inputs > 0 &&
         in_order(op.in, op.in_stride) && in_order(op.weight, op.inputs) && (op.wide || !op.adds);
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
