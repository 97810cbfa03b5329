#include <algorithm>
#include <cmath>

#include "kernels/cpu/kernels_cpu.h"
#include "kernels/cpu/logits.h"
#include "kernels/philox.h"

namespace poise::cpu {
namespace {

constexpr float kGreedyBelow = 1e-5f;  // vLLM's

std::int32_t draw_token(const SampleRow& row, Logits logits, const GatheredLogits& room) {
  logits.scale = 1.0f / row.temperature;
  Kept kept;
  if (row.top_k > 0 && row.top_k < logits.count) {
    kept = keep_best(&logits, row.top_k, room);
  }
  if (row.top_p < 1.0f) {
    kept = keep_mass(&logits, kept, static_cast<double>(row.top_p), room);
  }
  return draw(logits, kept, uniform(row.seed, row.step));
}

void sample_row(const SampleRow& row, const float* data, std::int32_t count,
                const GatheredLogits& room, SampledRow* out) {
  const LaneKernels& kernels = active_kernels();
  *out = {};
  const LogitScan scan = kernels.scan_logits(data, count);
  if (!scan.finite) {
    out->token = -1;
    return;
  }
  const Logits logits{kernels, data, nullptr, count, scan.maximum, 1.0f};
  if (row.target >= 0) {
    out->token = row.target;
  } else if (row.temperature < kGreedyBelow) {
    out->token = scan.argmax;
  } else {
    out->token = draw_token(row, logits, room);
  }
  if (row.logprobs < 0 && row.target < 0) {
    return;
  }
  const double log_mass = std::log(logits.mass_at_least(kLowestLogit));
  const auto logprob = [&](std::int32_t id) {
    return static_cast<float>(static_cast<double>(data[id] - scan.maximum) - log_mass);
  };
  out->logprob = logprob(out->token);
  if (row.logprobs > 0) {
    out->top_count = best_ids(logits, std::min(row.logprobs, kMaxLogprobs), out->top_token);
    std::transform(out->top_token, out->top_token + out->top_count, out->top_logprob, logprob);
  }
}

}  // namespace

void sample_tokens(const SampleTokens& op, Workers& workers) {
  static_assert(8 * GatheredLogits::kCapacity <= Workers::kScratch.n);
  workers.parallel_for(op.count, [&](std::int64_t i, int worker) {
    const SampleRow& row = op.rows[i];
    auto* scratch = workers.scratch(worker);
    const GatheredLogits room{
        reinterpret_cast<float*>(scratch),
        reinterpret_cast<std::int32_t*>(scratch + 4 * GatheredLogits::kCapacity)};
    sample_row(row, op.logits + static_cast<std::int64_t>(row.row) * op.vocab_size, op.vocab_size,
               room, &op.out[i]);
  });
}

}  // namespace poise::cpu
