#include <fmt/core.h>

#include <random>
#include <vector>

#include "bench/kernels/bench.h"

namespace poise::bench {

void bench_sample_tokens(cpu::Workers& workers, const Ceilings& ceilings) {
  constexpr std::int32_t kVocabulary = 50272;
  constexpr std::int32_t kRows = 64;
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 2.5f);
  std::vector<float> logits(static_cast<std::size_t>(kRows) * kVocabulary);
  for (float& x : logits) {
    x = normal(random);
  }
  struct Setting {
    const char* name;
    float temperature, top_p;
    std::int32_t top_k, logprobs;
  };
  for (const Setting& s :
       {Setting{"greedy", 0, 1, 0, -1}, Setting{"greedy, 5 logprobs", 0, 1, 0, 5},
        Setting{"temperature", 1, 1, 0, -1}, Setting{"top_p 0.95", 0.8f, 0.95f, 0, -1},
        Setting{"top_k 50", 1, 1, 50, -1}, Setting{"top_k 50, top_p 0.9", 1, 0.9f, 50, -1}}) {
    std::vector<SampleRow> rows;
    for (std::int32_t r = 0; r < kRows; ++r) {
      rows.push_back({.row = r,
                      .temperature = s.temperature,
                      .top_p = s.top_p,
                      .top_k = s.top_k,
                      .seed = 1,
                      .step = static_cast<std::uint64_t>(r),
                      .logprobs = s.logprobs,
                      .target = -1});
    }
    std::vector<SampledRow> out(rows.size());
    const double seconds = best_seconds([&] {
      cpu::sample_tokens({out.data(), rows.data(), logits.data(), nullptr, kRows, kVocabulary},
                         workers);
    });
    print_bytes(fmt::format("sample {} x {} {}", kRows, kVocabulary, s.name), seconds,
                static_cast<double>(logits.size()) * 4, ceilings.read_bytes);
  }
}

void bench_workers(cpu::Workers& workers, const Ceilings&) {
  const double seconds = best_seconds([&] {
    for (int i = 0; i < 1000; ++i) {
      workers.parallel_for(workers.threads(), [](std::int64_t, int) {});
    }
  });
  fmt::print("{:<46} {:>10.2f} us\n", "an empty parallel_for", seconds * 1e3);
}

}  // namespace poise::bench
