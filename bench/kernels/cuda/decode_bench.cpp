// What a layer of Llama-3-8B costs in decode on a GPU that holds everything: each operation alone, the
// layer's operations one behind the other as the executor starts them, and the same from a graph, where
// starting costs next to nothing. Every layer has weights and context of its own, as in a model. The limit
// is the GPU's memory (a copy on an H100 moves 3,000 GB/s).
//
//   poise-cuda-decode-bench [rows [context]]

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <exception>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "common/trouble.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/kernels_cuda.h"

namespace poise::bench {
namespace {

constexpr double kCopyBytes = 3000e9;
constexpr std::int32_t kLayers = 16;
constexpr std::int32_t kHidden = 4096, kFfn = 14336, kHeads = 32, kKvHeads = 8, kHeadDim = 128;
constexpr std::int32_t kKv = 2 * kKvHeads * kHeadDim;
constexpr DType kType = DType::bfloat16;
constexpr auto check_cuda = [](cudaError_t error) { cuda::cuda_check(error, "the bench"); };

class Memory {
 public:
  // Random bfloat16 numbers of about `size`.
  Memory(std::int64_t numbers, float size) : Memory(numbers * 2) {
    std::mt19937 random(static_cast<unsigned>(numbers));
    std::normal_distribution<float> normal(0, size);
    std::vector<std::uint16_t> some(1 << 18);
    for (std::uint16_t& one : some) {
      const float value = normal(random);
      one = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
    }
    for (std::int64_t at = 0; at < numbers; at += static_cast<std::int64_t>(some.size())) {
      const std::int64_t count =
          std::min<std::int64_t>(static_cast<std::int64_t>(some.size()), numbers - at);
      check_cuda(cudaMemcpy(static_cast<std::uint16_t*>(data_) + at, some.data(),
                            static_cast<std::size_t>(count) * 2, cudaMemcpyHostToDevice));
    }
  }
  explicit Memory(std::int64_t bytes) {
    check_cuda(cudaMalloc(&data_, static_cast<std::size_t>(bytes)));
    check_cuda(cudaMemset(data_, 0, static_cast<std::size_t>(bytes)));
  }
  template <typename T>
  explicit Memory(const std::vector<T>& values)
      : Memory(static_cast<std::int64_t>(values.size() * sizeof(T))) {
    check_cuda(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Memory() { static_cast<void>(cudaFree(data_)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* at(std::int64_t layer, std::int64_t numbers) const {
    return static_cast<std::uint16_t*>(data_) + layer * numbers;
  }
  template <typename T = void>
  T* get() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

template <typename T>
std::vector<T> made(std::int32_t count, const std::function<T(std::int32_t)>& make) {
  std::vector<T> all;
  for (std::int32_t i = 0; i < count; ++i) {
    all.push_back(make(i));
  }
  return all;
}

class Layers {
 public:
  Layers(std::int32_t rows, std::int32_t context)
      : rows_(rows),
        context_(context),
        blocks_((context + 16) / 16),
        kv_weight_(std::int64_t{kLayers} * kKv * kHidden, 0.02f),
        q_weight_(std::int64_t{kLayers} * kHidden * kHidden, 0.02f),
        o_weight_(std::int64_t{kLayers} * kHidden * kHidden, 0.02f),
        fc1_weight_(std::int64_t{kLayers} * 2 * kFfn * kHidden, 0.02f),
        fc2_weight_(std::int64_t{kLayers} * kFfn * kHidden, 0.02f),
        slots_(kLayers * slot_numbers(), 1.0f),
        norm_(kHidden, 1.0f),
        hidden_(std::int64_t{4} * rows * kHidden),
        act_(std::int64_t{rows} * kHidden, 1.0f),
        new_kv_(std::int64_t{rows} * kKv, 1.0f),
        q_(std::int64_t{rows} * kHidden, 1.0f),
        attended_(std::int64_t{rows} * kHidden, 1.0f),
        normed_(std::int64_t{rows} * kHidden, 1.0f),
        mlp_(std::int64_t{rows} * 2 * kFfn, 1.0f),
        places_(made<RotaryPlace>(
            rows,
            [&](std::int32_t) { return RotaryPlace{.position = context, .frequencies = 0}; })),
        frequencies_(made<float>(
            kHeadDim / 2, [](std::int32_t i) { return 1.0f / static_cast<float>(1 << i / 4); })),
        moves_(made<RowMove>(rows,
                             [&](std::int32_t r) {
                               return RowMove{.from = r,
                                              .to = std::int64_t{r} * blocks_ * 16 + context};
                             })),
        table_(made<ContextBlock>(
            rows * blocks_,
            [](std::int32_t i) {
              return ContextBlock{.slot = static_cast<std::uint32_t>(i), .buffer = 2, .unused = {}};
            })),
        sequences_(made<AttentionSequence>(rows, [&](std::int32_t r) {
          return AttentionSequence{r, 1, context, r * blocks_};
        })) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    check_cuda(cudaEventCreate(&begin_));
    check_cuda(cudaEventCreate(&end_));
  }
  ~Layers() {
    static_cast<void>(cudaEventDestroy(begin_));
    static_cast<void>(cudaEventDestroy(end_));
    static_cast<void>(cudaStreamDestroy(stream_));
  }
  Layers(const Layers&) = delete;
  Layers& operator=(const Layers&) = delete;

  void print() {
    const std::int64_t h = kHidden;
    struct Step {
      const char* name;
      std::function<void(std::int64_t)> run;
      double bytes;
    };
    const auto gemm = [&](void* out, DType type, std::int64_t width, void* in,
                          std::int64_t in_width, const Memory& weight, std::int32_t outputs,
                          std::int32_t inputs, std::int64_t layer, const float* residual) {
      gemms_.run({.out = {out, type, width},
                  .in = {in, kType, in_width},
                  .weight = {.data = weight.at(layer, std::int64_t{outputs} * inputs),
                             .rows = outputs,
                             .cols = inputs,
                             .dtype = kType},
                  .bias = nullptr,
                  .residual = residual,
                  .rows = rows_,
                  .epilogue = Epilogue::none},
                 stream_);
    };
    const auto norm = [&](const Memory& out) {
      cuda::rms_norm({.out = {out.get(), kType, h},
                      .in = hidden_.get<float>(),
                      .weight = norm_.get(),
                      .dtype = kType,
                      .rows = rows_,
                      .dim = kHidden,
                      .epsilon = 1e-5f},
                     stream_);
    };
    const auto rotate = [&](const Memory& rows, std::int64_t width, std::int32_t heads) {
      cuda::rotate({.inout = {rows.get(), kType, width},
                    .places = places_.get<RotaryPlace>(),
                    .frequencies = frequencies_.get<float>(),
                    .norm_weight = nullptr,
                    .dtype = kType,
                    .rows = rows_,
                    .heads = heads,
                    .head_dim = kHeadDim,
                    .rotary_dim = kHeadDim,
                    .scale = 1,
                    .epsilon = 1e-6f},
                   stream_);
    };
    const double each = 2.0 * rows_;  // bytes of one number of each row
    const std::vector<Step> steps = {
        {"norm", [&](std::int64_t) { norm(act_); }, 3 * each * kHidden},
        {"keys and values",
         [&](std::int64_t l) {
           gemm(new_kv_.get(), kType, kKv, act_.get(), h, kv_weight_, kKv, kHidden, l, nullptr);
         },
         2.0 * kKv * kHidden},
        {"rotate keys", [&](std::int64_t) { rotate(new_kv_, kKv, kKvHeads); }, each * kKv},
        {"queries",
         [&](std::int64_t l) {
           gemm(q_.get(), kType, h, act_.get(), h, q_weight_, kHidden, kHidden, l, nullptr);
         },
         2.0 * kHidden * kHidden},
        {"rotate queries", [&](std::int64_t) { rotate(q_, h, kHeads); }, 2 * each * kHidden},
        {"new rows to slots",
         [&](std::int64_t l) {
           cuda::scatter_rows({.out = static_cast<std::byte*>(slots_.at(l, slot_numbers())),
                               .in = new_kv_.get<std::byte>(),
                               .moves = moves_.get<RowMove>(),
                               .row_bytes = 2 * kKv,
                               .count = rows_},
                              stream_);
         },
         2 * each * kKv},
        {"attention",
         [&](std::int64_t l) {
           cuda::attention({.out = attended_.get(),
                            .q = q_.get(),
                            .slots = {nullptr, nullptr, slots_.at(l, slot_numbers())},
                            .dtype = kType,
                            .row_dtype = kType,
                            .blocks = table_.get<ContextBlock>(),
                            .sequences = sequences_.get<AttentionSequence>(),
                            .sequence_count = rows_,
                            .heads = kHeads,
                            .kv_heads = kKvHeads,
                            .head_dim = kHeadDim,
                            .scale = 0.088f,
                            .max_new_tokens = 1,
                            .max_context = context_ + 1},
                           stream_);
         },
         each * kKv * (context_ + 1)},
        {"output",
         [&](std::int64_t l) {
           gemm(hidden_.get(), DType::float32, h, attended_.get(), h, o_weight_, kHidden, kHidden,
                l, hidden_.get<float>());
         },
         2.0 * kHidden * kHidden},
        {"norm", [&](std::int64_t) { norm(normed_); }, 3 * each * kHidden},
        {"gate and up",
         [&](std::int64_t l) {
           gemm(mlp_.get(), kType, 2 * kFfn, normed_.get(), h, fc1_weight_, 2 * kFfn, kHidden, l,
                nullptr);
         },
         4.0 * kFfn * kHidden},
        {"gate",
         [&](std::int64_t) {
           cuda::gated_activation({.out = {mlp_.get(), kType, 2 * kFfn},
                                   .in = {mlp_.get(), kType, 2 * kFfn},
                                   .rows = rows_,
                                   .dim = kFfn,
                                   .activation = Epilogue::silu},
                                  stream_);
         },
         3 * each * kFfn},
        {"down",
         [&](std::int64_t l) {
           gemm(hidden_.get(), DType::float32, h, mlp_.get(), 2 * kFfn, fc2_weight_, kHidden, kFfn,
                l, hidden_.get<float>());
         },
         2.0 * kFfn * kHidden}};
    double sum = 0;
    double bytes = 0;
    for (const Step& step : steps) {
      const auto all = [&] {
        for (std::int64_t l = 0; l < kLayers; ++l) {
          step.run(l);
        }
      };
      all();
      const double time = seconds_of(captured(all)) / kLayers;
      line(step.name, time, step.bytes);
      sum += time;
      bytes += step.bytes;
    }
    line("their sum", sum, bytes);
    const auto layers = [&] {
      for (std::int64_t l = 0; l < kLayers; ++l) {
        for (const Step& step : steps) {
          step.run(l);
        }
      }
    };
    line("a layer, kernel by kernel", seconds_of(layers) / kLayers, bytes);
    line("a layer, from a graph", seconds_of(captured(layers)) / kLayers, bytes);
  }

 private:
  std::int64_t slot_numbers() const { return std::int64_t{rows_} * blocks_ * 16 * kKv; }

  void line(const char* name, double seconds, double bytes) const {
    fmt::print("Llama-3-8B, {} x {}: {:<28} {:8.1f} us {:7.0f} GB/s {:5.1f} % of a copy\n", rows_,
               context_, name, seconds * 1e6, bytes / seconds * 1e-9,
               100 * bytes / seconds / kCopyBytes);
  }

  // Runs of the work as one graph.
  std::function<void()> captured(const std::function<void()>& work) {
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    work();
    check_cuda(cudaStreamEndCapture(stream_, &graph));
    check_cuda(cudaGraphInstantiate(&ready, graph, 0));
    return [this, ready] { check_cuda(cudaGraphLaunch(ready, stream_)); };  // the bench ends soon
  }

  double seconds_of(const std::function<void()>& work) {
    float best = 1e30f;
    work();
    for (int run = 0; run < 5; ++run) {
      check_cuda(cudaEventRecord(begin_, stream_));
      work();
      check_cuda(cudaEventRecord(end_, stream_));
      check_cuda(cudaEventSynchronize(end_));
      float milliseconds = 0;
      check_cuda(cudaEventElapsedTime(&milliseconds, begin_, end_));
      best = std::min(best, milliseconds);
    }
    return static_cast<double>(best) * 1e-3;
  }

  cuda::Gemms gemms_;
  const std::int32_t rows_, context_, blocks_;
  Memory kv_weight_, q_weight_, o_weight_, fc1_weight_, fc2_weight_, slots_, norm_;
  Memory hidden_, act_, new_kv_, q_, attended_, normed_, mlp_;
  Memory places_, frequencies_, moves_, table_, sequences_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace
}  // namespace poise::bench

int main(int argc, char** argv) {
  try {
    poise::bench::Layers(argc > 1 ? std::atoi(argv[1]) : 56, argc > 2 ? std::atoi(argv[2]) : 1040)
        .print();
    return 0;
  } catch (const std::exception& trouble) {
    fmt::print(stderr, "{}\n", trouble.what());
    return static_cast<int>(poise::Exit::cannot_start);
  }
}
