// llama.cpp's attention on the CPU (ggml_flash_attn_ext) with the shapes of bench/kernels/host_attention_bench.cpp. Compiled and
// run by llama_cpp_attention.py. For each shape one line: key heads, type, seconds of the fastest run, bytes of keys and values.

#include <ggml-cpu.h>
#include <ggml.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace {

constexpr int kSequences = 8, kContext = 1024, kHeads = 32, kHeadDim = 128;
constexpr std::size_t kMoreThanCaches = std::size_t{256} << 20;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr double kSeconds = 0.4;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void measure(int kv_heads, ggml_type type, ggml_threadpool* threads, int count) {
  const std::size_t one = ggml_row_size(type, kHeadDim) * kContext * kv_heads * kSequences;
  const std::size_t copies = std::max<std::size_t>(1, kMoreThanCaches / (2 * one));
  // Of huge pages, as poise's blocks are.
  const std::size_t size = (2 * one * copies + (std::size_t{64} << 20)) / kHugePage * kHugePage;
  void* const place = std::aligned_alloc(kHugePage, size);
  madvise(place, size, MADV_HUGEPAGE);
  ggml_context* const memory =
      ggml_init({.mem_size = size, .mem_buffer = place, .no_alloc = false});
  ggml_tensor* const q = ggml_new_tensor_4d(memory, GGML_TYPE_F32, kHeadDim, 1, kHeads, kSequences);
  std::fill_n(static_cast<float*>(q->data), ggml_nelements(q), 0.01f);
  std::vector<ggml_cgraph*> graphs;  // one for each copy of keys and values
  for (std::size_t copy = 0; copy < copies; ++copy) {
    ggml_tensor* parts[2];
    for (ggml_tensor*& part : parts) {
      part = ggml_new_tensor_4d(memory, type, kHeadDim, kContext, kv_heads, kSequences);
      std::memset(part->data, 0x31, ggml_nbytes(part));
    }
    graphs.push_back(ggml_new_graph(memory));
    ggml_build_forward_expand(
        graphs.back(), ggml_flash_attn_ext(memory, q, parts[0], parts[1], nullptr, 0.0884f, 0, 0));
  }
  ggml_cplan plan = ggml_graph_plan(graphs[0], count, threads);
  std::vector<std::uint8_t> work(plan.work_size + 64);
  plan.work_data = work.data();
  std::size_t next = 0;
  const auto run = [&] {
    if (ggml_graph_compute(graphs[next++ % copies], &plan) != GGML_STATUS_SUCCESS) {
      std::exit(1);
    }
  };
  run();
  double best = 1e30;
  for (const double began = now(); now() - began < kSeconds;) {
    const double before = now();
    run();
    best = std::min(best, now() - before);
  }
  std::printf("%d %s %.9f %zu\n", kv_heads, ggml_type_name(type), best, 2 * one);
  ggml_free(memory);
  std::free(place);
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 1;
  ggml_cpu_init();
  ggml_threadpool_params params = ggml_threadpool_params_default(count);
  ggml_threadpool* const threads = ggml_threadpool_new(&params);
  for (const int kv_heads : {32, 8}) {
    for (const ggml_type type :
         {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
      measure(kv_heads, type, threads, count);
    }
  }
  ggml_threadpool_free(threads);
}
