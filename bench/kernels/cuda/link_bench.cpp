// How fast the link brings blocks while the GPU computes: copies from pinned memory in batches of 64 MiB,
// in pieces of several sizes, beside nothing, beside KV Gen's product (Llama-2-13B: rows of 5,120 numbers
// to 10,240), beside decode attention and beside a copy within the GPU's memory, each over and over.
//
//   poise-cuda-link-bench

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

#include "common/trouble.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/kernels_cuda.h"

namespace poise::bench {
namespace {

constexpr std::int64_t kMany = std::int64_t{4} << 30;  // bytes of pinned memory
constexpr std::int64_t kBatch = std::int64_t{64} << 20;
constexpr std::int64_t kRows = 16384, kInputs = 5120, kOutputs = 10240;
constexpr auto check_cuda = [](cudaError_t error) { cuda::cuda_check(error, "the bench"); };

class DeviceBytes {
 public:
  explicit DeviceBytes(std::int64_t bytes) {
    check_cuda(cudaMalloc(&data_, static_cast<std::size_t>(bytes)));
    check_cuda(cudaMemset(data_, 0x2c, static_cast<std::size_t>(bytes)));
  }
  ~DeviceBytes() { static_cast<void>(cudaFree(data_)); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  template <typename T = void>
  T* get() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

class Link {
 public:
  Link() : to_(2 * kBatch) {
    check_cuda(cudaHostAlloc(&host_, static_cast<std::size_t>(kMany), cudaHostAllocDefault));
    std::fill_n(static_cast<std::uint64_t*>(host_), kMany / 8, 0x2c2c2c2c2c2c2c2cu);
    check_cuda(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking));
    check_cuda(cudaStreamCreateWithFlags(&compute_, cudaStreamNonBlocking));
    check_cuda(cudaEventCreate(&begin_));
    check_cuda(cudaEventCreate(&end_));
  }
  ~Link() {
    static_cast<void>(cudaEventDestroy(begin_));
    static_cast<void>(cudaEventDestroy(end_));
    static_cast<void>(cudaStreamDestroy(copies_));
    static_cast<void>(cudaStreamDestroy(compute_));
    static_cast<void>(cudaFreeHost(host_));
  }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  cudaStream_t compute() const { return compute_; }

  // Bytes a second, while `work` (some of what takes `seconds`) runs over and over.
  double speed(std::int64_t piece, const std::function<void()>& work, double seconds) {
    constexpr int kBatches = 40;
    const double expected = static_cast<double>(kBatches * kBatch) / 40e9;
    const int times = work ? static_cast<int>(expected / seconds) + 1 : 0;
    for (int i = 0; i < times; ++i) {
      work();
    }
    check_cuda(cudaEventRecord(begin_, copies_));
    for (int i = 0; i < kBatches; ++i) {
      batch(i, piece);
    }
    check_cuda(cudaEventRecord(end_, copies_));
    check_cuda(cudaEventSynchronize(end_));
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin_, end_));
    check_cuda(cudaDeviceSynchronize());
    return static_cast<double>(kBatches * kBatch) / (static_cast<double>(milliseconds) * 1e-3);
  }

  double seconds_of(const std::function<void()>& work) {
    work();
    check_cuda(cudaEventRecord(begin_, compute_));
    for (int i = 0; i < 5; ++i) {
      work();
    }
    check_cuda(cudaEventRecord(end_, compute_));
    check_cuda(cudaEventSynchronize(end_));
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return static_cast<double>(milliseconds) * 1e-3 / 5;
  }

 private:
  // Pieces lie apart in host memory, as blocks of many requests do.
  void batch(int turn, std::int64_t piece) {
    const std::int64_t count = kBatch / piece;
    std::vector<void*> to;
    std::vector<const void*> from;
    std::vector<std::size_t> sizes;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t place = (turn * count + i) * 7919 % (kMany / piece);
      to.push_back(to_.get<char>() + turn % 2 * kBatch + i * piece);
      from.push_back(static_cast<const char*>(host_) + place * piece);
      sizes.push_back(static_cast<std::size_t>(piece));
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;
    check_cuda(cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), to.size(), &attributes,
                                    &first, 1, copies_));
  }

  DeviceBytes to_;
  void* host_ = nullptr;
  cudaStream_t copies_ = nullptr, compute_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

void run() {
  Link link;
  cuda::Gemms gemms;
  const DeviceBytes in(kRows * kInputs * 2), out(kRows * kOutputs * 2),
      weight(kInputs * kOutputs * 2);
  const auto product = [&] {
    gemms.run({.out = {out.get(), DType::float16, kOutputs},
               .in = {in.get(), DType::float16, kInputs},
               .weight = {.data = weight.get(),
                          .rows = kOutputs,
                          .cols = kInputs,
                          .dtype = DType::float16},
               .bias = nullptr,
               .residual = nullptr,
               .rows = kRows,
               .epilogue = Epilogue::none},
              link.compute());
  };
  // 32 sequences of 512 tokens, 40 heads of 128, in what the product wrote.
  std::vector<ContextBlock> blocks;
  std::vector<AttentionSequence> sequences;
  for (std::int32_t s = 0; s < 32; ++s) {
    sequences.push_back({s, 1, 511, s * 32});
    for (std::uint32_t b = 0; b < 32; ++b) {
      blocks.push_back({.slot = static_cast<std::uint32_t>(s) * 32 + b, .buffer = 0, .unused = {}});
    }
  }
  const DeviceBytes table(static_cast<std::int64_t>(blocks.size() * sizeof(ContextBlock)));
  const DeviceBytes all(static_cast<std::int64_t>(sequences.size() * sizeof(AttentionSequence)));
  check_cuda(cudaMemcpy(table.get(), blocks.data(), blocks.size() * sizeof(ContextBlock),
                        cudaMemcpyHostToDevice));
  check_cuda(cudaMemcpy(all.get(), sequences.data(), sequences.size() * sizeof(AttentionSequence),
                        cudaMemcpyHostToDevice));
  const DeviceBytes q(32 * kInputs * 2), attended(32 * kInputs * 2);
  const auto attention = [&] {
    cuda::attention({.out = attended.get(),
                     .q = q.get(),
                     .slots = {out.get(), nullptr, nullptr},
                     .dtype = DType::float16,
                     .row_dtype = DType::float16,
                     .blocks = table.get<ContextBlock>(),
                     .sequences = all.get<AttentionSequence>(),
                     .sequence_count = 32,
                     .heads = 40,
                     .kv_heads = 40,
                     .head_dim = 128,
                     .scale = 0.088f,
                     .max_new_tokens = 1,
                     .max_context = 512},
                    link.compute());
  };
  const auto copy = [&] {
    check_cuda(cudaMemcpyAsync(in.get(), out.get(), kRows * kInputs * 2, cudaMemcpyDeviceToDevice,
                               link.compute()));
  };
  const std::vector<std::pair<const char*, std::function<void()>>> works = {
      {"nothing", nullptr},
      {"KV Gen's product", product},
      {"attention", attention},
      {"a copy", copy}};
  fmt::print("{:<20}", "GB/s in pieces of");
  const std::vector<std::int64_t> pieces = {kBatch, 4 << 20, 1 << 20, 160 << 10};
  for (const std::int64_t piece : pieces) {
    fmt::print(" {:>8} KiB", piece >> 10);
  }
  fmt::print("\n");
  for (const auto& [name, work] : works) {
    const double seconds = work ? link.seconds_of(work) : 0;
    fmt::print("beside {:<20}", name);
    for (const std::int64_t piece : pieces) {
      link.speed(piece, work, seconds);
      fmt::print(" {:12.2f}", link.speed(piece, work, seconds) * 1e-9);
    }
    fmt::print("   ({:.0f} us each alone)\n", seconds * 1e6);
  }
}

}  // namespace
}  // namespace poise::bench

int main() {
  try {
    poise::bench::run();
    return 0;
  } catch (const std::exception& trouble) {
    fmt::print(stderr, "{}\n", trouble.what());
    return static_cast<int>(poise::Exit::cannot_start);
  }
}
