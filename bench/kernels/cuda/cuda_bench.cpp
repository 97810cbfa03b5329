// How fast the CUDA kernels are at the shapes of OPT-6.7B, OPT-30B, Llama-3-8B and Llama-3-70B, each
// beside the limit of this card that it meets first: memory (a large copy, read and written bytes
// counted) or tensor cores (a large product of the same type). Both are measured first, timed as the
// kernels are.
//
//   poise-cuda-kernels-bench [attention|absorbed|llama-attention|rows|llama-rows|sample ...]

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include "common/trouble.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/kernels_cuda.h"

namespace poise::bench {
namespace {

constexpr std::int64_t kRows = 8192;
constexpr auto check_cuda = [](cudaError_t error) { cuda::cuda_check(error, "the bench"); };

struct Model {
  const char* name;
  std::int32_t heads, kv_heads, hidden, ffn;

  std::int64_t kv_dim() const;
};
constexpr Model kModels[] = {{"OPT-6.7B", 32, 32, 4096, 16384}, {"OPT-30B", 56, 56, 7168, 28672}};
// Grouped queries, rotary positions, gated MLPs.
constexpr Model kLlamas[] = {{"Llama-3-8B", 32, 8, 4096, 14336},
                             {"Llama-3-70B", 64, 8, 8192, 28672}};
constexpr std::int32_t kHeadDim = 128;
constexpr std::int32_t kVocabulary = 50272;

std::int64_t Model::kv_dim() const { return std::int64_t{kv_heads} * kHeadDim; }

class Memory {
 public:
  // Every byte is `fill`: 0x2c2c is 0.065 in float16, 0x2c2c2c2c is 2e-12 in float32.
  explicit Memory(std::int64_t bytes, int fill = 0x2c) {
    check_cuda(cudaMalloc(&data_, static_cast<std::size_t>(bytes)));
    check_cuda(cudaMemset(data_, fill, static_cast<std::size_t>(bytes)));
  }
  // Numbers of a normal distribution: on equal ones the tensor cores draw less power and run faster. They repeat after
  // `period` bytes.
  Memory(std::int64_t count, DType dtype, std::size_t period = std::size_t{1} << 20)
      : Memory(count * size_of(dtype).n) {
    std::mt19937 random(static_cast<unsigned>(count));
    std::normal_distribution<float> normal;
    std::vector<std::byte> some(period);
    for (std::size_t at = 0; at < some.size(); at += static_cast<std::size_t>(size_of(dtype).n)) {
      const float value = normal(random);
      const std::uint16_t narrow =
          dtype == DType::float16 ? to_half(value).bits : to_bfloat16(value).bits;
      std::memcpy(&some[at], dtype == DType::float32 ? static_cast<const void*>(&value) : &narrow,
                  static_cast<std::size_t>(size_of(dtype).n));
    }
    const auto bytes = static_cast<std::size_t>(count * size_of(dtype).n);
    check_cuda(
        cudaMemcpy(data_, some.data(), std::min(some.size(), bytes), cudaMemcpyHostToDevice));
    for (std::size_t at = some.size(); at < bytes; at *= 2) {
      check_cuda(cudaMemcpy(get<std::byte>() + at, data_, std::min(at, bytes - at),
                            cudaMemcpyDeviceToDevice));
    }
  }
  template <typename T>
  explicit Memory(const std::vector<T>& values)
      : Memory(static_cast<std::int64_t>(values.size() * sizeof(T))) {
    check_cuda(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Memory() { static_cast<void>(cudaFree(data_)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <typename T = void>
  T* get() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

// Seconds of one launch: the best of several runs of a few launches in a row.
template <typename Fn>
double seconds_of(Fn launch) {
  constexpr int kRuns = 7;
  constexpr int kLaunches = 5;
  cudaEvent_t begin, end;
  check_cuda(cudaEventCreate(&begin));
  check_cuda(cudaEventCreate(&end));
  launch();
  float best = 1e30f;
  for (int run = 0; run < kRuns; ++run) {
    check_cuda(cudaEventRecord(begin));
    for (int i = 0; i < kLaunches; ++i) {
      launch();
    }
    check_cuda(cudaEventRecord(end));
    check_cuda(cudaEventSynchronize(end));
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin, end));
    best = std::min(best, milliseconds);
  }
  check_cuda(cudaEventDestroy(begin));
  check_cuda(cudaEventDestroy(end));
  return static_cast<double>(best) * 1e-3 / kLaunches;
}

// What this card reaches.
class Limits {
 public:
  void measure() {
    copy_ = measured_copy();
    float16_ = measured_product(DType::float16);
    bfloat16_ = measured_product(DType::bfloat16);
  }
  double copy() const { return copy_; }  // bytes a second
  // FLOP a second; float32's attention is far from either.
  double product(DType dtype) const { return dtype == DType::bfloat16 ? bfloat16_ : float16_; }

 private:
  static double measured_copy() {
    constexpr std::size_t kBytes = std::size_t{1} << 30;
    const Memory from(kBytes);
    const Memory to(kBytes);
    return 2.0 * kBytes / seconds_of([&] {
             check_cuda(cudaMemcpyAsync(to.get(), from.get(), kBytes, cudaMemcpyDeviceToDevice));
           });
  }
  // The fastest algorithm of cuBLASLt.
  static double measured_product(DType dtype) {
    constexpr std::int32_t kSide = 8192;
    constexpr std::int64_t kNumbers = std::int64_t{kSide} * kSide;
    constexpr std::size_t kPeriod = std::size_t{16} << 20;  // equal rows are far from each other
    const Memory in(kNumbers, dtype, kPeriod);
    const Memory weight(kNumbers, dtype, kPeriod);
    const Memory out(kNumbers * size_of(dtype).n);
    const Gemm op{.out = {.data = out.get(), .dtype = dtype, .stride = kSide},
                  .in = {.data = in.get(), .dtype = dtype, .stride = kSide},
                  .weight = {.data = weight.get(), .rows = kSide, .cols = kSide, .dtype = dtype},
                  .rows = kSide,
                  .epilogue = Epilogue::none};
    cuda::Gemms gemms;
    double best = 0;
    for (const cuda::Algorithm& algorithm : gemms.algorithms(op)) {
      const double seconds = seconds_of([&] { gemms.run_with(op, algorithm, nullptr); });
      best = std::max(best, 2.0 * kNumbers * kSide / seconds);
    }
    check(best > 0, "cuBLASLt multiplies large matrices");
    return best;
  }

  double copy_ = 0, float16_ = 0, bfloat16_ = 0;
} limits;

void print_bytes(const std::string& name, double seconds, double bytes) {
  fmt::print("{:<52} {:9.1f} us {:8.0f} GB/s    {:5.1f} % of a copy\n", name, seconds * 1e6,
             bytes / seconds * 1e-9, 100 * bytes / seconds / limits.copy());
}
void print_flops(const std::string& name, double seconds, double flops, double bytes,
                 DType dtype) {
  fmt::print("{:<52} {:9.1f} us {:8.1f} TFLOP/s {:5.1f} % of a product, {:.1f} % of a copy\n", name,
             seconds * 1e6, flops / seconds * 1e-12, 100 * flops / seconds / limits.product(dtype),
             100 * bytes / seconds / limits.copy());
}

void bench_attention(const Model& model, std::int32_t sequences, std::int32_t context,
                     std::int32_t fresh, DType dtype, std::int32_t window = 0) {
  const std::int32_t blocks_each = static_cast<std::int32_t>(ceil_div(context + fresh, 16));
  std::vector<ContextBlock> blocks;
  std::vector<AttentionSequence> table;
  const std::uint32_t count = static_cast<std::uint32_t>(sequences * blocks_each);
  for (std::int32_t s = 0; s < sequences; ++s) {
    table.push_back({s * fresh, fresh, context, static_cast<std::int32_t>(blocks.size())});
    for (std::int32_t b = 0; b < blocks_each; ++b) {
      // Neighbours lie apart, as in a buffer that requests came to and left.
      const auto slot = static_cast<std::uint32_t>(blocks.size() * 17 % count);
      blocks.push_back({.slot = count % 17 == 0 ? static_cast<std::uint32_t>(blocks.size()) : slot,
                        .buffer = 0,
                        .unused = {}});
    }
  }
  const std::int64_t size = size_of(dtype).n;
  const Memory slots(std::int64_t{count} * 16 * 2 * model.kv_dim(), dtype);
  const Memory q(std::int64_t{sequences} * fresh * model.hidden, dtype);
  const Memory out(std::int64_t{sequences} * fresh * model.hidden * size);
  const Memory blocks_there(blocks);
  const Memory table_there(table);
  const double seconds = seconds_of([&] {
    cuda::attention({.out = out.get(),
                     .q = q.get(),
                     .slots = {slots.get(), nullptr, nullptr},
                     .dtype = dtype,
                     .row_dtype = dtype,
                     .blocks = blocks_there.get<ContextBlock>(),
                     .sequences = table_there.get<AttentionSequence>(),
                     .sequence_count = sequences,
                     .heads = model.heads,
                     .kv_heads = model.kv_heads,
                     .head_dim = kHeadDim,
                     .scale = 0.088f,
                     .max_new_tokens = fresh,
                     .max_context = context + fresh,
                     .window = window},
                    nullptr);
  });
  const std::string name =
      fmt::format("{} attention {} x ({} + {}) {}{}", model.name, sequences, context, fresh,
                  name_of(dtype), window > 0 ? fmt::format(", window {}", window) : "");
  const double rows = static_cast<double>(sequences) * fresh;
  double seen = 0;  // positions, by the rows of one sequence
  for (std::int32_t i = 0; i < fresh; ++i) {
    seen += window > 0 ? std::min(window, context + i + 1) : context + i + 1;
  }
  const double read = window > 0 ? std::min(context + fresh, window + fresh - 1) : context + fresh;
  const double flops = 4 * sequences * seen * model.hidden;
  const double bytes =
      static_cast<double>(size) *
      (2.0 * sequences * read * static_cast<double>(model.kv_dim()) + 2 * rows * model.hidden);
  if (fresh > 1) {  // either limit may be the one that it meets first
    print_flops(name, seconds, flops, bytes, dtype);
  } else {
    print_bytes(name, seconds, bytes);
  }
}

void bench_opt_attention() {
  for (const Model& model : kModels) {
    for (const auto& [sequences, context] :
         {std::pair{8, 1024}, {9, 1040}, {20, 1040}, {1, 1040}, {64, 128}, {1, 8192}}) {
      bench_attention(model, sequences, context - 1, 1, DType::float16);
    }
    bench_attention(model, 128, 1024, 1, DType::float16);
    bench_attention(model, 8, 0, 1024, DType::float16);
    bench_attention(model, 8, 0, 1024, DType::bfloat16);
    bench_attention(model, 8, 1024, 128, DType::float16);
    bench_attention(model, 8, 1023, 1, DType::float32);
  }
}

// Decoding rows that attend activations as they are; the limit is reading these and the weights once.
void bench_absorbed(const Model& model, std::int32_t rows, std::int32_t context, DType dtype) {
  const auto blocks_each = static_cast<std::int32_t>(ceil_div(context, 16));
  std::vector<ContextBlock> blocks;
  std::vector<AttentionSequence> table;
  for (std::int32_t row = 0; row < rows; ++row) {
    table.push_back({row, 1, context - 1, static_cast<std::int32_t>(blocks.size())});
    for (std::int32_t b = 0; b < blocks_each; ++b) {
      blocks.push_back({.slot = static_cast<std::uint32_t>(blocks.size()), .buffer = 3});
    }
  }
  const std::int64_t size = size_of(dtype).n, h = model.hidden;
  const Memory act(std::int64_t{rows} * blocks_each * 16 * h, dtype), q(rows * h, dtype);
  const Memory weight(2 * h * h, dtype), bias(2 * h, dtype);
  const Memory out(rows * h * size);
  const Memory scratch(rows * model.heads * absorbed_row_floats(model.hidden, kHeadDim, context) *
                       4);
  const Memory blocks_there(blocks), table_there(table);
  const double seconds = seconds_of([&] {
    cuda::absorbed_attention({.attention = {.out = out.get(),
                                            .q = q.get(),
                                            .slots = {},
                                            .dtype = dtype,
                                            .row_dtype = dtype,
                                            .blocks = blocks_there.get<ContextBlock>(),
                                            .sequences = table_there.get<AttentionSequence>(),
                                            .sequence_count = rows,
                                            .heads = model.heads,
                                            .kv_heads = model.heads,
                                            .head_dim = kHeadDim,
                                            .scale = 0.001f,
                                            .max_new_tokens = 1,
                                            .max_context = context},
                              .act = act.get(),
                              .w_kv = {weight.get(), 2 * model.hidden, model.hidden, dtype},
                              .b_kv = bias.get(),
                              .scratch = scratch.get<float>(),
                              .scratch_rows = rows},
                             nullptr);
  });
  print_bytes(
      fmt::format("{} absorbed attention {} x {} {}", model.name, rows, context, name_of(dtype)),
      seconds, static_cast<double>(size * (std::int64_t{rows} * context * h + 2 * h * h)));
}

void bench_llama_attention() {
  for (const Model& model : kLlamas) {
    for (const auto& [sequences, context] :
         {std::pair{128, 1024}, {32, 1024}, {8, 1024}, {1, 1040}, {1, 8192}, {256, 8192}}) {
      bench_attention(model, sequences, context - 1, 1, DType::bfloat16);
    }
    bench_attention(model, 8, 0, 1024, DType::bfloat16);
    bench_attention(model, 1, 0, 8192, DType::bfloat16);
    bench_attention(model, 4, 0, 2048, DType::bfloat16);
    bench_attention(model, 8, 1024, 128, DType::bfloat16);
    bench_attention(model, 32, 8191, 1, DType::bfloat16, 4096);
    bench_attention(model, 1, 0, 8192, DType::bfloat16, 4096);
  }
}

void bench_rows(const Model& model) {
  const std::int64_t h = model.hidden;
  const auto dim = static_cast<std::int32_t>(h);
  const auto rows = static_cast<std::int32_t>(kRows);
  const double numbers = static_cast<double>(kRows * h);
  const Memory hidden(kRows * h * 4);
  const Memory half_rows(kRows * 2 * h * 2);
  const Memory more_rows(kRows * 2 * h * 2);
  const Memory parameters(h * 2);
  const auto named = [&](const char* what) { return fmt::format("{} {}", model.name, what); };

  print_bytes(named("layer_norm 8192 rows to float16"), seconds_of([&] {
                cuda::layer_norm({.out = {half_rows.get(), DType::float16, h},
                                  .in = hidden.get<float>(),
                                  .weight = parameters.get(),
                                  .bias = parameters.get(),
                                  .dtype = DType::float16,
                                  .rows = rows,
                                  .dim = dim,
                                  .epsilon = 1e-5f},
                                 nullptr);
              }),
              6 * numbers);
  print_bytes(named("layer_norm 128 rows to float16"), seconds_of([&] {
                cuda::layer_norm({.out = {half_rows.get(), DType::float16, h},
                                  .in = hidden.get<float>(),
                                  .weight = parameters.get(),
                                  .bias = parameters.get(),
                                  .dtype = DType::float16,
                                  .rows = 128,
                                  .dim = dim,
                                  .epsilon = 1e-5f},
                                 nullptr);
              }),
              6.0 * 128 * static_cast<double>(h));
  print_bytes(named("convert 8192 rows to float16"), seconds_of([&] {
                cuda::convert(
                    {{half_rows.get(), DType::float16, h}, hidden.get<float>(), rows, dim},
                    nullptr);
              }),
              6 * numbers);
  print_bytes(named("add_bias 8192 rows in place"), seconds_of([&] {
                cuda::add_bias(hidden.get<float>(), hidden.get<float>(), parameters.get(),
                               DType::float16, kRows, h, h, nullptr);
              }),
              8 * numbers);
  std::vector<RowMove> moves;
  for (std::int64_t r = 0; r < kRows; ++r) {
    moves.push_back({r, (r * 4099) % kRows});
  }
  const Memory moves_there(moves);
  print_bytes(named("scatter_rows 8192 rows of K and V"), seconds_of([&] {
                cuda::scatter_rows({.out = more_rows.get<std::byte>(),
                                    .in = half_rows.get<std::byte>(),
                                    .moves = moves_there.get<RowMove>(),
                                    .row_bytes = 4 * h,
                                    .count = rows},
                                   nullptr);
              }),
              8 * numbers);
  const std::vector<std::int32_t> ids(static_cast<std::size_t>(kRows), 7);
  const Memory ids_there(ids);
  print_bytes(named("embed_tokens 8192 rows"), seconds_of([&] {
                cuda::embed_tokens({hidden.get<float>(),
                                    ids_there.get<std::int32_t>(),
                                    {half_rows.get(), rows, dim, DType::float16},
                                    rows},
                                   nullptr);
              }),
              6 * numbers);
  print_bytes(named("add_positions 8192 rows"), seconds_of([&] {
                cuda::add_positions({hidden.get<float>(), ids_there.get<std::int32_t>(),
                                     half_rows.get(), DType::float16, rows, dim, 2},
                                    nullptr);
              }),
              8 * numbers);
  const Memory mlp(kRows * model.ffn * 2);
  for (const auto& [epilogue, name] :
       {std::pair{Epilogue::gelu, "gelu"}, {Epilogue::gelu_tanh, "gelu_tanh"}}) {
    print_bytes(named(fmt::format("{} 8192 MLP rows of float16", name).c_str()), seconds_of([&] {
                  cuda::activate({mlp.get(), DType::float16, model.ffn}, kRows, model.ffn, epilogue,
                                 nullptr);
                }),
                4.0 * kRows * model.ffn);
  }
}

// The matrix of a Llama's gate and up, unpacked to bfloat16.
void bench_unpack(const Model& model) {
  const auto rows = static_cast<std::int32_t>(2 * model.ffn);
  const auto cols = static_cast<std::int32_t>(model.hidden);
  const double numbers = static_cast<double>(rows) * cols;
  const Memory out(2 * static_cast<std::int64_t>(numbers));
  for (const Codes codes : {Codes::int4, Codes::int8, Codes::float8, Codes::bfloat12}) {
    const PackedFormat format{.codes = codes, .scale_dtype = DType::bfloat16, .group = 128};
    const Bytes packed = packed_bytes(format, rows, cols);
    const Memory panels(packed.n);
    print_bytes(fmt::format("{} unpack {} x {} of {}", model.name, rows, cols, name_of(codes)),
                seconds_of([&] {
                  cuda::unpack({.out = out.get(),
                                .weight = {.data = panels.get(),
                                           .rows = rows,
                                           .cols = cols,
                                           .dtype = DType::bfloat16,
                                           .packed = format}},
                               nullptr);
                }),
                static_cast<double>(packed.n) + 2 * numbers);
  }
}

// What a Llama's rows pass through, as bfloat16.
void bench_llama_rows(const Model& model) {
  const std::int64_t h = model.hidden;
  const auto dim = static_cast<std::int32_t>(h);
  const auto named = [&](const std::string& what) {
    return fmt::format("{} {}", model.name, what);
  };
  const Memory hidden(kRows * h * 4);
  const Memory out(kRows * h * 2);
  const Memory parameters(h * 2);
  for (const std::int64_t rows : {kRows, std::int64_t{128}}) {
    print_bytes(named(fmt::format("rms_norm {} rows", rows)), seconds_of([&] {
                  cuda::rms_norm({.out = {out.get(), DType::bfloat16, h},
                                  .in = hidden.get<float>(),
                                  .weight = parameters.get(),
                                  .dtype = DType::bfloat16,
                                  .rows = static_cast<std::int32_t>(rows),
                                  .dim = dim,
                                  .epsilon = 1e-5f},
                                 nullptr);
                }),
                6 * static_cast<double>(rows * h));
  }

  const std::int64_t slots = 16 * kRows;  // rows of regenerated blocks
  const Memory kv(slots * 2 * model.kv_dim() * 2);
  std::vector<RotaryPlace> places;
  for (std::int64_t r = 0; r < slots; ++r) {
    places.push_back({.position = static_cast<std::int32_t>(r % 4099), .frequencies = 0});
  }
  std::vector<float> frequencies;
  for (int i = 0; i < kHeadDim / 2; ++i) {
    frequencies.push_back(1.0f / static_cast<float>(1 << (i / 4)));
  }
  const Memory places_there(places);
  const Memory frequencies_there(frequencies);
  const auto rotate = [&](const char* what, void* rows, std::int64_t count, std::int64_t stride,
                          std::int32_t heads, bool norm) {
    print_bytes(named(fmt::format("rotate {} of {} rows{}", what, count, norm ? ", normed" : "")),
                seconds_of([&] {
                  cuda::rotate({.inout = {rows, DType::bfloat16, stride},
                                .places = places_there.get<RotaryPlace>(),
                                .frequencies = frequencies_there.get<float>(),
                                .norm_weight = norm ? parameters.get() : nullptr,
                                .dtype = DType::bfloat16,
                                .rows = count,
                                .heads = heads,
                                .head_dim = kHeadDim,
                                .rotary_dim = kHeadDim,
                                .scale = 1,
                                .epsilon = 1e-6f},
                               nullptr);
                }),
                4.0 * static_cast<double>(count * heads) * kHeadDim);
  };
  rotate("queries", out.get(), kRows, h, model.heads, false);
  rotate("queries", out.get(), kRows, h, model.heads, true);
  rotate("queries", out.get(), 128, h, model.heads, false);
  rotate("keys", kv.get(), slots, 2 * model.kv_dim(), model.kv_heads, false);
  rotate("keys", kv.get(), slots, 2 * model.kv_dim(), model.kv_heads, true);

  const Memory both(kRows * 2 * model.ffn * 2);
  for (const std::int64_t rows : {kRows, std::int64_t{128}}) {
    print_bytes(named(fmt::format("gated silu {} rows", rows)), seconds_of([&] {
                  cuda::gated_activation({.out = {both.get(), DType::bfloat16, 2 * model.ffn},
                                          .in = {both.get(), DType::bfloat16, 2 * model.ffn},
                                          .rows = static_cast<std::int32_t>(rows),
                                          .dim = model.ffn,
                                          .activation = Epilogue::silu},
                                         nullptr);
                }),
                6.0 * static_cast<double>(rows) * model.ffn);
  }
}

void bench_sample(const char* name, const SampleRow& how) {
  constexpr std::int32_t kSampled = 128;
  std::vector<float> logits(static_cast<std::size_t>(kSampled) * kVocabulary);
  std::uint32_t state = 1;
  for (float& x : logits) {  // a rough bell, ±8
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      state = state * 1664525u + 1013904223u;
      sum += static_cast<float>(state >> 8) * 0x1p-24f;
    }
    x = 4 * (sum - 2);
  }
  std::vector<SampleRow> rows(kSampled, how);
  for (std::int32_t r = 0; r < kSampled; ++r) {
    rows[static_cast<std::size_t>(r)].row = r;
    rows[static_cast<std::size_t>(r)].seed = static_cast<std::uint64_t>(r);
  }
  const Memory logits_there(logits);
  const Memory rows_there(rows);
  const Memory out(kSampled * static_cast<std::int64_t>(sizeof(SampledRow)));
  print_bytes(fmt::format("sample 128 x {} {}", kVocabulary, name), seconds_of([&] {
                cuda::sample_tokens({out.get<SampledRow>(), rows_there.get<SampleRow>(),
                                     logits_there.get<float>(), nullptr, kSampled, kVocabulary},
                                    nullptr);
              }),
              4.0 * kSampled * kVocabulary);
}

void bench_sample() {
  bench_sample("greedy", {.temperature = 0, .top_p = 1, .logprobs = -1, .target = -1});
  bench_sample("greedy, logprobs 0", {.temperature = 0, .top_p = 1, .logprobs = 0, .target = -1});
  bench_sample("greedy, logprobs 5", {.temperature = 0, .top_p = 1, .logprobs = 5, .target = -1});
  bench_sample("temperature 1", {.temperature = 1, .top_p = 1, .logprobs = -1, .target = -1});
  bench_sample("top_k 50, top_p 0.9",
               {.temperature = 1, .top_p = 0.9f, .top_k = 50, .logprobs = -1, .target = -1});
}

void run(const std::vector<std::string>& names) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    fail("this machine has no CUDA device to measure");
  }
  cudaDeviceProp device{};
  check_cuda(cudaGetDeviceProperties(&device, 0));
  limits.measure();
  fmt::print("{}: {:.0f} GB/s copied, products of {:.0f} (float16) and {:.0f} TFLOP/s (bfloat16)\n",
             device.name, limits.copy() * 1e-9, limits.product(DType::float16) * 1e-12,
             limits.product(DType::bfloat16) * 1e-12);
  const auto wanted = [&](const char* name) {
    return names.empty() || std::find(names.begin(), names.end(), name) != names.end();
  };
  if (wanted("attention")) {
    bench_opt_attention();
  }
  if (wanted("absorbed")) {
    for (const Model& model : kModels) {
      for (const auto& [rows, context] : {std::pair{128, 512}, {128, 16}, {32, 512}, {8, 1040}}) {
        bench_absorbed(model, rows, context, DType::float16);
      }
    }
  }
  if (wanted("llama-attention")) {
    bench_llama_attention();
  }
  if (wanted("rows")) {
    for (const Model& model : kModels) {
      bench_rows(model);
    }
  }
  if (wanted("llama-rows")) {
    for (const Model& model : kLlamas) {
      bench_llama_rows(model);
      bench_unpack(model);
    }
  }
  if (wanted("sample")) {
    bench_sample();
  }
}

}  // namespace
}  // namespace poise::bench

int main(int argc, char** argv) {
  try {
    poise::bench::run({argv + 1, argv + argc});
    return 0;
  } catch (const std::exception& trouble) {
    fmt::print(stderr, "{}\n", trouble.what());
    return static_cast<int>(poise::Exit::cannot_start);
  }
}
